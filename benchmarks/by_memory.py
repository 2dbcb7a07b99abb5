"""README's picture: quality by samples in memory, trained by `contaccum train` on what the quickstart leaves behind.

    contaccum quickstart --output runs/quickstart
    python benchmarks/by_memory.py runs/quickstart --json results/by-memory-cpu.json --folder docs

Everything but n is the quickstart's. What has been trained before is not trained again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from contaccum.common.provenance import provenance
from contaccum.comparison.compare import compare
from contaccum.comparison.quickstart import START, Settings
from contaccum.report.svg import save

SIZES = {"gradaccum": (2, 8, 32), "dpr": (128,), "contaccum": (2, 8, 32)}


def measure(quick: Path, output: Path, method: str, n: int) -> dict[str, Any]:
    name, settings = f"{method}-{n}", Settings()
    shape: dict[str, Any] = {**settings.sizes(), "n_local": n, "epochs": settings.epochs, "lr": settings.lr, "minutes": 0}
    model = str(quick / START / "model")
    done = compare(quick / "data", model=model, output=output / name, methods=[method], settings={"tied": False}, **shape)
    found = done.summary.rows[0].metrics
    print(f"{name}: MRR@10 {100 * found['MRR@10']:.1f}", flush=True)
    return {"method": method, "n": n, "metrics": {metric: round(100 * value, 2) for metric, value in found.items()}}


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    for colour, (method, label) in enumerate((("contaccum", "contaccum"), ("gradaccum", "gradient accumulation"))):
        points = [(row["n"], row["metrics"]["MRR@10"]) for row in rows if row["method"] in (method, "dpr" if method == "gradaccum" else "")]
        axis.plot(*zip(*points, strict=True), marker="o", color=f"C{colour}", label=label)
    axis.annotate("one batch of 128", points[-1], xytext=(0, 8), textcoords="offset points", ha="right", fontsize=9)
    axis.set(xscale="log", xlabel="samples in memory at once (128 per update)", ylabel="MRR@10")
    axis.set_xticks([2, 8, 32, 128], ["2", "8", "32", "128"])
    axis.set_xticks([], minor=True)
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.1))
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save(figure, folder, "by-memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path, help="folder of a quickstart")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="for the picture")
    args = parser.parse_args()
    output = args.quickstart / "by-memory"
    rows = [measure(args.quickstart, output, method, n) for method, sizes in SIZES.items() for n in sizes]
    args.json.write_text(json.dumps({"provenance": provenance(Settings().seed), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    draw(rows, args.folder)


if __name__ == "__main__":
    main()
