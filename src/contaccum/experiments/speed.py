"""Figure 4: time of one update by samples per update, and by bank."""

from __future__ import annotations

from typing import Any

from contaccum.experiments.figures import time_by
from contaccum.experiments.grid import Cell, Experiment, Scale

VARIANTS = ("gradaccum", "contaccum", "contaccum (default)", "gradcache", "official contaccum")


def cells(scale: Scale, bank: int, hard_negatives: bool) -> list[Cell]:
    queries, passages = scale.bench_tokens
    base: dict[str, Any] = {"size": scale.bench_model, "n_local": scale.n, "query_tokens": queries, "passage_tokens": passages}
    base |= {"rounds": scale.speed_rounds, "updates": scale.speed_updates, "ways": VARIANTS}
    totals = [{**base, "n_total": n_total, "bank": bank} for n_total in scale.speed_totals]
    banks = [{**base, "n_total": scale.n_total, "bank": size} for size in scale.speed_banks if size != bank]
    return [
        Cell(f"N_total = {o['n_total']}, bank = {o['bank']}", o, {"N_total": o["n_total"], "bank": o["bank"]}, "speed", False)
        for o in [*totals, *banks]
    ]


EXPERIMENT = Experiment("speed", "figure 4", "Seconds of one update", cells, lambda rows, metric: time_by(rows))
