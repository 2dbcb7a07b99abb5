"""The dual memory bank: two rings of past vectors, first in, first out, with all that a run needs to go on in `state_dict`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from contaccum.core.drift import RunningMeans
from contaccum.core.finite import Finite, largest
from contaccum.core.infonce import CHUNK_SCORES, Blocks, Columns, Past, Rows, over_passages, row_log_sums, score_block
from contaccum.core.table import LazyBuffers, LogSumTable, ring_slots, write_ring


@dataclass(frozen=True)
class Arrivals:
    """A micro-batch that waits for the verdict whether it is finite."""

    rows: Rows
    columns: Columns
    positive_scores: Tensor | None  # (n,); None where they are computed when read
    log_sums: _LogSums | None  # None where no table is kept
    uncorrected: tuple[Tensor, Tensor] | None  # queries and passages before a mean was taken off
    finite: Finite


@dataclass(frozen=True)
class _LogSums:
    """What the table of log-sums must know of a micro-batch, each over the passages of one tuple."""

    old_over_new: Tensor | None  # (r, n) bank rows over new tuples
    new_over_old: Tensor | None  # (n, m) new rows over bank tuples
    new_over_new: Tensor  # (n, n)


class DualBank(LazyBuffers):
    """Holds the last `size` tuples' passages and the last `query_size` tuples' queries, detached.

    Tuple number t (counted from 0 since the last `clear`) lives in slot `t % size` of the passage ring and `t % query_size` of the
    query ring, so `count` is the only pointer. Buffers are allocated by the first `prepare`, with its device and width.

    A pushed micro-batch with NaN or infinite vectors does not enter. The verdict crosses from the device asynchronously and is read
    at the next use of the bank, one micro-step later, when it has long arrived; the device never drains its queue for it.

    With `means`, entries are stored without the mean of their time and read with the present one (see `contaccum.core.drift`), then scaled
    to unit length if `unit`. All of them change with every micro-step, so scores between them are computed anew each time instead of kept.
    """

    _queries: Tensor  # (query_size, d)
    _row_ids: Tensor | None  # (query_size,); None, as are the rows' keys, where they are the columns'
    _row_query_keys: Tensor | None  # (query_size,)
    _positive_keys: Tensor | None  # (query_size,)
    _positive_scores: Tensor  # (query_size,)
    _passages: Tensor  # (size, c, d)
    _column_ids: Tensor  # (size,)
    _column_query_keys: Tensor | None  # (size,)
    _passage_keys: Tensor | None  # (size, c)
    _ages: Tensor  # (size,) in peak-lr updates

    _names = (
        *("_queries", "_row_ids", "_row_query_keys", "_positive_keys", "_positive_scores"),
        *("_passages", "_column_ids", "_column_query_keys", "_passage_keys", "_ages"),
    )

    def __init__(
        self,
        size: int,
        query_size: int | None = None,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
        means: RunningMeans | None = None,
        unit: bool = False,
    ) -> None:
        super().__init__()
        query_size = size if query_size is None else query_size
        if size < 0:
            raise ValueError(f"bank_size={size} is negative; use 0 for no bank")
        if not 0 <= query_size <= size:
            raise ValueError(
                f"query_bank_size={query_size} must lie between 0 and bank_size={size}: an older query would have lost its positive"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"bank_dtype={dtype!r} cannot hold vectors; use torch.float32 or torch.bfloat16")
        self.size, self.query_size, self.scale, self.dtype = size, query_size, scale, dtype
        self.means, self.unit = means, unit
        self.table = LogSumTable(query_size if means is None else 0, size)
        self.use_queries = True  # False: the query bank is switched off for good, passages go on
        self._count = 0
        self.arrivals: Arrivals | None = None
        for name in self._names:
            self.register_buffer(name, None)

    # Reading ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Tuples whose passages are held."""
        return min(self.count, self.size)

    @property
    def count(self) -> int:
        """Tuples that have entered since the last `clear`."""
        self._settle()
        return self._count

    @count.setter
    def count(self, tuples: int) -> None:
        """As if so many had entered; whoever sets it answers for what the buffers hold."""
        self._count = tuples

    @property
    def queries(self) -> Tensor:
        """(r, d), oldest first: those of the newest r tuples."""
        queries = self._oldest_first("_queries", self.query_size)
        return self._as_read(queries, 0) if self.use_queries else queries[:0]

    @property
    def passages(self) -> Tensor:
        """(m, c, d), oldest first; `passages[:, 0]` are the positives."""
        return self._as_read(self._oldest_first("_passages", self.size), 1)

    @property
    def ages(self) -> Tensor:
        """(m,), oldest first: sum of lr / peak lr over the updates since the tuple entered."""
        return self._oldest_first("_ages", self.size)

    @property
    def ages_by_slot(self) -> Tensor:
        """(m,) in the order of `past().columns`. A view."""
        return self._ages[: len(self)]

    @property
    def vector_bytes(self) -> int:
        """What a bank must take at least: each query, positive and hard negative once. 0 before the first micro-batch tells their width."""
        if self._passages is None:
            return 0
        _, c, d = self._passages.shape
        return (self.query_size + self.size * c) * d * self._passages.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes allocated, log-sum table included."""
        return sum(b.nbytes for b in self.buffers())

    def past(self, rows: Rows, columns: Columns) -> Past | None:
        """The bank as a prepared micro-batch sees it, or None while it is empty. Views, not copies: use before the next `push`."""
        m, r = len(self), self._filled_rows()
        if m == 0:
            return None
        past_rows, past_columns = self._rows(0, r), self._columns(0, m)
        if self.means is None:
            return Past(past_rows, past_columns, self.table.log_sums(r), self._positive_scores[:r])
        query_mean, passage_means = self.means.present(rows.queries, columns.passages)
        past_rows = replace(past_rows, queries=self._read(past_rows.queries, query_mean))
        past_columns = replace(past_columns, passages=self._read(past_columns.passages, passage_means))
        positives = past_columns.passages[:, 0] if self.query_size == self.size else past_columns.passages[past_rows.ids % self.size, 0]
        positive_scores = (past_rows.queries * positives[:r]).sum(1).mul_(self.scale)
        return Past(past_rows, past_columns, row_log_sums(past_rows, past_columns, self.scale), positive_scores)

    def _read(self, stored: Tensor, mean: Tensor) -> Tensor:
        read = stored + mean
        return torch.nn.functional.normalize(read, dim=-1) if self.unit else read

    def _as_read(self, stored: Tensor, which: int) -> Tensor:
        """Stored queries (which = 0) or passages (1) with the mean of the newest samples."""
        if self.means is None or not len(stored):
            return stored
        return self._read(stored, self.means.latest(self._passages.shape[1])[which])

    def _filled_rows(self) -> int:
        return min(self._count, self.query_size) if self.use_queries else 0

    def _rows(self, start: int, stop: int) -> Rows:
        part = slice(start, stop)
        if self._row_ids is None:
            columns = self._columns(start, stop)
            positive_keys = None if columns.passage_keys is None else columns.passage_keys[:, 0]
            return Rows(self._queries[part], columns.ids, columns.query_keys, positive_keys)
        return Rows(self._queries[part], self._row_ids[part], _part(self._row_query_keys, part), _part(self._positive_keys, part))

    def _columns(self, start: int, stop: int) -> Columns:
        part = slice(start, stop)
        query_keys, passage_keys = _part(self._column_query_keys, part), _part(self._passage_keys, part)
        return Columns(self._passages[part], self._column_ids[part], query_keys, passage_keys)

    def _oldest_first(self, name: str, capacity: int) -> Tensor:
        filled = min(self.count, capacity)
        buffer: Tensor | None = getattr(self, name)
        if buffer is None:
            return torch.empty(0)
        return buffer.roll(-(self._count % capacity), 0) if 0 < filled == capacity else buffer[:filled].clone()

    # Writing ---------------------------------------------------------------------------------------------------------

    def prepare(self, rows: Rows, columns: Columns) -> None:
        """Be allocated, and on the device of this micro-batch; ValueError if its shape is not the bank's."""
        self._settle()
        if self._passages is None:
            self._allocate(rows, columns)
        self._check(rows, columns)
        if self._passages.device != columns.passages.device:  # as after loading a state
            self.to(columns.passages.device)

    def push(self, rows: Rows, columns: Columns, past: Past | None, blocks: Blocks) -> None:
        """Let a prepared micro-batch enter and the oldest leave. `past` and `blocks` are what its loss was computed from."""
        with torch.no_grad(), torch.autocast(rows.queries.device.type, enabled=False):
            uncorrected, finite = None, self._finite(rows, columns)
            if self.means is not None:
                uncorrected = rows.queries, columns.passages
                query_mean, passage_means = self.means.present(*uncorrected)
                rows = replace(rows, queries=rows.queries - query_mean)
                columns = replace(columns, passages=columns.passages - passage_means)
            rows, columns, blocks = self._as_stored(rows, columns, past, blocks)
            positives = None if self.means is not None else blocks.current_current[:, :, 0].diagonal().clone()
            with_table = self.use_queries and self.table.rows > 0
            log_sums = _log_sums(blocks, columns.passages.shape[1]) if with_table else None
            self.arrivals = Arrivals(rows, columns, positives, log_sums, uncorrected, finite)

    def _finite(self, rows: Rows, columns: Columns) -> Finite:
        if self.means is not None and len(rows) <= self.means.window:  # their means are at hand, and hold every vector
            return Finite(self.means.of_samples(rows.queries, columns.passages))
        return Finite(largest(rows.queries, columns.passages))

    def after_update(self, age: float) -> None:
        """The weights have changed: all tuples held grow older by `age`."""
        if len(self):
            self._ages += age
        if self.means is not None:
            self.means.after_update()

    def clear(self) -> None:
        """Forget all tuples; buffers stay allocated."""
        self.arrivals, self._count = None, 0
        self.table.clear()
        if self.means is not None:
            self.means.clear()

    def release(self) -> None:
        """Forget all tuples and their shape: the next `prepare` allocates anew."""
        self.clear()
        self.use_queries = True
        self._drop_rings()
        self.table.release()
        if self.means is not None:
            self.means.release()

    def _as_stored(self, rows: Rows, columns: Columns, past: Past | None, blocks: Blocks) -> tuple[Rows, Columns, Blocks]:
        """The micro-batch as it will be read back: in the bank's precision, scored anew where that differs."""
        dtype = self._passages.dtype
        stored_rows = Rows(rows.queries.detach().to(dtype), rows.ids, rows.query_keys, rows.positive_keys)
        stored = Columns(columns.passages.detach().to(dtype), columns.ids, columns.query_keys, columns.passage_keys)
        if dtype == columns.passages.dtype or self.table.rows == 0:
            return stored_rows, stored, blocks
        old_rows = past.rows if past is not None and len(past.rows) else None
        return (
            stored_rows,
            stored,
            Blocks(
                current_current=score_block(stored_rows, stored, self.scale),
                current_bank=None if past is None else score_block(stored_rows, past.columns, self.scale),
                bank_current=None if old_rows is None else score_block(old_rows, stored, self.scale),
            ),
        )

    def _settle(self) -> None:
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
        """Cut short, it can be called anew: it writes the same once more. What cannot be written twice, counts, comes last."""
        n, m, r = len(new.columns), min(self._count, self.size), self._filled_rows()
        count = self._count + n
        kept = min(n, self.size)
        start = (count - kept) % self.size
        _write(self._passages, start, new.columns.passages, kept)
        _write(self._column_ids, start, new.columns.ids, kept)
        _write(self._column_query_keys, start, new.columns.query_keys, kept)
        _write(self._passage_keys, start, new.columns.passage_keys, kept)
        for slots in ring_slots(self._ages, start, kept):
            slots.zero_()
        if new.log_sums is not None and new.log_sums.old_over_new is not None:
            values = new.log_sums.old_over_new[:, -kept:]
            self.table.write_columns(start, values, min(count, self.size), lambda a, b: self._rescore(r, self._columns(a, b)))
        if self.use_queries and self.query_size > 0:
            row_start, kept_rows = self._enter_rows(new, count)
            if new.log_sums is not None:
                self._enter_table_rows(new.log_sums, m, start, kept, row_start, kept_rows)
        if new.uncorrected is not None and self.means is not None:
            self.means.add(*new.uncorrected)
        self._count = count

    def _enter_rows(self, new: Arrivals, count: int) -> tuple[int, int]:
        """The new rows' first slot and their number."""
        kept = min(len(new.rows), self.query_size)
        start = (count - kept) % self.query_size
        _write(self._queries, start, new.rows.queries, kept)
        _write(self._row_ids, start, new.rows.ids, kept)
        _write(self._row_query_keys, start, new.rows.query_keys, kept)
        _write(self._positive_keys, start, new.rows.positive_keys, kept)
        _write(self._positive_scores, start, new.positive_scores, kept)
        return start, kept

    def _enter_table_rows(self, log_sums: _LogSums, m: int, start: int, kept: int, row_start: int, kept_rows: int) -> None:
        """Log-sums of the new rows over the `m` columns that were there, and over the `kept` new ones from slot `start` on."""
        over_slots = self.table.blank_rows(kept_rows)
        if log_sums.new_over_old is not None:
            over_slots[:, :m] = log_sums.new_over_old[-kept_rows:]
        write_ring(over_slots[:, : self.size].T, start, log_sums.new_over_new[-kept_rows:, -kept:].T)
        self.table.write_rows(row_start, over_slots)

    def _rescore(self, rows: int, columns: Columns) -> Tensor:
        """(rows, m) log-sums of the first rows over each tuple, a bounded number of scores at a time."""
        step = max(1, CHUNK_SCORES // columns.passages[..., 0].numel())
        parts = [self._rows(0, rows).part(i, i + step) for i in range(0, rows, step)]
        with torch.autocast(columns.passages.device.type, enabled=False):
            return torch.cat([over_passages(score_block(part, columns, self.scale)) for part in parts])

    # Allocation and state --------------------------------------------------------------------------------------------

    def _allocate(self, rows: Rows, columns: Columns) -> None:
        device = columns.passages.device
        computing = columns.passages.dtype
        dtype = self.dtype or computing
        _, c, d = columns.passages.shape

        def ring(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self._drop_rings()  # of a try that ran out of memory
        self._queries, passages = ring(self.query_size, d, dtype=dtype), ring(self.size, c, d, dtype=dtype)
        self._positive_scores, self._ages = ring(self.query_size, dtype=computing), ring(self.size, dtype=torch.float32)
        self._column_ids = ring(self.size)
        self._column_query_keys = None if rows.query_keys is None else ring(self.size)
        self._passage_keys = None if rows.positive_keys is None else ring(self.size, c)
        if self.query_size != self.size:  # else a row's are those of the column slot with its number
            self._row_ids = ring(self.query_size)
            self._row_query_keys = None if rows.query_keys is None else ring(self.query_size)
            self._positive_keys = None if rows.positive_keys is None else ring(self.query_size)
        self.table.allocate(device, computing)
        self._passages = passages  # last: with them it counts as allocated, and memory may run out before

    def _drop_rings(self) -> None:
        for name in self._names:
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
        for name, given, held in (
            ("query_keys", rows.query_keys, self._column_query_keys),
            ("passage_keys", rows.positive_keys, self._passage_keys),
        ):
            if (given is None) != (held is None):
                raise ValueError(
                    f"{name} were {'not given' if given is None else 'given'} now but {'given' if given is None else 'not given'} for the "
                    "tuples in the bank; give them in every micro-batch or in none"
                )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self._settle()
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


def _part(keys: Tensor | None, part: slice) -> Tensor | None:
    return None if keys is None else keys[part]


def _write(ring: Tensor | None, start: int, values: Tensor | None, kept: int) -> None:
    """The newest `kept` of `values` into the ring, where there is one."""
    if ring is not None and values is not None:
        write_ring(ring, start, values[-kept:])


def _log_sums(blocks: Blocks, banked: int) -> _LogSums:
    """Over the first `banked` passages of each tuple: those that enter the bank."""
    old, new = blocks.bank_current, blocks.current_bank
    return _LogSums(
        old_over_new=None if old is None else over_passages(old[..., :banked]),
        new_over_old=None if new is None else over_passages(new),
        new_over_new=over_passages(blocks.current_current[..., :banked]),
    )
