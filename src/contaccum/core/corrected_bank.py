"""A bank that corrects drift: vectors are stored without the mean of their time and read with the present one.

All of them change with every micro-step, so scores between them are computed each time instead of kept. See `contaccum.core.drift`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from contaccum.core.bank import Arrivals
from contaccum.core.common_push import CommonPush
from contaccum.core.comparison import Comparison
from contaccum.core.direct_bank import DirectBank
from contaccum.core.drift import RunningMeans
from contaccum.core.finite import Finite, largest
from contaccum.core.infonce import Blocks, Columns, Gradients, Past, Rows


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

    def read(self, rows: Rows, columns: Columns, past_rows: Rows, past_columns: Columns, width: int | None) -> Past:
        query_mean, passage_means = self.means.present(rows.queries, columns.passages)
        past_rows = replace(past_rows, queries=self._with_mean(past_rows.queries, query_mean))
        past_columns = replace(past_columns, passages=self._with_mean(past_columns.passages, passage_means))
        return self.compared(past_rows, past_columns, width)

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

    def adjust(self, gradients: Gradients) -> None:
        if not self.zero_sum:
            return
        width = str(gradients.passages.shape[-1])
        if width not in self.pushes:
            self.pushes[width] = CommonPush()
        push = self.pushes[width]
        assert isinstance(push, CommonPush)
        push.take_off(gradients.passages)

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

    def clear(self) -> None:
        super().clear()
        self.means.clear()
        for push in self._pushes():
            push.clear()

    def release(self) -> None:
        super().release()
        self.means.release()
        self.pushes.clear()
