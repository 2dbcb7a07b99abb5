"""Time and peak memory of one micro-step's loss (forward and backward): incremental with the paper's bank; the default's, which keeps the
scores between the bank's entries; the same without, as beyond 134 million scores; and the full matrix, side by side.

    python benchmarks/core.py                         # bank 128 ... 65,536, n 8 and 32, d 768, one hard negative
    python benchmarks/core.py --bank 8192 --n 8 --similarity cosine --json core.json
    python benchmarks/core.py --draw core.json        # core.svg and .png in docs/

Each cell runs in a process of its own, so that its peak memory is its own. "Extra" memory is the peak beyond what the process held
with the current vectors alone: it includes the bank. The last three ways grow with the square of the bank, and are left out beyond
`--square-up-to`; the full matrix also where it would not fit in the memory at hand. On a CPU seconds are those of one core, whatever
else runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contaccum import DualBankInfoNCE, naive_dual_bank_infonce
from contaccum.common.provenance import provenance
from contaccum.core import corrected_bank
from contaccum.core.infonce import Columns, Rows
from contaccum.report.plots import lines
from contaccum.report.series import Series
from contaccum.report.svg import save

BANKS = (128, 512, 2048, 8192, 16384, 65536)
MICRO_BATCHES = (8, 32)
SEED = 0
VARIANTS = {"incremental": "paper's bank", "corrected": "default", "computed": "scores not kept", "full": "full matrix"}
MATRIX_COPIES = 4  # scores, log-softmax, its gradient and a product in flight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", type=int, nargs="+", default=list(BANKS))
    parser.add_argument("--n", type=int, nargs="+", default=list(MICRO_BATCHES))
    parser.add_argument("--d", type=int, default=768)
    parser.add_argument("--h", type=int, default=1, help="hard negatives per query")
    parser.add_argument("--similarity", nargs="+", choices=("dot", "cosine"), default=["dot"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on measuring each cell, after warm-up")
    parser.add_argument("--square-up-to", type=int, default=8192, help="largest bank for the ways that grow with its square")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--draw", type=Path, help="measure nothing: draw this file")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where drawings go")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(measure(**json.loads(args.cell))))
        return
    if args.draw:
        save(drawn(json.loads(args.draw.read_text(encoding="utf-8"))["cells"]), args.folder, args.draw.stem)
        return
    rows = []
    print(f"{'bank':>7} {'n':>3} {'':6}" + "".join(f" | {label:>12} {'extra':>9}" for label in VARIANTS.values()))
    for similarity, n, bank in itertools.product(args.similarity, args.n, args.bank):
        cell = {"bank": bank, "n": n, "d": args.d, "h": args.h, "similarity": similarity, "device": args.device, "seconds": args.seconds}
        incremental = run_cell({**cell, "way": "incremental"})
        if incremental is None:
            raise SystemExit(f"a bank of {bank:,} does not fit in this device's memory")
        ways = [way for way in VARIANTS if way != "incremental" and bank <= args.square_up_to and (way != "full" or may_fit(**cell))]
        found = {way: run_cell({**cell, "way": way}) for way in ways}
        rows.append({**cell, "incremental": incremental, **found})
        print(table_row(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(seed=SEED), "cells": rows}, indent=1) + "\n")


def run_cell(cell: dict[str, Any]) -> dict[str, float] | None:
    """The figures of one cell, measured in a process of its own; None where memory runs out."""
    done = subprocess.run([sys.executable, __file__, "--cell", json.dumps(cell)], capture_output=True, text=True)
    if done.returncode and "out of memory" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(f"cell {cell} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure(way: str, bank: int, n: int, d: int, h: int, similarity: str, device: str, seconds: float) -> dict[str, float]:
    """Median seconds of a micro-step's loss on a full bank, and peak bytes beyond the current vectors."""
    torch.manual_seed(SEED)
    clock = time.perf_counter
    if device == "cpu":
        torch.set_num_threads(1)
        clock = time.process_time
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in ((n, d), (n, d), (n, h, d))]
    torch.stack([(leaf.flatten(0, -2) @ leaf.flatten(0, -2).T).sum() for leaf in leaves]).sum().backward()  # libraries loaded
    base = reset_peak(device)
    step = full_matrix_step(bank, h, d, leaves, device) if way == "full" else banked_step(way, similarity, bank, h, d, leaves, device)
    reset_peak(device)  # filling the bank in large steps is not part of a micro-step
    times: list[float] = []
    for _ in range(3):
        step()
    started = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - started < seconds and len(times) < 2000):
        synchronise(device)
        begin = clock()
        step()
        synchronise(device)
        times.append(clock() - begin)
    return {"seconds": statistics.median(times), "extra_bytes": peak(device) - base, "repeats": len(times)}


