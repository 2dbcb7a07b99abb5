"""Whether a device can be used."""

from __future__ import annotations

import torch


def check_device(device: str | None) -> None:
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}; use cpu, or leave it out") from error
