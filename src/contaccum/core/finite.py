"""Whether vectors are finite, without making the host wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Finite:
    """Whether all values are finite, asked now and answered later without draining the device's queue."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values.detach()
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def verdict(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return math.isfinite(self._values.sum().item())


def largest(*tensors: Tensor) -> Tensor:
    """The largest magnitude in each: not finite where one of its numbers is not."""
    return torch.stack([torch.linalg.vector_norm(tensor.detach(), torch.inf) for tensor in tensors])
