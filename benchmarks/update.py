"""Time and memory of one update by bank and by samples per update: ours, gradient accumulation, GradCache, sentence-transformers' losses
and the paper's own way.

    python benchmarks/update.py --json results/update-h200.json
    python benchmarks/update.py --models bert-base minilm-l6 --n-local 8 32 --precisions fp32 --rounds 2 --json results/update-h200.json
    python benchmarks/update.py --draw results/update-h200.json     # docs/update-bert-base-n8-by-bank-fp32.svg, .png, ...

BERT-base towers, texts of 256 tokens, one hard negative, n = 8. By bank: 512 samples per update. By samples: a bank of 1,024, fp32; what
was measured by bank is not measured again.
Ways without a bank are measured once; contaccum with the drift correction (our default) and the paper's own way, whose whole matrix would
take 34 GB, up to a bank of 8,192. Towers run eagerly, as they do in all of these.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contaccum.cli.bench import table
from contaccum.common.provenance import provenance
from contaccum.experiments.bench import Case, measure_cases
from contaccum.experiments.grid import SIZES
from contaccum.experiments.workloads import VARIANTS, Workload
from contaccum.report.plots import lines
from contaccum.report.series import Series
from contaccum.report.svg import save
from contaccum.report.terminal import show_lines

SEED = 0
BANKS = (1024, 8192, 65536)
TOTALS = (8, 16, 32, 64, 128, 256, 512)
DRAWN = {
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
    parser.add_argument("--models", nargs="+", default=["bert-base"], choices=SIZES)
    parser.add_argument("--n-local", type=int, nargs="+", default=[8], help="samples per micro-batch")
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
    parts = []
    for model, n in itertools.product(args.models, args.n_local):
        works = {precision: Workload(n_local=n, precision=precision, **shape) for precision in PRECISIONS}
        of_banks = [list(by_bank(works[precision], args.n_total, args.banks)) for precision in args.precisions]
        measured = {case for cases in of_banks for case in cases}
        of_samples = [case for case in by_samples(works["fp32"], args.totals, args.banks[0]) if case not in measured]
        parts += [(model, "by_bank", cases) for cases in of_banks] + [(model, "by_samples", of_samples)]
    found: dict[str, list[Row]] = {"by_bank": [], "by_samples": []}
    for model, name, chosen in parts:
        if chosen:
            print(f"{model}, n = {chosen[0].work.n_local}")
            rows = measure_cases(model, chosen, args.rounds, updates=1, seed=SEED, say=partial(print, flush=True))
            show_lines(table(rows))
            found[name] += rows
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps({"provenance": provenance(SEED), **found}, indent=1) + "\n", encoding="utf-8")


def by_bank(work: Workload, n_total: int, banks: Sequence[int]) -> Iterable[Case]:
    for name, way in VARIANTS.items():
        for bank in banks if way.banked else [0]:
            if name not in SQUARE or bank <= SQUARE_UP_TO:
                yield Case(name, replace(work, n_total=n_total, bank=bank))


def by_samples(work: Workload, totals: Sequence[int], bank: int) -> Iterable[Case]:
    for n_total in totals:
        if n_total % work.n_local == 0:
            yield from (Case(name, replace(work, n_total=n_total, bank=bank if way.banked else 0)) for name, way in VARIANTS.items())


def draw(content: dict[str, list[Row]], folder: Path) -> None:
    by_bank = grouped(content["by_bank"])
    for part, x in (("by_bank", "bank"), ("by_samples", "n_total")):
        for (model, n, precision), rows in grouped(content[part]).items():
            banks = sorted({row["bank"] for row in rows if row["banked"]}) if x == "bank" else []
            if x == "n_total":
                rows = rows + of_one_bank(by_bank.get((model, n, precision), []), rows)
            figure = drawn(rows, x, banks)
            if banks:
                figure.axes[0].set_xscale("log", base=2)
                figure.axes[0].set_xticks(banks, [f"{bank:,}" for bank in banks])
            save(figure, folder, f"update-{model}-n{n}-{part.replace('_', '-')}-{precision}")


def of_one_bank(rows: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """Those of `rows` that continue what was `measured` by samples: with its bank, or of a way that has none."""
    cases, banks = {(row["way"], row["n_total"]) for row in measured}, {row["bank"] for row in measured}
    return [row for row in rows if (row["way"], row["n_total"]) not in cases and (row["bank"] in banks or not row["banked"])]


def grouped(rows: Sequence[Row]) -> dict[tuple[str, int, str], list[Row]]:
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["n_local"], row["precision"]), []).append(row)
    return groups


def drawn(rows: Sequence[Row], x: str, banks: Sequence[int]) -> Any:
    """A line per way of `DRAWN`, without what ran out of memory; over `banks` a way without one is level."""
    found: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in DRAWN}
    for row in rows:
        if row["way"] in DRAWN and not row["failed"]:
            places = banks if banks and not row["banked"] else [row[x]]
            found[row["way"]] += [(place, row["seconds"], min(row["all_seconds"]), max(row["all_seconds"])) for place in places]
    series = [
        Series(slot, DRAWN[way], *([point[i] for point in sorted(points)] for i in range(4)))
        for slot, (way, points) in enumerate(found.items())
        if points
    ]
    figure = lines(series, {"bank": "bank (tuples)", "n_total": "samples per update"}[x], "seconds of an update")
    figure.axes[0].set_ylim(top=1.1 * max(max(one.high) for one in series))
    return figure


if __name__ == "__main__":
    main()
