"""A bank that corrects drift: vectors are stored without the mean of their time and read with the present one.

All of them change with every micro-step. Scores between them are kept where they can be (`contaccum.core.kept_scores`), else computed each
time. Why vectors are corrected: `contaccum.core.drift`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.core.bank import Arrivals
from contaccum.core.common_push import CommonPush
from contaccum.core.comparison import Comparison
from contaccum.core.direct_bank import DirectBank
from contaccum.core.drift import RunningMeans
from contaccum.core.finite import Finite, largest
from contaccum.core.infonce import Blocks, Columns, Gradients, Past, Rows
from contaccum.core.kept_scores import KeptScores, Shift

MOST_SCORES = 134_217_728  # that are kept: of 8,192 tuples with a hard negative each, 512 MB


@dataclass(frozen=True)
class CenteredArrivals(Arrivals):
    queries: Tensor  # (n, d) before a mean was subtracted
    passages: Tensor  # (n, c, d)


class CorrectedBank(DirectBank):
    """Vectors with the present mean of their tower, scaled to unit length where `unit`. `zero_sum` also corrects the gradients."""

    def __init__(
        self,
        size: int,
        query_size: int | None = None,
        how: Comparison | None = None,
        dtype: torch.dtype | None = None,
        unit: bool = False,
        zero_sum: bool = True,
    ) -> None:
        super().__init__(size, query_size, how, dtype)
        self.means = RunningMeans()
        self.pushes = nn.ModuleDict()  # by width
        self.unit, self.zero_sum = unit, zero_sum
        self.kept = KeptScores()

    def read(self, rows: Rows, columns: Columns, past_rows: Rows, past_columns: Columns, width: int | None) -> Past:
        means = self.means.present(rows.queries, columns.passages)
        queries, row_lengths = self._with_mean(past_rows.queries, means[0])
        passages, column_lengths = self._with_mean(past_columns.passages, means[1])
        log_sums = None
        if width is None and self._keeps_scores(len(queries)):
            with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
                self.kept.follow(self, len(queries), len(passages), self._count, self.how.scale)
                log_sums = self.kept.log_sums(self._shift(queries, passages, *means, row_lengths, column_lengths))
        elif not self.use_queries:  # for good: no row is left to score
            self.kept.release()
        return self.compared(replace(past_rows, queries=queries), replace(past_columns, passages=passages), width, log_sums)

    def _with_mean(self, stored: Tensor, mean: Tensor) -> tuple[Tensor, Tensor | None]:
        """Vectors as they are read, and what they were divided by."""
        vectors = stored + mean
        if not self.unit:
            return vectors, None
        lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min_(1e-12)
        return vectors.div_(lengths), lengths

    def _keeps_scores(self, rows: int) -> bool:
        return rows > 0 and self.how.plain and self.query_size * self._passages[..., 0].numel() <= MOST_SCORES

    def _shift(
        self, queries: Tensor, passages: Tensor, query_mean: Tensor, passage_means: Tensor, rows: Tensor | None, columns: Tensor | None
    ) -> Shift:
        """Of scores between stored vectors, for these as they are read and the lengths they were divided by."""
        of_rows, of_columns = queries @ passage_means.T, passages @ query_mean
        if rows is not None and columns is not None:
            columns = columns.squeeze(-1)
            of_rows, of_columns = of_rows * rows, of_columns * columns
        of_columns = of_columns - passage_means @ query_mean
        return Shift(of_rows.mul_(self.how.scale), of_columns.mul_(self.how.scale), rows, columns)

    def rescale(self, how: Comparison) -> None:
        super().rescale(how)
        self.kept.release()

    @property
    def queries(self) -> Tensor:
        """As the loss would read them without a newer sample."""
        stored = super().queries
        return self._with_mean(stored, self.means.latest(self._passages.shape[1])[0])[0] if len(stored) else stored

    @property
    def passages(self) -> Tensor:
        stored = super().passages
        return self._with_mean(stored, self.means.latest(self._passages.shape[1])[1])[0] if len(stored) else stored

    def arriving(self, rows: Rows, columns: Columns, past: Past | None, blocks: Blocks | None) -> CenteredArrivals:
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
        for push in self._pushes():
            push.keep(len(new.queries))
        self.means.add(new.queries, new.passages)

    def prepare(self, rows: Rows, columns: Columns) -> None:
        super().prepare(rows, columns)
        for push in self._pushes():
            push.forget()

    def adjust(self, gradients: Gradients) -> None:
        if not self.zero_sum:
            return
        width = str(gradients.passages.shape[-1])
        if width not in self.pushes:
            self.pushes[width] = CommonPush()
        push = self.pushes[width]
        assert isinstance(push, CommonPush)
        push.take_off(gradients.passages, gradients.divisor)

    def _pushes(self) -> list[CommonPush]:
        return list(self.pushes.values())  # type: ignore[arg-type]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As many pushes as were saved."""
        before = f"{prefix}pushes."
        self.pushes = nn.ModuleDict({name[len(before) :].split(".")[0]: CommonPush() for name in state_dict if name.startswith(before)})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def after_update(self, age: float) -> None:
        super().after_update(age)
        self.means.after_update()

    def after_skipped_update(self) -> None:
        self.admit_arrivals()
        self.means.after_skipped_update()

    def clear(self) -> None:
        super().clear()
        self.kept.count = 0
        self.means.clear()
        for push in self._pushes():
            push.clear()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self.kept.release()
        return super().state_dict(*args, **kwargs)

    def release(self) -> None:
        super().release()
        self.kept.release()
        self.means.release()
        self.pushes.clear()
