"""Whether vectors are finite, without making the host wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Finite:
    """Whether all vectors are finite, asked now and answered later without draining the device's queue."""

    def __init__(self, *tensors: Tensor) -> None:
        largest = torch.stack([torch.linalg.vector_norm(t.detach(), torch.inf) for t in tensors])
        self._event: torch.cuda.Event | None = None
        if largest.is_cuda:
            self._largest = torch.empty(largest.shape, dtype=largest.dtype, pin_memory=True)
            self._largest.copy_(largest, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._largest = largest

    def verdict(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return all(math.isfinite(x) for x in self._largest.tolist())
