"""The dual memory bank: past queries and passages, first in, first out, with all that a run needs to resume in `state_dict`.

`DualBank` counts tuples and lets them enter. How they are read back is what its kinds differ in:

- `contaccum.core.stored_bank.StoredBank` reads vectors as they were stored. Scores between them never change, so a table keeps their sums.
- `contaccum.core.direct_bank.DirectBank` does so too, and computes those scores each time: for comparisons that no table is kept of.
- `contaccum.core.corrected_bank.CorrectedBank` reads them with the present mean of their tower, and keeps what of those scores stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.core.comparison import Comparison
from contaccum.core.finite import Finite
from contaccum.core.infonce import Blocks, Columns, Gradients, Past, Rows
from contaccum.core.rings import Rings

STORED = (None, torch.float32, torch.bfloat16, torch.float16)  # types of vectors; None: float32, for float64 float64


@dataclass(frozen=True)
class Arrivals:
    """A micro-batch, as it will be stored, that waits for the verdict whether it is finite."""

    rows: Rows
    columns: Columns
    finite: Finite


class DualBank(Rings, ABC):
    """Holds the last `size` tuples' passages and the last `query_size` tuples' queries, detached.

    Tuples are numbered from 0 since the last `clear`, so `count` is the only pointer into the rings.

    A pushed micro-batch with NaN or infinite vectors does not enter. The verdict crosses from the device asynchronously and is read
    at the next use of the bank, one micro-step later, when it has long arrived; the device never drains its queue for it.
    """

    def __init__(self, size: int, query_size: int | None = None, how: Comparison | None = None, dtype: torch.dtype | None = None) -> None:
        query_size = size if query_size is None else query_size
        if size < 0:
            raise ValueError(f"bank_size={size} is negative; use 0 for no bank")
        if not 0 <= query_size <= size:
            raise ValueError(
                f"query_bank_size={query_size} must lie between 0 and bank_size={size}: an older query would have lost its positive"
            )
        if dtype not in STORED:
            raise ValueError(f"bank_dtype={dtype!r} cannot hold vectors; use torch.float32 or torch.bfloat16")
        super().__init__(size, query_size, dtype)
        self.how = how or Comparison()
        self.use_queries = True  # False: the query bank is switched off for good, passages go on
        self.arrivals: Arrivals | None = None
        self._count = 0

    # What the kinds differ in --------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, rows: Rows, columns: Columns, past_rows: Rows, past_columns: Columns, width: int | None) -> Past:
        """The stored `past_rows` and `past_columns` as the micro-batch `rows`, `columns` is compared with them, cut to `width`."""

    @abstractmethod
    def arriving(self, rows: Rows, columns: Columns, past: Past | None, blocks: Blocks | None) -> Arrivals:
        """A micro-batch made ready to be stored."""

    def rescale(self, how: Comparison) -> None:
        """Go on with another scale."""
        self.how = how

    def write(self, new: Arrivals, count: int) -> None:
        """Store it as the newest of `count` tuples. Cut short, this can be called again: it writes the same once more."""
        self.write_columns(new.columns, count)
        if self.stores_queries:
            self.write_rows(new.rows, count)

    def adjust(self, gradients: Gradients) -> None:
        """Change a micro-batch's gradients in place, where the kind of bank asks for it."""

    # Reading -------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Tuples whose passages are held."""
        return min(self.count, self.size)

    @property
    def count(self) -> int:
        """Tuples that have entered since the last `clear`."""
        self.admit_arrivals()
        return self._count

    @count.setter
    def count(self, tuples: int) -> None:
        """As if so many had entered; whoever sets it answers for what the buffers hold."""
        self._count = tuples

    @property
    def queries(self) -> Tensor:
        """(r, d), oldest first: those of the newest r tuples."""
        queries = self._oldest_first("_queries", self.query_size)
        return queries if self.use_queries else queries[:0]

    @property
    def passages(self) -> Tensor:
        """(m, c, d), oldest first; `passages[:, 0]` are the positives."""
        return self._oldest_first("_passages", self.size)

    @property
    def ages(self) -> Tensor:
        """(m,), oldest first: sum of lr / peak lr over the updates since the tuple entered."""
        return self._oldest_first("_ages", self.size)

    @property
    def ages_by_slot(self) -> Tensor:
        """(m,) in the order of `past().columns`. A view."""
        return self._ages[: len(self)]

    @property
    def stores_queries(self) -> bool:
        return self.use_queries and self.query_size > 0

    @property
    def filled_rows(self) -> int:
        """Queries that are held and used."""
        return min(self._count, self.query_size) if self.use_queries else 0

    def past(self, rows: Rows, columns: Columns, width: int | None = None) -> Past | None:
        """The bank as a prepared micro-batch sees it, or None while it is empty. Views, not copies: use before the next `push`.

        With a `width` vectors are cut to it and scaled to unit length.
        """
        m, r = len(self), self.filled_rows
        return None if m == 0 else self.read(rows, columns, self.rows(0, r), self.columns(0, m), width)

    def compared(self, rows: Rows, columns: Columns, width: int | None = None, log_sums: Tensor | None = None) -> Past:
        """Bank rows over bank columns, their scores computed now where `log_sums` are not known."""
        rows, columns = self._with_positives(rows, columns)
        if width is not None:
            columns = replace(columns, passages=_cut(columns.passages, width))
            rows = replace(rows, queries=_cut(rows.queries, width), positives=_cut(rows.positives, width))
        assert rows.positives is not None
        positive_scores = (rows.queries * rows.positives).sum(1).mul_(self.how.scale)
        return Past(rows, columns, self.how.constants(rows, columns) if log_sums is None else log_sums, positive_scores)

    def _with_positives(self, rows: Rows, columns: Columns) -> tuple[Rows, Columns]:
        """In computing precision, each row with its own positive."""
        dtype = torch.promote_types(rows.queries.dtype, torch.float32)
        columns = replace(columns, passages=columns.passages.to(dtype))
        slots: Tensor | slice = slice(len(rows)) if self.query_size == self.size else rows.ids % self.size
        guide = None if columns.guide is None else columns.guide[:, 0][slots]
        return replace(rows, queries=rows.queries.to(dtype), positives=columns.passages[:, 0][slots], guide_positives=guide), columns

    @contextmanager
    def without_arrivals(self) -> Iterator[None]:
        """Inside, the micro-batch that waits does not enter."""
        held, self.arrivals = self.arrivals, None
        try:
            yield
        finally:
            self.arrivals = held

    def _oldest_first(self, name: str, capacity: int) -> Tensor:
        filled = min(self.count, capacity)
        buffer: Tensor | None = getattr(self, name)
        if buffer is None:
            return torch.empty(0)
        return buffer.roll(-(self._count % capacity), 0) if 0 < filled == capacity else buffer[:filled].clone()

    # Writing -------------------------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows, columns: Columns) -> None:
        self.admit_arrivals()
        super().prepare(rows, columns)

    def push(self, rows: Rows, columns: Columns, past: Past | None = None, blocks: Blocks | None = None) -> None:
        """Let a prepared micro-batch enter and the oldest leave. `past` and `blocks` are what its loss was computed from, at full width."""
        with torch.no_grad(), torch.autocast(rows.queries.device.type, enabled=False):
            self.arrivals = self.arriving(rows, columns, past, blocks)

    def admit_arrivals(self) -> None:
        """Let the waiting micro-batch enter, if it is finite. Where memory runs out, and again, it goes on waiting for the next use."""
        if self.arrivals is None:
            return
        if self.arrivals.finite.verdict():
            with torch.no_grad():
                self._enter_with_room(self.arrivals)
        self.arrivals = None

    def _enter_with_room(self, new: Arrivals) -> None:
        """Where memory runs out, once more: without what the failed try and PyTorch's cache hold."""
        with suppress(torch.OutOfMemoryError):
            return self._enter(new)
        torch.cuda.empty_cache()
        return self._enter(new)

    def _enter(self, new: Arrivals) -> None:
        count = self._count + len(new.columns)
        self.write(new, count)
        self._count = count  # last, for it cannot be written twice

    def after_update(self, age: float) -> None:
        """The weights have changed: all tuples held grow older by `age`."""
        if len(self):
            self._ages += age

    def after_skipped_update(self) -> None:
        """The optimizer has skipped its step: all is as it was, but the next micro-batch begins another update."""

    def clear(self) -> None:
        """Forget all tuples; buffers stay allocated."""
        self.arrivals, self._count = None, 0

    def release(self) -> None:
        """Forget all tuples and their shape: the next `prepare` allocates again."""
        self.clear()
        self.use_queries = True
        self.drop()

    # State ---------------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self.admit_arrivals()
        return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "size": self.size, "query_size": self.query_size, "use_queries": self.use_queries}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        saved = state["size"], state["query_size"]
        if saved != (self.size, self.query_size):
            raise ValueError(
                f"the saved bank holds {saved[0]} tuples and {saved[1]} queries, this one {self.size} and {self.query_size}; "
                "use the sizes it was saved with"
            )
        self.arrivals, self._count, self.use_queries = None, state["count"], state["use_queries"]


def _cut(vectors: Tensor | None, width: int) -> Tensor:
    assert vectors is not None
    return normalize(vectors[..., :width], dim=-1)
