"""Time of one update by bank and by samples per update, ours against gradient accumulation, GradCache and the paper's own way.

    python benchmarks/update.py --json results/update-h200.json     # needs a CUDA device; a quarter of an hour on an H200
    python benchmarks/update.py --draw results/update-h200.json     # docs/update-by-bank-fp32.svg, .png, ...

BERT-base towers, texts of 256 tokens, one hard negative, n = 8. By bank: 512 samples per update. By samples: a bank of 1,024, fp32.
gradaccum and gradcache have no bank and are measured once; contaccum with the drift correction (our default) and the paper's own way, whose
whole matrix would take 34 GB, up to a bank of 8,192. Towers run eagerly, as they do in all of these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contaccum.bench import SIZES, WAYS, Case, Workload, measure_cases
from contaccum.cli.base import show_table
from contaccum.cli.bench import table
from contaccum.provenance import provenance
from contaccum.report.plots import lines
from contaccum.report.series import Series
from contaccum.report.svg import save

SEED = 0
BANKS = (1024, 8192, 65536)
TOTALS = (8, 16, 32, 64, 128, 256, 512)
COMPARED = {
    "gradaccum": "gradaccum",
    "contaccum": "contaccum, paper's bank",
    "contaccum (default)": "contaccum, default",
    "gradcache": "gradcache",
    "official contaccum": "paper's own way",
}
SQUARE = ("contaccum (default)", "official contaccum")  # O(bank^2) per micro-step
SQUARE_UP_TO = 8192  # tuples
PRECISIONS = ("fp32", "bf16")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base", choices=SIZES)
    parser.add_argument("--n-total", type=int, default=512, help="samples per update, by bank")
    parser.add_argument("--banks", type=int, nargs="+", default=list(BANKS))
    parser.add_argument("--totals", type=int, nargs="*", default=list(TOTALS), help="samples per update; none: only by bank")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS, help="by bank")
    parser.add_argument("--query-tokens", type=int, default=256)
    parser.add_argument("--passage-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--draw", type=Path, help="measure nothing: draw this file")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where drawings go")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text(encoding="utf-8")), args.folder)
        return
    torch.set_float32_matmul_precision("highest")  # no TF32
    shape = {"query_tokens": args.query_tokens, "passage_tokens": args.passage_tokens}
    parts = [("by_bank", by_bank(args.n_total, args.banks, precision, shape)) for precision in args.precisions]
    parts.append(("by_samples", by_samples(args.totals, args.banks[0], shape)))
    found: dict[str, list[Row]] = {"by_bank": [], "by_samples": []}
    for name, cases in parts:
        if chosen := list(cases):
            rows = measure_cases(args.model, chosen, args.rounds, updates=1, seed=SEED, say=partial(print, flush=True))
            show_table(table(rows))
            found[name] += rows
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps({"provenance": provenance(SEED), **found}, indent=1) + "\n", encoding="utf-8")


def by_bank(n_total: int, banks: Sequence[int], precision: str, shape: dict[str, Any]) -> Iterable[Case]:
    for way in COMPARED:
        for bank in banks if WAYS[way].banked else [0]:
            if way not in SQUARE or bank <= SQUARE_UP_TO:
                yield Case(way, Workload(n_total, bank=bank, precision=precision, **shape))


def by_samples(totals: Sequence[int], bank: int, shape: dict[str, Any]) -> Iterable[Case]:
    for n_total in totals:
        yield from (Case(way, Workload(n_total, bank=bank, **shape)) for way in COMPARED)


def draw(content: dict[str, list[Row]], folder: Path) -> None:
    for precision in sorted({row["precision"] for row in content["by_bank"]}):
        rows = [row for row in content["by_bank"] if row["precision"] == precision]
        banks = sorted({row["bank"] for row in rows if row["banked"]})
        figure = drawn(rows, "bank", banks)
        figure.axes[0].set_xscale("log", base=2)
        figure.axes[0].set_xticks(banks, [f"{bank:,}" for bank in banks])
        save(figure, folder, f"update-by-bank-{precision}")
    if content["by_samples"]:
        save(drawn(content["by_samples"], "n_total", []), folder, "update-by-samples")


def drawn(rows: Sequence[Row], x: str, banks: Sequence[int]) -> Any:
    """A line per way, without those that ran out of memory; over `banks` a way without one is level."""
    found: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in COMPARED}
    for row in rows:
        if not row["failed"]:
            places = banks if banks and not row["banked"] else [row[x]]
            found[row["way"]] += [(place, row["seconds"], min(row["all_seconds"]), max(row["all_seconds"])) for place in places]
    series = [
        Series(slot, COMPARED[way], *([point[i] for point in sorted(points)] for i in range(4)))
        for slot, (way, points) in enumerate(found.items())
        if points
    ]
    figure = lines(series, {"bank": "bank (tuples)", "n_total": "samples per update"}[x], "seconds of an update")
    figure.axes[0].set_ylim(top=1.1 * max(max(one.high) for one in series))
    return figure


if __name__ == "__main__":
    main()
