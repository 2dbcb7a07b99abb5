"""Files of `contaccum bench --share` as rows of the table in docs/performance.md.

python benchmarks/other_gpus.py results/shared/*.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HEAD = ["GPU", "memory", "driver, PyTorch", "command", "variant", "samples/s", "over gradaccum", "peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    lines = [HEAD, ["---"] * len(HEAD)]
    for file in parser.parse_args().files:
        lines += rows_of(json.loads(file.read_text(encoding="utf-8")))
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


def rows_of(posted: dict[str, Any]) -> list[list[str]]:
    memory = "" if posted["device_bytes"] is None else f"{posted['device_bytes'] / 1e9:.0f} GB"
    about = [posted["device"], memory, f"{posted['driver'] or 'none'}, {posted['versions']['torch']}", f"`{posted['command']}`"]
    return [[*about, row["way"], *measured(row)] for row in posted["rows"]]


def measured(row: dict[str, Any]) -> list[str]:
    if row["failed"]:
        return [row["failed"], "", ""]
    ratio, peak = row["time_over_gradaccum"], row["peak_bytes"]
    return [f"{row['samples_per_second']:.0f}", "" if ratio is None else f"x{ratio:.2f}", "" if peak is None else f"{peak / 1e9:.2f} GB"]


if __name__ == "__main__":
    main()
