"""Figure 3: bank size against accumulation."""

from __future__ import annotations

from typing import Any

from contaccum.experiments.figures import lines
from contaccum.experiments.grid import PAPERS, Cell, Experiment, Scale


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    return [_cell(n_total, size, scale.n) for n_total in scale.totals for size in scale.banks]


def _cell(n_total: int, size: int, n: int) -> Cell:
    method: dict[str, Any] = {"method": "contaccum", "bank": size, **PAPERS} if size else {"method": "gradaccum"}
    options = {**method, "n_total": n_total, "n_local": min(n, n_total)}
    return Cell(f"N_total = {n_total}, bank = {size}", options, {"N_total": n_total, "bank": size})


EXPERIMENT = Experiment(
    "bank-size",
    "figure 3",
    "A larger bank, more accumulation",
    cells,
    lambda rows, metric: lines(rows, x="bank", y=metric, curve="N_total"),
)
