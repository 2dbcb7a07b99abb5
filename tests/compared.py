"""A table to compare methods on, and options of a comparison that takes seconds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from conftest import rows

OPTIONS: dict[str, Any] = {"n_total": 16, "n_local": 4, "epochs": 1, "lr": 1e-2, "max_seq_length": 16, "minutes": 0}


def table(folder: Path, count: int = 300, seed: int = 0) -> Path:
    """A CSV whose columns have usual names, with a number beside them."""
    file = folder / "pairs.csv"
    with open(file, "w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(["id", "Question", "answer"])
        writer.writerows([i, f"{row['query']} n{i}", f"{row['positive']} n{i}"] for i, row in enumerate(rows(count, seed=seed)))
    return file
