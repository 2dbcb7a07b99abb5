"""Results of benchmarks/drift.py: means over seeds, paired tests over queries, and the figures of docs/drift.md.

python benchmarks/drift_summary.py results.jsonl --json results/drift-test-h200.json
python benchmarks/drift_summary.py --draw results/drift-test-h200.json --folder docs
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.report.plots import Bar, bars
from contaccum.report.svg import save
from contaccum.retrieval.compare import paired_comparison

BASELINES = ("dpr-128", "dpr-1024", "gradaccum", "paper")
OURS = "ours"
CELL = ("similarity", "epochs", "n")  # runs that may be compared; the large batches have their own n
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, metavar="TEST")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text(encoding="utf-8"))["methods"], args.folder)
        return
    if args.results is None:
        parser.error("give a results file, or --draw")
    runs = [json.loads(line) for line in args.results.read_text(encoding="utf-8").splitlines()]
    runs = [run for run in runs if run["setting"]["split"] == "test" and "error" not in run]
    result = {"methods": methods(runs), "tests": tests(runs)}
    for row in result["methods"]:
        print(f"{row['method']}, {row['similarity']}, {row['epochs']} epochs, n = {row['n']}, lr {row['lr']:g}: {row['MRR']}")
    for row in result["tests"]:
        cell = f"{row['similarity']}, {row['epochs']} epochs, n = {row['n']}"
        print(f"{cell}, over {row['over']}: {row['difference']:+.2f}, p {row['p_value']:.1g}")
    if args.json:
        where = {name: value for name, value in runs[0]["provenance"].items() if name != "seed"}
        args.json.write_text(json.dumps({"provenance": where, **result}, indent=1) + "\n", encoding="utf-8")


def methods(runs: Sequence[Row]) -> list[Row]:
    """Each method's MRR by seed."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for run in runs:
        setting = run["setting"]
        cell = setting["name"], *(setting[name] for name in (*CELL, "lr", "bank"))
        found[cell].append(run)
    rows = []
    for (name, similarity, epochs, n, lr, bank), same in found.items():
        same.sort(key=lambda run: run["setting"]["seed"])
        values = [round(run["MRR"], 2) for run in same]
        deviation = round(statistics.stdev(values), 2) if len(values) > 1 else None
        spread = {"MRR": values, "mean": round(statistics.fmean(values), 2), "deviation": deviation}
        seeds = [run["setting"]["seed"] for run in same]
        rows.append({"method": name, "similarity": similarity, "epochs": epochs, "n": n, "lr": lr, "bank": bank, "seeds": seeds, **spread})
    return sorted(rows, key=lambda row: (row["similarity"], row["epochs"], -row["mean"]))


def tests(runs: Sequence[Row]) -> list[Row]:
    """Ours against each baseline: the queries' reciprocal ranks, averaged over the seeds that both have, paired by query."""
    by_seed = {(run["setting"]["name"], *(run["setting"][name] for name in CELL), run["setting"]["seed"]): run for run in runs}
    if len(by_seed) < len(runs):
        raise ValueError("some methods have two runs of one seed, of different learning rates or banks; give one of each")
    found = []
    for similarity, epochs, n in sorted({key[1:4] for key in by_seed if key[0] == OURS}):
        for baseline in BASELINES:
            its_n = int(baseline.rpartition("-")[2]) if baseline.startswith("dpr") else n
            pairs = [
                (run, by_seed[(baseline, similarity, epochs, its_n, key[4])])
                for key, run in by_seed.items()
                if key[:4] == (OURS, similarity, epochs, n) and (baseline, similarity, epochs, its_n, key[4]) in by_seed
            ]
            if pairs:
                test = paired_comparison(*(_reciprocal([pair[side] for pair in pairs]) for side in (0, 1)))
                every = all(ours["MRR"] > other["MRR"] for ours, other in pairs)
                cell = {"similarity": similarity, "epochs": epochs, "n": n, "over": baseline, "seeds": len(pairs)}
                found.append({**cell, **test, "every_seed_better": every})
    return found


def _reciprocal(runs: Sequence[Row]) -> dict[str, float]:
    """Query -> mean reciprocal rank over the runs, in percent."""
    columns = zip(*(run["ranks"] for run in runs), strict=True)
    return {str(query): 100 * statistics.fmean(1 / rank for rank in ranks) for query, ranks in enumerate(columns)}


def draw(test: Sequence[Row], folder: Path) -> None:
    for similarity in ("cosine", "dot"):
        rows = [row for row in test if row["similarity"] == similarity and row["epochs"] == 3 and row["n"] in (8, 128, 1024)]
        drawn = [Bar(slot, _title(row), row["mean"], row["deviation"]) for slot, row in enumerate(rows)]
        save(bars(drawn, f"MRR, {similarity}, 3 epochs", lambda value: f"{value:.1f}"), folder, f"drift-test-{similarity}")


def _title(row: Row) -> str:
    names = {"ours": "contaccum, n = 8", "paper": "contaccum of the paper, n = 8", "gradaccum": "gradaccum, n = 8"}
    names |= {"dpr-128": "batch of 128 (GradCache)", "dpr-1024": "batch of 1,024"}
    return names[row["method"]]


if __name__ == "__main__":
    main()
