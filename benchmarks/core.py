"""Time and peak memory of one micro-step's loss (forward and backward): incremental against the full matrix, side by side.

    python benchmarks/core.py                         # bank 128 ... 65,536, n 8 and 32, d 768, one hard negative
    python benchmarks/core.py --bank 8192 --n 8 --json core.json

Each cell runs in a process of its own, so that its peak memory is its own. "Extra" memory is the peak beyond what the process held
with the current vectors alone: it includes the bank. The full matrix is left out where it would not fit in the memory at hand.
"""

from __future__ import annotations

import argparse
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
from contaccum.infonce import Columns, Rows
from contaccum.provenance import provenance

BANKS = (128, 512, 2048, 8192, 16384, 65536)
MICRO_BATCHES = (8, 32)
SEED = 0
MATRIX_COPIES = 4  # scores, log-softmax, its gradient and a product in flight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", type=int, nargs="+", default=list(BANKS))
    parser.add_argument("--n", type=int, nargs="+", default=list(MICRO_BATCHES))
    parser.add_argument("--d", type=int, default=768)
    parser.add_argument("--h", type=int, default=1, help="hard negatives per query")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on measuring each cell, after warm-up")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(measure(**json.loads(args.cell))))
        return
    rows = []
    print(f"{'bank':>7} {'n':>3} | {'incremental':>12} {'extra':>9} | {'full matrix':>12} {'extra':>9} | {'time ratio':>10}")
    for n in args.n:
        for bank in args.bank:
            cell = {"bank": bank, "n": n, "d": args.d, "h": args.h, "device": args.device, "seconds": args.seconds}
            incremental = run_cell({**cell, "way": "incremental"})
            if incremental is None:
                raise SystemExit(f"a bank of {bank:,} does not fit in this device's memory")
            full = run_cell({**cell, "way": "full"}) if may_fit(**cell) else None
            rows.append({**cell, "incremental": incremental, "full": full})
            print(table_row(bank, n, incremental, full), flush=True)
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


def measure(way: str, bank: int, n: int, d: int, h: int, device: str, seconds: float) -> dict[str, float]:
    """Median seconds of a micro-step's loss on a full bank, and peak bytes beyond the current vectors."""
    torch.manual_seed(SEED)
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in ((n, d), (n, d), (n, h, d))]
    torch.stack([(leaf.flatten(0, -2) @ leaf.flatten(0, -2).T).sum() for leaf in leaves]).sum().backward()  # libraries loaded
    base = reset_peak(device)
    step = (incremental_step if way == "incremental" else full_matrix_step)(bank, h, d, leaves, device)
    reset_peak(device)  # filling the bank in large steps is not part of a micro-step
    times: list[float] = []
    for _ in range(3):
        step()
    started = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - started < seconds and len(times) < 2000):
        synchronise(device)
        begin = time.perf_counter()
        step()
        synchronise(device)
        times.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(times), "extra_bytes": peak(device) - base, "repeats": len(times)}


def incremental_step(bank: int, h: int, d: int, leaves: list[Tensor], device: str) -> Callable[[], None]:
    criterion = DualBankInfoNCE(bank_size=bank, scale=1.0 / d, drift_correction=None)  # which reads kept scores
    for _ in range(-(-bank // 64)):  # fill the bank quickly
        size = min(64, bank)
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


def table_row(bank: int, n: int, incremental: dict[str, float], full: dict[str, float] | None) -> str:
    left = f"{bank:7,} {n:3} | {1e3 * incremental['seconds']:9.2f} ms {incremental['extra_bytes'] / 2**20:6.0f} MB"
    if full is None:
        return f"{left} | {'does not fit':>22} |"
    ratio = full["seconds"] / incremental["seconds"]
    return f"{left} | {1e3 * full['seconds']:9.2f} ms {full['extra_bytes'] / 2**20:6.0f} MB | {ratio:9.1f}x"


if __name__ == "__main__":
    main()
