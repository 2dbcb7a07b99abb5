"""What pushes all passages the same way: the running mean of the gradients on them. Why it is taken off: see `contaccum.core.drift`.

The mean is of the gradients of the sum over rows, before they are divided for a mean: micro-batches of several sizes divide by several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contaccum.core.rings import LazyBuffers

PUSH_WINDOW = 16  # samples that the mean is taken over, or a micro-batch where that is larger


class CommonPush(LazyBuffers):
    """The running mean of the gradients on passages, for vectors of one width."""

    _mean: Tensor | None  # (d,) None until the first gradients have been kept

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_mean", None)
        self.clear()

    def clear(self) -> None:
        self.count = 0  # samples
        self._next: Tensor | None = None  # with the micro-batch that has not entered yet
        if self._mean is not None:
            self._mean.zero_()

    def take_off(self, gradients: Tensor, divisor: int) -> None:
        """Take their running mean, these included, off a micro-batch's gradients on passages (n, c, d), in place. They have been divided.

        At first it is the mean of all so far, later one that forgets: n samples weigh n / `PUSH_WINDOW`. It is kept when the micro-batch
        enters the bank. Gradients that are not finite stay as they are and leave no trace in it.
        """
        n, own = len(gradients), gradients.mean((0, 1)) * divisor
        before = torch.zeros_like(own) if self._mean is None else self._mean
        weight = min(1.0, n / min(self.count + n, PUSH_WINDOW))
        finite = own.isfinite().all()  # stays on the device: nobody waits for it
        self._next = torch.where(finite, before.lerp(own, weight), before)
        gradients.sub_(self._next * finite / divisor)

    def keep(self, samples: int) -> None:
        """The micro-batch has entered. Cut short, this can be called again."""
        if self._next is None:
            return
        if self._mean is None:
            self._mean = self._next
        else:
            self._mean.copy_(self._next)
        self._next, self.count = None, self.count + samples

    def forget(self) -> None:
        """What is next is of a micro-batch that has not entered and never will."""
        self._next = None

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
