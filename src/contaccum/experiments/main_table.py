"""Table 1: every method at the micro-batches that fit 11, 24 and 80 GB."""

from __future__ import annotations

from typing import Any

from contaccum.experiments.figures import bars
from contaccum.experiments.grid import CORRECTED, PAPERS, Cell, Experiment, Scale


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    found = [
        _cell("dpr", scale.n, {"method": "dpr", "n_total": scale.n, "n_local": scale.n}),
        _cell("prebatch", scale.n, {"method": "prebatch", "n_local": scale.n, "bank": bank, **PAPERS}),
    ]
    for n in scale.micro[:2]:
        found += [
            _cell("gradaccum", n, {"method": "gradaccum", "n_local": n}),
            _cell("gradcache", n, {"method": "gradcache", "n_local": n}),
            _cell("contaccum", n, {"method": "contaccum", "n_local": n, "bank": bank, **PAPERS}),
            _cell("contaccum mean", n, {"method": "contaccum", "n_local": n, "bank": bank, "drift_correction": "mean"}),
            _cell("contaccum mean, zero-sum", n, {"method": "contaccum", "n_local": n, "bank": bank, **CORRECTED}),
        ]
    return [*found, _cell("dpr", scale.n_total, {"method": "dpr", "n_local": scale.n_total})]


def _cell(method: str, n: int, options: dict[str, Any]) -> Cell:
    return Cell(f"{method}, n = {n}", options, {"method": method, "n": n})


EXPERIMENT = Experiment(
    "main",
    "table 1",
    "Methods at the micro-batches that fit small, middle and large memory",
    cells,
    lambda rows, metric: bars(rows, metric),
)
