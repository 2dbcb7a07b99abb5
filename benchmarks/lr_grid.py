"""MRR by learning rate: results of benchmarks/drift.py on several sets as one table and one figure.

python benchmarks/lr_grid.py acl-l3.jsonl deb-l3.jsonl deb-l6.jsonl --json results/lr-grid-h200.json --folder docs

A file is named SET-ENCODER[-PART].jsonl, `_` for a hyphen in SET; grids.py lists what was run. `--earlier` adds the rows of a table
that this script wrote before.
"contaccum" is the default. In "push over 128" and "push over the micro-batch", of an earlier commit, the mean of the passages' gradients is
over so many samples; the default's is over 16, or the micro-batch where that is larger.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SHOWN = {
    "contaccum": "contaccum, n = 8",
    "gradcache": "GradCache",
    "gradaccum": "gradient accumulation, n = 8",
    "paper": "the paper's bank, n = 8",
}
NAMES = ("data", "encoder", "towers", "similarity", "lr", "method", "n")


def rows_of(files: Sequence[Path], earlier: Sequence[Row] = ()) -> list[Row]:
    """Each cell's MRR by seed."""
    found: dict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
    for row in earlier:
        found[tuple(row[name] for name in NAMES)] += zip(row["seeds"], row["MRR"], strict=True)
    for file in files:
        dataset, encoder = (part.replace("_", "-") for part in file.stem.split("-")[:2])
        for run in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            s = run["setting"]
            towers = f"{'one tower' if s['tied'] else 'two towers'}, {s['pooling']}"
            found[(dataset, encoder, towers, s["similarity"], s["lr"], s["name"], s["n"])].append((s["seed"], round(run["MRR"], 2)))
    return [
        {**dict(zip(NAMES, key, strict=True)), "seeds": [seed for seed, _ in sorted(cell)], "MRR": [value for _, value in sorted(cell)]}
        for key, cell in sorted(found.items())
    ]


def differences(rows: Sequence[Row]) -> list[Row]:
    """Ours with n = 8 less GradCache, by cell, over the seeds that both have."""
    shared = ("data", "encoder", "towers", "similarity", "lr")
    cells: dict[tuple[Any, ...], dict[str, dict[int, float]]] = defaultdict(dict)
    for row in rows:
        if row["method"] == "gradcache" or (row["method"] == "contaccum" and row["n"] == 8):
            cells[tuple(row[name] for name in shared)][row["method"]] = dict(zip(row["seeds"], row["MRR"], strict=True))
    found = []
    for key, by in cells.items():
        ours, theirs = by.get("contaccum", {}), by.get("gradcache", {})
        values = [round(ours[seed] - theirs[seed], 2) for seed in sorted(ours.keys() & theirs.keys())]
        if values:
            cell = dict(zip(shared, key, strict=True))
            found.append({**cell, "over_gradcache": values, "mean": round(statistics.fmean(values), 2)})
    return found


def draw(rows: Sequence[Row], folder: Path) -> None:
    """A panel for each set, encoder and similarity; one tower, the untuned user's case."""
    import matplotlib.pyplot as plt

    from contaccum.report.svg import save

    kept = [row for row in rows if row["towers"] == "one tower, mean" and row["method"] in SHOWN and row["n"] in (8, 128)]
    panels = sorted({(row["data"], row["encoder"], row["similarity"]) for row in kept})
    figure, axes = plt.subplots(2, (len(panels) + 1) // 2, figsize=(12, 6), squeeze=False)
    for axis, panel in zip(axes.T.flatten(), panels, strict=False):
        for colour, (name, label) in enumerate(SHOWN.items()):
            points = sorted(
                (row["lr"], statistics.fmean(row["MRR"]))
                for row in kept
                if (row["data"], row["encoder"], row["similarity"]) == panel and row["method"] == name
            )
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=f"C{colour}", label=label)
        axis.set(title=f"{panel[0]}, MiniLM-{panel[1].upper()}, {panel[2]}", xscale="log", xlabel="learning rate", ylabel="MRR")
        axis.set_xticks([2e-5, 5e-5, 1e-4, 2e-4], ["2e-5", "5e-5", "1e-4", "2e-4"])
        axis.set_xticks([], minor=True)
        best = max(statistics.fmean(row["MRR"]) for row in kept if (row["data"], row["encoder"], row["similarity"]) == panel)
        axis.set_ylim(best - 28, best + 2)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    save(figure, folder, "lr-grid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--commit", required=True, help="which drift.py and package the runs were of")
    parser.add_argument("--earlier", type=Path, help="a table of runs of an earlier commit")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    args = parser.parse_args()
    before = json.loads(args.earlier.read_text(encoding="utf-8")) if args.earlier else {"rows": []}
    rows = rows_of(args.results, before["rows"])
    first = json.loads(args.results[0].read_text(encoding="utf-8").splitlines()[0])["provenance"]
    command = "benchmarks/drift.py run --tokens SET.npz --model ENCODER --grid grid.jsonl"  # the grid is what `rows` lists
    where = {name: value for name, value in first.items() if name != "seed"} | {"command": command, "commit": args.commit}
    if args.earlier:
        where["earlier commits"] = before["provenance"]["commit"]
    parts = {"provenance": where, "over_gradcache": differences(rows), "rows": rows}
    args.json.write_text("{" + ",\n".join(f"{json.dumps(name)}: {_listed(part)}" for name, part in parts.items()) + "}\n", encoding="utf-8")
    draw(rows, args.folder)


def _listed(part: Any) -> str:
    """JSON with a row a line."""
    return json.dumps(part, indent=1) if isinstance(part, dict) else "[\n" + ",\n".join(map(json.dumps, part)) + "\n]"


if __name__ == "__main__":
    main()
