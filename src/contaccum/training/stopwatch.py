"""Time of the phases of a training step, on the CPU's or the GPU's clock; reading a GPU's clock waits only when it is read."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class Stopwatch:
    """`mark(phase)` at the end of each phase; the time before a mark of any other name belongs to nobody."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str, device: torch.device) -> None:
        if device.type != "cuda":
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def seconds(self, phases: Sequence[str]) -> dict[str, float]:
        """The sum of each phase; waits for the GPU to have done what was marked."""
        sums = dict.fromkeys(phases, 0.0)
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            if phase in sums:
                sums[phase] += _between(before, after)
        return sums


def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event)
    assert isinstance(after, torch.cuda.Event)
    after.synchronize()
    return float(before.elapsed_time(after)) / 1000
