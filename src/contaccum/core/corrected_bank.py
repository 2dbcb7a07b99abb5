"""A bank that corrects drift: vectors are stored without the mean of their time and read with the present one.

All of them change with every micro-step, so scores between them are computed each time instead of kept. See `contaccum.core.drift`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from contaccum.core.bank import Arrivals, DualBank
from contaccum.core.drift import RunningMeans
from contaccum.core.finite import Finite, largest
from contaccum.core.infonce import Blocks, Columns, Gradients, Past, Rows, row_log_sums


@dataclass(frozen=True)
class CenteredArrivals(Arrivals):
    queries: Tensor  # (n, d) before a mean was subtracted
    passages: Tensor  # (n, c, d)


class CorrectedBank(DualBank):
    """Vectors with the present mean of their tower, scaled to unit length where `unit`. `zero_sum` also corrects the gradients."""

    def __init__(
        self,
        size: int,
        query_size: int | None = None,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
        unit: bool = False,
        zero_sum: bool = True,
    ) -> None:
        super().__init__(size, query_size, scale, dtype)
        self.means = RunningMeans()
        self.unit, self.zero_sum = unit, zero_sum

    def read(self, rows: Rows, columns: Columns, past_rows: Rows, past_columns: Columns) -> Past:
        query_mean, passage_means = self.means.present(rows.queries, columns.passages)
        past_rows = replace(past_rows, queries=self._with_mean(past_rows.queries, query_mean))
        past_columns = replace(past_columns, passages=self._with_mean(past_columns.passages, passage_means))
        positives = past_columns.passages[:, 0] if self.query_size == self.size else past_columns.passages[past_rows.ids % self.size, 0]
        positive_scores = (past_rows.queries * positives[: len(past_rows)]).sum(1).mul_(self.scale)
        return Past(past_rows, past_columns, row_log_sums(past_rows, past_columns, self.scale), positive_scores)

    def _with_mean(self, stored: Tensor, mean: Tensor) -> Tensor:
        vectors = stored + mean
        return normalize(vectors, dim=-1) if self.unit else vectors

    @property
    def queries(self) -> Tensor:
        """As the loss would read them without a newer sample."""
        stored = super().queries
        return self._with_mean(stored, self.means.latest(self._passages.shape[1])[0]) if len(stored) else stored

    @property
    def passages(self) -> Tensor:
        stored = super().passages
        return self._with_mean(stored, self.means.latest(self._passages.shape[1])[1]) if len(stored) else stored

    def arriving(self, rows: Rows, columns: Columns, past: Past | None, blocks: Blocks) -> CenteredArrivals:
        finite, queries, passages = self._finite(rows, columns), rows.queries, columns.passages
        query_mean, passage_means = self.means.present(queries, passages)
        centered = replace(rows, queries=queries - query_mean), replace(columns, passages=passages - passage_means)
        return CenteredArrivals(*self.as_stored(*centered), finite, queries, passages)

    def _finite(self, rows: Rows, columns: Columns) -> Finite:
        if len(rows) <= self.means.window:  # their means are at hand, and hold every vector
            return Finite(self.means.of_samples(rows.queries, columns.passages))
        return Finite(largest(rows.queries, columns.passages))

    def write(self, new: Arrivals, count: int) -> None:
        assert isinstance(new, CenteredArrivals)
        super().write(new, count)
        self.means.add(new.queries, new.passages)

    def adjust(self, gradients: Gradients) -> None:
        if self.zero_sum:
            self.means.balance(gradients.passages)

    def after_update(self, age: float) -> None:
        super().after_update(age)
        self.means.after_update()

    def clear(self) -> None:
        super().clear()
        self.means.clear()

    def release(self) -> None:
        super().release()
        self.means.release()
