"""Appendix E: bytes of the bank, predicted and seen, next to the whole score matrix that it spares."""

from __future__ import annotations

from contaccum.experiments.figures import memory_by_bank
from contaccum.experiments.grid import SIZES, Cell, Experiment, Scale


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    width = SIZES[scale.bench_model][1]
    return [
        Cell(f"bank = {size}", {"bank": size, "n": scale.n, "width": width, "hard_negatives": 1}, {"bank": size}, "memory", False)
        for size in scale.memory_banks
    ]


EXPERIMENT = Experiment("memory", "appendix E", "Memory of the bank", cells, lambda rows, metric: memory_by_bank(rows))