def banked_step(way: str, similarity: str, bank: int, h: int, d: int, leaves: list[Tensor], device: str) -> Callable[[], None]:
    if way == "computed":
        corrected_bank.MOST_SCORES = 0
    scale, correction = 20.0 if similarity == "cosine" else 1.0 / d, None if way == "incremental" else "mean+zero-sum"
    criterion = DualBankInfoNCE(bank_size=bank, scale=scale, similarity=similarity, drift_correction=correction)
    size = min(256, bank)
    for _ in range(-(-bank // size)):  # fill the bank quickly
        criterion(*[torch.randn(shape, device=device) for shape in ((size, d), (size, d), (size, h, d))])

    def step() -> None:
        criterion(*leaves).backward()

    return step


def full_matrix_step(bank: int, h: int, d: int, leaves: list[Tensor], device: str) -> Callable[[], None]:
    queries, positives, negatives = leaves
    n = len(queries)
    ids = torch.arange(n + bank, device=device)
    past_rows = Rows(torch.randn(bank, d, device=device), ids[n:])
    past_columns = Columns(torch.randn(bank, 1 + h, d, device=device), ids[n:])

    def step() -> None:
        passages = torch.cat([positives[:, None], negatives], dim=1)
        naive_dual_bank_infonce(Rows(queries, ids[:n]), Columns(passages, ids[:n]), past_rows, past_columns, scale=1.0 / d).backward()

    return step


def may_fit(bank: int, n: int, h: int, device: str, **_: Any) -> bool:
    """A CUDA device says by itself when it does not; a machine that swaps is better not asked."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return device == "cuda" or MATRIX_COPIES * 4 * (bank + n) ** 2 * (1 + h) < available


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> int:
    """Forget earlier peaks; bytes held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return peak(device)


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def table_row(cell: dict[str, Any]) -> str:
    found = [cell.get(way) for way in VARIANTS]
    label = [f"{1e3 * one['seconds']:9.2f} ms {one['extra_bytes'] / 2**20:6.0f} MB" if one else f"{'left out':>22}" for one in found]
    return " | ".join([f"{cell['bank']:7,} {cell['n']:3} {cell['similarity']:6}", *label])


def drawn(cells: list[dict[str, Any]]) -> Any:
    """Milliseconds by bank, both in powers: twice the bank takes twice the time on a line as steep as one to one."""
    series: list[Series] = []
    for way, label in VARIANTS.items():
        for n in sorted({cell["n"] for cell in cells}):
            chosen = [cell for cell in cells if cell["n"] == n and cell.get(way) and cell.get("similarity", "dot") == "dot"]
            points = sorted((cell["bank"], 1e3 * cell[way]["seconds"]) for cell in chosen)
            if points:
                x, y = ([point[i] for point in points] for i in range(2))
                series.append(Series(len(series), f"{label}, n = {n}", x, y, y, y))
    figure = lines(series, "bank (tuples)", "ms of a micro-step's loss", zero=False)
    (axes,) = figure.axes
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    banks = sorted({cell["bank"] for cell in cells})[::-2]
    axes.set_xticks(banks, [f"{bank:,}" for bank in banks])
    return figure


if __name__ == "__main__":
    main()
