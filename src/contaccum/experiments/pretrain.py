"""Pre-training on random crops: GradCache by batch against banks by size, as many samples each; zero-shot and after fine-tuning.

Not in the paper, which names it as open.
"""

from __future__ import annotations

from typing import Any

from contaccum.experiments.figures import bars
from contaccum.experiments.grid import CORRECTED, Cell, Experiment, Scale

PAIRS = "crops"
ZERO_SHOT, FINE_TUNED = "zero-shot", "fine-tuned"  # before the names of metrics
METRICS = ("MRR@10", "NDCG@10", "NDCG@20", "Top@1", "Top@20")  # those of a data set that are shown: each has two columns
LARGEST_CORRECTED = 8192  # tuples: a correction costs the square of the bank


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    methods = [_gradcache(n_total, scale) for n_total in scale.pretraining.batches]
    for n in scale.pretraining.micro:
        for size in scale.pretraining.banks:
            methods += [_banked("plain bank", n, size, scale, {"drift_correction": None})]
            methods += [_banked("corrected bank", n, size, scale, CORRECTED)] if size <= LARGEST_CORRECTED else []
    rated = [
        Cell(f"{cell.group}, lr = {lr:g}", {**cell.options, "lr": lr}, {**cell.facts, "lr": lr}, cell.kind)
        for cell in methods
        for lr in scale.pretraining.rates
    ]
    return [Cell("no pre-training", {}, {"method": "none"}, "fine-tune"), *rated]


def shown(metrics: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in metrics if name in METRICS)


def fine_tuning(scale: Scale) -> dict[str, Any]:
    """Of all cells alike; the rest is the scale's."""
    return {"method": "gradcache", "n_local": scale.micro[1]}


def _gradcache(n_total: int, scale: Scale) -> Cell:
    options = {"method": "gradcache", "n_total": n_total, "n_local": scale.pretraining.micro[-1], **_samples(scale, n_total)}
    return Cell(f"gradcache, batch = {n_total}", options, {"method": "gradcache", "N_total": n_total}, "pretrain")


def _banked(name: str, n: int, size: int, scale: Scale, correction: dict[str, Any]) -> Cell:
    options = {"method": "contaccum", "n_total": scale.n_total, "n_local": n, "bank": size, **correction, **_samples(scale, scale.n_total)}
    return Cell(f"{name} of {size}, n = {n}", options, {"method": name, "n": n, "bank": size}, "pretrain")


def _samples(scale: Scale, n_total: int) -> dict[str, Any]:
    return {"max_updates": scale.pretraining.samples // n_total, "limit": None}


EXPERIMENT = Experiment(
    "pretrain",
    "not in the paper",
    "Pre-training by batch and by bank",
    cells,
    lambda rows, metric: bars(rows, f"{ZERO_SHOT} {metric}"),
)
