"""Where a bank's tuples lie: two rings of past vectors, one of queries and one of passages, with their keys, numbers and ages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contaccum.core.infonce import Columns, Rows


class LazyBuffers(nn.Module):
    """A module whose buffers are allocated on first use, and take the shapes of a loaded state."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self._buffers:
            saved = state_dict.get(prefix + name)
            self._buffers[name] = None if saved is None else torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *args)


def ring_slots(ring: Tensor, start: int, count: int) -> list[Tensor]:
    """Views of the slots start, start + 1, ... of dim 0, going round at its end: one piece or two. At most as many as there are slots."""
    first = min(count, len(ring) - start)
    return [ring[start : start + first]] if first == count else [ring[start:], ring[: count - first]]


def write_ring(ring: Tensor, start: int, values: Tensor) -> None:
    """`values` into the slots from `start` on."""
    done = 0
    for slots in ring_slots(ring, start, len(values)):
        slots.copy_(values[done : done + len(slots)])
        done += len(slots)


class Slots(NamedTuple):
    """Where a micro-batch was written: the newest `kept` of its tuples, from slot `start` on."""

    start: int
    kept: int


class Rings(LazyBuffers):
    """Room for the last `size` tuples' passages and the last `query_size` tuples' queries.

    Tuple number t lives in slot `t % size` of the passage ring and `t % query_size` of the query ring. Buffers are allocated by the
    first micro-batch, with its device and width.
    """

    _queries: Tensor  # (query_size, d)
    _row_ids: Tensor | None  # (query_size,); None, as are the rows' keys, where they are the columns'
    _row_query_keys: Tensor | None  # (query_size,)
    _positive_keys: Tensor | None  # (query_size,)
    _passages: Tensor  # (size, c, d)
    _column_ids: Tensor  # (size,)
    _column_query_keys: Tensor | None  # (size,)
    _passage_keys: Tensor | None  # (size, c)
    _ages: Tensor  # (size,) in peak-lr updates
    _guide_queries: Tensor | None  # (query_size, g) where there is a guide
    _guide_passages: Tensor | None  # (size, c, g)

    def __init__(self, size: int, query_size: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.size, self.query_size, self.dtype = size, query_size, dtype
        for name in ("_queries", "_row_ids", "_row_query_keys", "_positive_keys"):
            self.register_buffer(name, None)
        for name in ("_passages", "_column_ids", "_column_query_keys", "_passage_keys", "_ages", "_guide_queries", "_guide_passages"):
            self.register_buffer(name, None)

    @property
    def allocated(self) -> bool:
        return self._passages is not None

    @property
    def vector_bytes(self) -> int:
        """What a bank must take at least: each query, positive and hard negative once. 0 while nothing is allocated."""
        if not self.allocated:
            return 0
        _, c, d = self._passages.shape
        return (self.query_size + self.size * c) * d * self._passages.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in self.buffers())

    def rows(self, start: int, stop: int) -> Rows:
        """The queries in these slots. A view."""
        part = slice(start, stop)
        guide = _part(self._guide_queries, part)
        if self._row_ids is None:
            columns = self.columns(start, stop)
            positive_keys = None if columns.passage_keys is None else columns.passage_keys[:, 0]
            return Rows(self._queries[part], columns.ids, columns.query_keys, positive_keys, guide=guide)
        keys = _part(self._row_query_keys, part), _part(self._positive_keys, part)
        return Rows(self._queries[part], self._row_ids[part], *keys, guide=guide)

    def columns(self, start: int, stop: int) -> Columns:
        """The passages in these slots. A view."""
        part = slice(start, stop)
        query_keys, passage_keys = _part(self._column_query_keys, part), _part(self._passage_keys, part)
        return Columns(self._passages[part], self._column_ids[part], query_keys, passage_keys, _part(self._guide_passages, part))

    def write_columns(self, columns: Columns, count: int) -> Slots:
        """Let them be the newest of `count` tuples that have entered, their age 0."""
        kept = min(len(columns), self.size)
        start = (count - kept) % self.size
        _write(self._passages, start, columns.passages, kept)
        _write(self._column_ids, start, columns.ids, kept)
        _write(self._column_query_keys, start, columns.query_keys, kept)
        _write(self._passage_keys, start, columns.passage_keys, kept)
        _write(self._guide_passages, start, columns.guide, kept)
        for slots in ring_slots(self._ages, start, kept):
            slots.zero_()
        return Slots(start, kept)

    def write_rows(self, rows: Rows, count: int) -> Slots:
        """The same for queries."""
        kept = min(len(rows), self.query_size)
        start = (count - kept) % self.query_size
        _write(self._queries, start, rows.queries, kept)
        _write(self._row_ids, start, rows.ids, kept)
        _write(self._row_query_keys, start, rows.query_keys, kept)
        _write(self._positive_keys, start, rows.positive_keys, kept)
        _write(self._guide_queries, start, rows.guide, kept)
        return Slots(start, kept)

    def as_stored(self, rows: Rows, columns: Columns) -> tuple[Rows, Columns]:
        """A micro-batch as it will be read back: detached, in the rings' precision."""
        dtype = self._passages.dtype
        return (
            replace(rows, queries=rows.queries.detach().to(dtype), positives=None, guide_positives=None),
            replace(columns, passages=columns.passages.detach().to(dtype)),
        )

    def prepare(self, rows: Rows, columns: Columns) -> None:
        """Be allocated, and on the device of this micro-batch; ValueError if its shape is not the rings'."""
        if not self.allocated:
            self.drop()  # of a try that ran out of memory
            self.allocate(rows, columns)
        self._check(rows, columns)
        if self._passages.device != columns.passages.device:  # as after loading a state
            self.to(columns.passages.device)

    def allocate(self, rows: Rows, columns: Columns) -> None:
        device = columns.passages.device
        dtype = self.dtype or columns.passages.dtype
        _, c, d = columns.passages.shape

        def ring(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self._queries, passages = ring(self.query_size, d, dtype=dtype), ring(self.size, c, d, dtype=dtype)
        self._ages = ring(self.size, dtype=torch.float32)
        self._column_ids = ring(self.size)
        self._column_query_keys = None if rows.query_keys is None else ring(self.size)
        self._passage_keys = None if rows.positive_keys is None else ring(self.size, c)
        if self.query_size != self.size:  # else a row's are those of the column slot with its number
            self._row_ids = ring(self.query_size)
            self._row_query_keys = None if rows.query_keys is None else ring(self.query_size)
            self._positive_keys = None if rows.positive_keys is None else ring(self.query_size)
        if rows.guide is not None and columns.guide is not None:
            self._guide_queries = ring(self.query_size, rows.guide.shape[1], dtype=rows.guide.dtype)
            self._guide_passages = ring(self.size, *columns.guide.shape[1:], dtype=columns.guide.dtype)
        self._passages = passages  # last: with them it counts as allocated, and memory may run out before

    def drop(self) -> None:
        """Give all buffers back."""
        for name in self._buffers:
            setattr(self, name, None)

    def _check(self, rows: Rows, columns: Columns) -> None:
        """A ring holds tuples of one shape."""
        _, c, d = columns.passages.shape
        _, held_c, held_d = self._passages.shape
        if d != held_d:
            raise ValueError(
                f"vectors of width {d} do not fit the bank, which holds width {held_d}; call reset() for a new bank, or use bank_size=0"
            )
        if c != held_c:
            raise ValueError(
                f"{c - 1} hard negatives per query do not fit the bank, which holds {held_c - 1}; give as many in every micro-batch, "
                "or set cache_hard_negatives=False"
            )
        for name, now, held in (
            ("query_keys", rows.query_keys, self._column_query_keys),
            ("passage_keys", rows.positive_keys, self._passage_keys),
            ("guide vectors", rows.guide, self._guide_passages),
        ):
            if (now is None) != (held is None):
                raise ValueError(
                    f"{name} were {'not given' if now is None else 'given'} now but {'given' if now is None else 'not given'} for the "
                    "tuples in the bank; give them in every micro-batch or in none"
                )


def _part(keys: Tensor | None, part: slice) -> Tensor | None:
    return None if keys is None else keys[part]


def _write(ring: Tensor | None, start: int, values: Tensor | None, kept: int) -> None:
    """The newest `kept` of `values` into the ring, where there is one."""
    if ring is not None and values is not None:
        write_ring(ring, start, values[-kept:])
