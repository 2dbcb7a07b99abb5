"""A bank whose vectors are read as they were stored: scores between them are constant, and a table keeps their sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contaccum.core.bank import Arrivals, DualBank
from contaccum.core.comparison import Comparison
from contaccum.core.finite import Finite, largest
from contaccum.core.infonce import CHUNK_SCORES, Blocks, Columns, Past, Rows, over_passages, score_block
from contaccum.core.log_sum_table import LogSumTable
from contaccum.core.rings import Slots, write_ring


@dataclass(frozen=True)
class LogSums:
    """What the table must know of a micro-batch, each over the passages of one tuple."""

    old_over_new: Tensor | None  # (r, n) bank rows over new tuples
    new_over_old: Tensor | None  # (n, m) new rows over bank tuples
    new_over_new: Tensor  # (n, n)


@dataclass(frozen=True)
class ScoredArrivals(Arrivals):
    positive_scores: Tensor  # (n,)
    log_sums: LogSums | None  # None where no table is kept


class StoredBank(DualBank):
    """Vectors as they were stored, with the log-sums of every bank row over all bank columns (`LogSumTable`)."""

    _positive_scores: Tensor  # (query_size,)

    def __init__(self, size: int, query_size: int | None = None, how: Comparison | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(size, query_size, how, dtype)
        assert self.how.plain
        self.table = LogSumTable(self.query_size, size)
        self.register_buffer("_positive_scores", None)

    def read(self, rows: Rows, columns: Columns, past_rows: Rows, past_columns: Columns, width: int | None) -> Past:
        if width is not None:
            return self.compared(past_rows, past_columns, width)
        r = len(past_rows)
        return Past(past_rows, past_columns, self.table.log_sums(r), self._positive_scores[:r])

    def arriving(self, rows: Rows, columns: Columns, past: Past | None, blocks: Blocks | None) -> ScoredArrivals:
        finite = Finite(largest(rows.queries, columns.passages))
        computing = columns.passages.dtype
        rows, columns = self.as_stored(rows, columns)
        if blocks is None:
            blocks = self._scored_again(rows, columns, self.past(rows, columns))
        elif self.table.rows and columns.passages.dtype != computing:
            blocks = self._scored_again(rows, columns, past)
        positives = blocks.current_current[:, :, 0].diagonal().clone()
        log_sums = _log_sums(blocks, columns.passages.shape[1]) if self.stores_queries else None
        return ScoredArrivals(rows, columns, finite, positives, log_sums)

    def _scored_again(self, rows: Rows, columns: Columns, past: Past | None) -> Blocks:
        """The scores of vectors that have lost digits, or were compared at other widths."""
        old_rows = past.rows if past is not None and len(past.rows) else None
        return Blocks(
            current_current=score_block(rows, columns, self.how.scale),
            current_bank=None if past is None else score_block(rows, past.columns, self.how.scale),
            bank_current=None if old_rows is None else score_block(old_rows, columns, self.how.scale),
        )

    def write(self, new: Arrivals, count: int) -> None:
        assert isinstance(new, ScoredArrivals)
        m, r = min(self._count, self.size), self.filled_rows  # before it enters
        slots = self.write_columns(new.columns, count)
        if new.log_sums is not None and new.log_sums.old_over_new is not None:
            values = new.log_sums.old_over_new[:, -slots.kept :]
            filled = min(count, self.size)
            self.table.write_columns(slots.start, values, filled, lambda a, b: self._rescore(r, self.columns(a, b)))
        if self.stores_queries:
            row_slots = self.write_rows(new.rows, count)
            write_ring(self._positive_scores, row_slots.start, new.positive_scores[-row_slots.kept :])
            if new.log_sums is not None:
                self._write_table_rows(new.log_sums, m, slots, row_slots)

    def _write_table_rows(self, log_sums: LogSums, m: int, slots: Slots, row_slots: Slots) -> None:
        """Log-sums of the new rows over the `m` columns that were there, and over the new ones."""
        over_slots = self.table.blank_rows(row_slots.kept)
        if log_sums.new_over_old is not None:
            over_slots[:, :m] = log_sums.new_over_old[-row_slots.kept :]
        write_ring(over_slots[:, : self.size].T, slots.start, log_sums.new_over_new[-row_slots.kept :, -slots.kept :].T)
        self.table.write_rows(row_slots.start, over_slots)

    def _rescore(self, rows: int, columns: Columns) -> Tensor:
        """(rows, m) log-sums of the first rows over each tuple, a bounded number of scores at a time."""
        step = max(1, CHUNK_SCORES // columns.passages[..., 0].numel())
        parts = [self.rows(0, rows).part(i, i + step) for i in range(0, rows, step)]
        with torch.autocast(columns.passages.device.type, enabled=False):
            return torch.cat([over_passages(score_block(part, columns, self.how.scale)) for part in parts])

    def rescale(self, how: Comparison) -> None:
        """All that is kept is of the old scale."""
        m, r, factor = len(self), self.filled_rows, how.scale / self.how.scale
        self.how = how
        if r:
            self._positive_scores.mul_(factor)
            self.table.rebuild(r, m, lambda a, b: self._rescore(r, self.columns(a, b)))

    def allocate(self, rows: Rows, columns: Columns) -> None:
        self._positive_scores = torch.zeros(self.query_size, device=columns.passages.device, dtype=columns.passages.dtype)
        self.table.allocate(columns.passages.device, columns.passages.dtype)
        super().allocate(rows, columns)

    def clear(self) -> None:
        super().clear()
        self.table.clear()

    def release(self) -> None:
        super().release()
        self.table.release()


def _log_sums(blocks: Blocks, banked: int) -> LogSums:
    """Over the first `banked` passages of each tuple: those that enter the bank."""
    old, new = blocks.bank_current, blocks.current_bank
    return LogSums(
        old_over_new=None if old is None else over_passages(old[..., :banked]),
        new_over_old=None if new is None else over_passages(new),
        new_over_new=over_passages(blocks.current_current[..., :banked]),
    )
