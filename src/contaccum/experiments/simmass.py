"""Appendix C: the softmax mass that the current queries give to passages of each age."""

from __future__ import annotations

from contaccum.experiments.figures import mass_by_age
from contaccum.experiments.grid import Cell, Experiment, Scale


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    base = {"method": "contaccum", "n_local": scale.n, "bank": bank}
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
)
