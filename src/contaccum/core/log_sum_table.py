"""Log-sums of every bank row over all bank columns, kept exact while columns come and go one micro-step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from contaccum.core.rings import LazyBuffers, write_ring


class LogSumTable(LazyBuffers):
    """`log_sums()[i]` equals the logsumexp of row i over all columns, for a ring of `columns` slots.

    Two levels, about `2 * rows * sqrt(columns)` numbers:

    1. the slots are cut into groups of about sqrt(columns); `coarse[i, g]` is row i's logsumexp over group g;
    2. one group is *open*: the one the ring is overwriting. `fine[i, s]` is row i's logsumexp over its s-th slot alone, so that slots
       are replaced without subtracting anything;
    3. when the ring moves on to another group, that group's surviving slots are scored once more to fill `fine`. Spread over the
       micro-steps that a group lasts, this costs as much as scoring the new columns.
    """

    coarse: Tensor  # (rows, groups)
    fine: Tensor  # (rows, group_size)

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self.group_size = max(1, math.isqrt(max(columns - 1, 0)) + 1)  # ceil(sqrt(columns))
        self.groups = -(-columns // self.group_size)
        self.open_group: int | None
        self.release()

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        self.coarse = torch.full((self.rows, self.groups), -torch.inf, device=device, dtype=dtype)
        self.fine = torch.full((self.rows, self.group_size), -torch.inf, device=device, dtype=dtype)

    def clear(self) -> None:
        self.open_group = None
        if self.coarse is not None:
            self.coarse.fill_(-torch.inf)

    def release(self) -> None:
        self.open_group = None
        self.register_buffer("coarse", None)
        self.register_buffer("fine", None)

    def log_sums(self, rows: int) -> Tensor:
        """(rows,) for the first `rows` row slots."""
        return self.coarse[:rows].logsumexp(1)

    def write_columns(self, start: int, values: Tensor, filled: int, rescore: Callable[[int, int], Tensor]) -> None:
        """Replace the slots from `start` on (cyclic) by new columns, for the rows present.

        `values[i, k]` is row i's logsumexp over the k-th new column; `filled` the number of slots that hold a column now;
        `rescore(a, b)` gives the logsumexp of the rows over each of the slots a..b as they are now.
        """
        rows, done = len(values), 0
        for group, begin, end in self._runs(start, values.shape[1]):
            first = group * self.group_size
            if group != self.open_group:
                self._open(group, begin, end, rows, filled, rescore)
            self.fine[:rows, begin - first : end - first] = values[:, done : done + end - begin]
            self.coarse[:rows, group] = self.fine[:rows].logsumexp(1)
            done += end - begin

    def rebuild(self, rows: int, filled: int, rescore: Callable[[int, int], Tensor]) -> None:
        """Sum all once more: the scores have changed."""
        self.clear()  # the open group is opened again by the next column
        for group, first in enumerate(range(0, filled, self.group_size)):
            self.coarse[:rows, group] = rescore(first, min(first + self.group_size, filled)).logsumexp(1)

    def blank_rows(self, count: int) -> Tensor:
        """(count, slots) of -inf: rows over empty columns, to be filled and written. Has room for whole groups."""
        return self.coarse.new_full((count, self.groups * self.group_size), -torch.inf)

    def write_rows(self, start: int, values: Tensor) -> None:
        """Replace whole rows from row slot `start` on (cyclic) by their logsumexp over each slot, laid out as `blank_rows` does."""
        grouped = values.view(-1, self.groups, self.group_size)
        write_ring(self.coarse, start, grouped.logsumexp(2))
        if self.open_group is not None:
            write_ring(self.fine, start, grouped[:, self.open_group])

    def _open(self, group: int, begin: int, end: int, rows: int, filled: int, rescore: Callable[[int, int], Tensor]) -> None:
        """Fill `fine` with what survives in `group` when the slots begin..end are replaced."""
        first, last = group * self.group_size, min((group + 1) * self.group_size, filled)
        self.open_group = None  # until it is whole: memory may run out
        self.fine.fill_(-torch.inf)
        for a, b in ((first, min(begin, last)), (end, last)):
            if a < b:
                self.fine[:rows, a - first : b - first] = rescore(a, b)
        self.open_group = group

    def _runs(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The slots start, start + 1, ... (cyclic) as (group, begin, end) pieces that lie within one group each."""
        while count:
            group = start // self.group_size
            end = min(start + count, (group + 1) * self.group_size, self.columns)
            yield group, start, end
            count -= end - start
            start = end % self.columns

    def get_extra_state(self) -> dict[str, Any]:
        return {"open_group": self.open_group}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.open_group = state["open_group"]
