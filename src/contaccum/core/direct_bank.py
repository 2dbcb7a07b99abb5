"""A bank that reads vectors as they were stored, and compares them with each other at every micro-step."""

from __future__ import annotations

from contaccum.core.bank import Arrivals, DualBank
from contaccum.core.finite import Finite, largest
from contaccum.core.infonce import Blocks, Columns, Past, Rows


class DirectBank(DualBank):
    """For what has no table of sums: comparisons other than the plain one."""

    def read(self, rows: Rows, columns: Columns, past_rows: Rows, past_columns: Columns, width: int | None) -> Past:
        return self.compared(past_rows, past_columns, width)

    def arriving(self, rows: Rows, columns: Columns, past: Past | None, blocks: Blocks | None) -> Arrivals:
        return Arrivals(*self.as_stored(rows, columns), Finite(largest(rows.queries, columns.passages)))
