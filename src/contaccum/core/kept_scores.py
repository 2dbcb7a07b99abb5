"""Scores between a corrected bank's entries, kept while tuples come and go: a shifting mean changes them in a known manner.

Stored vectors lack the mean of their time and are read with the present one. With stored q and p, present means u and v:

    <q + u, p + v>  =  <q, p> + <q + u, v> + <u, p + v> - <u, v>

1. <q, p> changes only where a tuple enters: a micro-step scores its own rows and columns, O(n m d), instead of all, O(m^2 d);
2. the other terms are a number for each row and one for each column;
3. with unit vectors row and column are each divided by their length.

What is left of the square is to add, to multiply and to exponentiate. Masks are `-inf` in what is kept: they do not change with time.

The scores are no part of a saved state. Whoever saves one calls `release` first, so that a run that goes on and one that is resumed both
compute them from the same vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contaccum.core.infonce import CHUNK_SCORES, score_block
from contaccum.core.rings import LazyBuffers, Rings

_CHUNK = 4_194_304  # scores read at a time


@dataclass(frozen=True)
class Shift:
    """What the present means make of stored vectors."""

    of_rows: Tensor  # (r, c) added to a row's scores with each of a tuple's passages
    of_columns: Tensor  # (m, c) added to a column's scores
    row_lengths: Tensor | None = None  # (r, 1) that scores are divided by
    column_lengths: Tensor | None = None  # (m, c)


class KeptScores(LazyBuffers):
    """Scores of the first `count` tuples that entered, as far as the rings hold them."""

    scores: Tensor | None  # (query slots, passage slots, c)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", None, persistent=False)
        self.count = 0

    def release(self) -> None:
        self.scores, self.count = None, 0

    def follow(self, rings: Rings, r: int, m: int, count: int, scale: float) -> None:
        """Score what has entered since the last call: `count` tuples have by now, r of their queries and m of their passages are held.

        Where memory runs out, the next call does the same once more.
        """
        if self.scores is None:
            c, dtype = rings.columns(0, 0).passages.shape[1], torch.promote_types(rings.rows(0, 0).queries.dtype, torch.float32)
            self.scores, self.count = torch.empty(rings.query_size, rings.size, c, dtype=dtype, device=rings.rows(0, 0).ids.device), 0
        new = count - self.count
        if 2 * new >= r:  # all of them is not more
            self._score(rings, (0, r), (0, m), scale)
        elif new:
            for columns in _slots(self.count, count, rings.size):
                self._score(rings, (0, r), columns, scale)
            for rows in _slots(self.count, count, rings.query_size):
                self._score(rings, rows, (0, m), scale)
        self.count = count

    def _score(self, rings: Rings, rows: tuple[int, int], columns: tuple[int, int], scale: float) -> None:
        assert self.scores is not None
        step = max(1, CHUNK_SCORES // ((columns[1] - columns[0]) * self.scores.shape[2]))
        for start in range(*rows, step):
            stop = min(start + step, rows[1])
            self.scores[start:stop, slice(*columns)] = score_block(rings.rows(start, stop), rings.columns(*columns), scale)

    def log_sums(self, shift: Shift) -> Tensor:
        """(r,) logsumexp of each row over all columns, a bounded number of scores at a time."""
        assert self.scores is not None
        r, m, parts = len(shift.of_rows), len(shift.of_columns), []
        step = max(1, _CHUNK // shift.of_columns.numel())
        for start in range(0, r, step):
            rows = slice(start, min(start + step, r))
            scores = self.scores[rows, :m] + shift.of_columns
            scores += shift.of_rows[rows, None]
            if shift.column_lengths is not None and shift.row_lengths is not None:
                scores.div_(shift.column_lengths).div_(shift.row_lengths[rows, None])
            parts.append(scores.flatten(1).logsumexp(1))
        return torch.cat(parts)


def _slots(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the tuples first, first + 1, ... last - 1 lie in a ring, as far as they do: one piece or two."""
    first = max(first, last - size)
    start, count = first % size, last - first
    yield start, min(start + count, size)
    if start + count > size:
        yield 0, start + count - size
