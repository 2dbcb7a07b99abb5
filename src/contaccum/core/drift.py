"""Drift correction: bank entries come from older weights; what moved most since then is the mean of each tower's vectors.

1. A micro-batch enters the bank minus the mean of the last `window` samples, itself included.
2. Reading adds the present such mean. Each tower has its own, and hard negatives theirs.

The window follows the training: as many samples as the largest update so far, so that the mean belongs to the present weights. A mean over
many updates would lag behind the vectors it is added to; a mean over the few samples of a short last update of an epoch would be noise. So
would that of updates of fewer than 16 samples, and the mean of one is the sample: nothing of it would be left in the bank.

Why the mean, of all things: a query's gradients on all passages sum to zero. Banked passages get none, so a micro-step's current passages
keep what those should have taken: together they are pulled towards the current queries and pushed away from the banked ones. The two
cancel where both sets of queries have the same mean. Where the queries' mean has moved since, the passages' mean follows it, and in the
same way the queries' mean follows the passages': each feeds the other, and the vectors run away together. Reading the bank with the present
means takes the cause away ("mean"). What is left of the common push is taken off the gradients on the passages ("mean+zero-sum"): over a
whole batch these sum to zero, so nothing is lost. Those on the queries do not, and are left alone: their sum is a signal.

The common push is a running mean of these gradients over about 16 samples. The own mean of a smaller micro-step would be mostly noise, and
that of a single passage its whole gradient; a mean over a whole update lags where weights move fast. A micro-step of 16 samples or more
loses its own mean: its gradients sum to zero. Vectors cut to several widths have a common push for each (`contaccum.core.common_push`).

All this is about passages that answer queries. Where they ask as well (`doc_to_query`, `doc_to_doc`) or queries answer, the sum of the
gradients on passages is a signal too, and "auto" is "mean".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contaccum.core.rings import LazyBuffers, write_ring

CORRECTIONS = ("auto", "mean+zero-sum", "mean")
DEFAULT_WINDOW = 128  # samples, until the first update has ended
MIN_WINDOW, MAX_WINDOW = 16, 1024
_COUNTERS = ("window", "largest_update", "count", "samples_in_update")


def resolve_correction(correction: str | None, past_vectors: bool, one_direction: bool = True) -> str | None:
    """`correction`, "auto" made a name where the bank holds vectors of older weights, else None: there nothing drifts.

    A bank of passages alone (pre-batch negatives) needs it all the more: nothing cancels the common pull on the current passages from the
    start. Without banked queries it costs next to nothing.
    """
    if correction != "auto":
        return correction
    if not past_vectors:
        return None
    return "mean+zero-sum" if one_direction else "mean"


@dataclass(frozen=True)
class _MicroBatchMeans:
    """The means with a micro-batch: computed when the bank is read, used again when it is written."""

    queries: Tensor
    passages: Tensor
    samples: Tensor
    means: Tensor  # (2 or 3, d)
    per_passage: tuple[Tensor, Tensor]

    def of(self, queries: Tensor, passages: Tensor) -> bool:
        return self.queries is queries and self.passages is passages


class RunningMeans(LazyBuffers):
    """Means of the queries, positives and hard negatives of the last `window` samples."""

    _recent: Tensor  # (MAX_WINDOW, 2 or 3, d): query, positive and, where there are any, mean hard negative of each sample

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_recent", None)
        self.clear()

    def clear(self) -> None:
        self._latest_means: _MicroBatchMeans | None = None
        self.window = DEFAULT_WINDOW
        self.largest_update = 0
        self.count = 0
        self.samples_in_update = 0

    def release(self) -> None:
        self.clear()
        self.register_buffer("_recent", None)

    def present(self, queries: Tensor, passages: Tensor) -> tuple[Tensor, Tensor]:
        """Means over the last `window` samples, a micro-batch (n, d), (n, c, d) the newest of them: (d,) and (c, d).

        The bank asks twice for each micro-batch, when it is read and when it is written: the answer is kept until the next.
        """
        return self._of(queries, passages).per_passage

    def of_samples(self, queries: Tensor, passages: Tensor) -> Tensor:
        """The same as (2 or 3, d): of queries, positives and hard negatives."""
        return self._of(queries, passages).means

    def _of(self, queries: Tensor, passages: Tensor) -> _MicroBatchMeans:
        if self._latest_means is None or not self._latest_means.of(queries, passages):
            samples = _samples(queries, passages)
            means = self._mean_with(samples[-self.window :])
            self._latest_means = _MicroBatchMeans(queries, passages, samples, means, (means[0], _per_passage(means, passages.shape[1])))
        return self._latest_means

    def _mean_with(self, new: Tensor) -> Tensor:
        """(2 or 3, d)"""
        total, weight = new.sum(0), len(new)
        for part in self._newest(self.window - len(new)):
            total, weight = total + part.sum(0), weight + len(part)
        return total / weight

    def latest(self, passages_per_tuple: int) -> tuple[Tensor, Tensor]:
        """`present` with nothing newer than what was added."""
        mean = torch.cat(self._newest(self.window)).mean(0)
        return mean[0], _per_passage(mean, passages_per_tuple)

    def add(self, queries: Tensor, passages: Tensor) -> None:
        latest, self._latest_means = self._latest_means, None
        new = latest.samples if latest is not None and latest.of(queries, passages) else _samples(queries, passages)
        if self._recent is None:
            self._recent = new.new_zeros((MAX_WINDOW, *new.shape[1:]))
        kept, count = new[-MAX_WINDOW:], self.count + len(new)
        write_ring(self._recent, (count - len(kept)) % MAX_WINDOW, kept)
        self.count, self.samples_in_update = count, self.samples_in_update + len(new)

    def after_update(self) -> None:
        self.largest_update = max(self.largest_update, min(self.samples_in_update, MAX_WINDOW))
        if self.largest_update:
            self.window = max(self.largest_update, MIN_WINDOW)
        self.samples_in_update = 0

    def after_skipped_update(self) -> None:
        """Its samples are none of the next one's: that would seem the largest so far."""
        self.samples_in_update = 0

    def _newest(self, wanted: int) -> list[Tensor]:
        """The newest samples added, at most `wanted`, in one or two pieces of the ring."""
        size = min(wanted, self.count, MAX_WINDOW)
        if size <= 0:
            return []
        start, end = (self.count - size) % MAX_WINDOW, self.count % MAX_WINDOW or MAX_WINDOW
        return [self._recent[start:end]] if start < end else [self._recent[start:], self._recent[:end]]

    def get_extra_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, state[name])


def _samples(queries: Tensor, passages: Tensor) -> Tensor:
    """(n, 2 or 3, d)"""
    parts = [queries, passages[:, 0]]
    if passages.shape[1] > 1:
        parts.append(passages[:, 1:].mean(1))
    return torch.stack(parts, dim=1)


def _per_passage(mean: Tensor, passages_per_tuple: int) -> Tensor:
    """The means of one tuple's passages: the positive's, then the hard negatives' for each of them."""
    return torch.cat([mean[1:2], mean[2:3].expand(passages_per_tuple - 1, -1)]) if passages_per_tuple > 1 else mean[1:2]
