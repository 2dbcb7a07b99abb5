"""Appendix C: the softmax mass that the current queries give to passages of each age."""

from __future__ import annotations

from typing import Any

from contaccum.experiments.figures import mass_by_age
from contaccum.experiments.grid import PAPERS, Cell, Experiment, Scale


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    base: dict[str, Any] = {"method": "contaccum", "n_local": scale.n, "bank": bank, **PAPERS}
    return [
        Cell("contaccum", base, evaluated=False),
        Cell("contaccum mean", {**base, "drift_correction": "mean"}, evaluated=False),
    ]


EXPERIMENT = Experiment(
    "simmass",
    "appendix C",
    "Softmax mass on negatives by age, per passage",
    cells,
    lambda rows, metric: mass_by_age(rows),
    diagnosed=True,
)
