"""Figure 5 and appendix D: the passage tower's gradient norm over the query tower's, with both banks, one, and one switched off."""

from __future__ import annotations

from typing import Any

from contaccum.experiments.figures import curves
from contaccum.experiments.grid import PAPERS, Cell, Experiment, Scale

SWITCHED_OFF = (0.25, 0.5, 0.75)  # shares of the run after which the query bank is off; the paper's epochs 10, 20, 30 of 40


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    base: dict[str, Any] = {"n_local": scale.n, "bank": bank, **PAPERS}
    found = [
        Cell("dpr, large batch", {"method": "dpr", "n_local": scale.n_total}, evaluated=False),
        Cell("both banks", {**base, "method": "contaccum"}, evaluated=False),
        Cell("both banks, mean", {**base, "method": "contaccum", "drift_correction": "mean"}, evaluated=False),
        Cell("passage bank only", {**base, "method": "prebatch"}, evaluated=False),
    ]
    for share in SWITCHED_OFF:
        options = {**base, "method": "contaccum", "query_bank_stop_share": share}
        found.append(Cell(f"query bank off at {share:.0%}", options, {"switched off": share}, evaluated=False))
    return found


EXPERIMENT = Experiment(
    "gradnorm",
    "figure 5, appendix D",
    "Gradient norm of the passage tower over the query tower's",
    cells,
    lambda rows, metric: curves(rows, "grad_norm_ratio", "update", "gradient norm ratio", level=1.0),
    diagnosed=True,
)
