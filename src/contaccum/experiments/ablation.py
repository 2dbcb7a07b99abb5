"""Table 2: what the query bank, past vectors and accumulation are each worth, with and without hard negatives."""

from __future__ import annotations

from typing import Any

from contaccum.experiments.figures import bars
from contaccum.experiments.grid import CORRECTED, PAPERS, Cell, Experiment, Scale


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    n = scale.n
    variants: dict[str, dict[str, Any]] = {
        "dpr, small batch": {"method": "dpr", "n_total": n, "n_local": n},
        "dpr, large batch": {"method": "dpr", "n_local": scale.n_total},
        "contaccum": {"method": "contaccum", "n_local": n, "bank": bank, **PAPERS},
        "no query bank": {"method": "prebatch", "n_local": n, "bank": bank, **PAPERS},
        "no past encoder": {"method": "contaccum-no-past", "n_local": n, "bank": bank, **PAPERS},
        "neither": {"method": "prebatch-no-past", "n_local": n, "bank": bank, **PAPERS},
        "no accumulation": {"method": "contaccum", "n_total": n, "n_local": n, "bank": bank, **PAPERS},
        "contaccum mean": {"method": "contaccum", "n_local": n, "bank": bank, "drift_correction": "mean"},
        "contaccum mean, zero-sum": {"method": "contaccum", "n_local": n, "bank": bank, **CORRECTED},
    }
    numbers = (1, 0) if hard_negatives else (0,)
    return [
        Cell(
            f"{name}, {'hard negative' if number else 'in-batch only'}",
            {**options, "hard_negatives": number},
            {"variant": name, "hard negatives": number},
        )
        for number in numbers
        for name, options in variants.items()
    ]


EXPERIMENT = Experiment("ablation", "table 2", "Each part's worth", cells, lambda rows, metric: bars(rows, metric))
