"""Whether a device can be used."""

from __future__ import annotations

import torch


def check_device(device: str | None) -> None:
    if device is None:
        return
    try:
        torch.zeros(1, device=device).item()  # "meta" has no values to read
    except (RuntimeError, AssertionError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"device {device!r} cannot be used: {why}; use cpu, or leave it out") from error
