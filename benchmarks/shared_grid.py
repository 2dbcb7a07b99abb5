"""A grid of trainings that several processes share: drift.py and pretraining.py.

A line of the grid is a setting as JSON, a line of the output its result. Each process takes the next line that nobody has taken. A result
that is in the output already is not computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from contaccum.common.provenance import provenance

Run = dict[str, Any]
Train = Callable[[Any], Run]  # a setting, a dataclass with a seed, to its result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so many")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)


def compute(a: argparse.Namespace, kind: type[Any], load: Callable[[], Train], told: Callable[[Run], str]) -> None:
    """All settings of the grid, of this `kind`, by this process and others. `load` gives what trains; `told` is said of a result."""
    claims = Path(f"{a.output}.claims")
    if a.until is None:  # not one of the processes that share a grid: claims that lie there are of a run that ended
        shutil.rmtree(claims, ignore_errors=True)
    until = a.until or time.time() + a.seconds
    again = [sys.executable, *sys.argv, "--processes", "1", "--until", str(until)]
    others = [subprocess.Popen(again) for _ in range(a.processes - 1)]
    train, finished = load(), {kind(**run["setting"]) for run in runs_of([a.output])}
    for line in a.grid.read_text(encoding="utf-8").splitlines():
        setting = kind(**json.loads(line))
        if setting in finished or time.time() > until or not _claim(claims, setting):
            continue
        started = time.perf_counter()
        try:
            found = train(setting)
        except Exception:
            found = {"error": traceback.format_exc()}
        result = {"setting": asdict(setting), **found, "total_seconds": time.perf_counter() - started}
        with open(a.output, "a", encoding="utf-8") as results:
            results.write(json.dumps({**result, "provenance": provenance(setting.seed)}) + "\n")
        print(f"{setting}: {found['error'] if 'error' in found else told(found)}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for other in others:
        other.wait()


def _claim(folder: Path, setting: Any) -> bool:
    """Whether no other process has taken it."""
    folder.mkdir(exist_ok=True)
    name = hashlib.sha256(repr(setting).encode()).hexdigest()[:16]
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def runs_of(files: Sequence[Path]) -> list[Run]:
    """Those that came to their end."""
    runs = [json.loads(line) for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    return [run for run in runs if "error" not in run]


def write_table(runs: list[Run], kind: type[Any], summed_up: Callable[[list[Run]], Run], head: Run, output: Path) -> None:
    """A row a line for each setting, by what is not its default, and what `summed_up` says of the runs of its seeds."""
    usual = {field.name: field.default for field in fields(kind) if field.name != "name"}
    cells: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        cells[json.dumps({k: v for k, v in run["setting"].items() if k != "seed" and v != usual.get(k)})].append(run)
    rows = []
    for cell, same in cells.items():
        same.sort(key=lambda run: run["setting"]["seed"])
        seeds = [run["setting"]["seed"] for run in same]
        rows.append({**json.loads(cell), "seeds": seeds, **summed_up(same)})
    where = {k: v for k, v in runs[0]["provenance"].items() if k != "seed"}
    head = {"provenance": where | head.pop("provenance", {}), "defaults": usual, **head}
    listed = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    output.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{listed}\n ]\n}}\n', encoding="utf-8")
