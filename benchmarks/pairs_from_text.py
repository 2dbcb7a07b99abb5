"""Pairs a second from plain text, and the memory it takes: preparing, drawing, and reading as a trainer does, by one and by two processes.

    python benchmarks/pairs_from_text.py CORPUS --json results/pairs-from-text-cpu.json

Seconds are of the processor, which on a shared machine says more than those of the clock; both are written. Drawing for a trainer reads
random rows, a batch at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.common.provenance import provenance
from contaccum.data.drawn_pairs import KINDS, drawn_pairs
from contaccum.data.prepare import prepare

BATCHES = (8, 128, 1024)  # rows read at once


def seconds_of(work: Any) -> dict[str, float]:
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - processor}


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reading(folder: Path, kind: str, pairs: int, batch: int, seed: int = 0) -> dict[str, Any]:
    """Random rows, a batch at a time."""
    table, _ = drawn_pairs(folder, kind, "train", None, seed)
    rows = np.random.default_rng(seed).integers(0, len(table), pairs).tolist()
    table.__getitems__(rows[:batch])

    def read() -> None:
        for start in range(0, pairs, batch):
            table.__getitems__(rows[start : start + batch])

    spent = seconds_of(read)
    return {"batch": batch, "pairs": pairs, **spent, "pairs_per_cpu_second": pairs / spent["cpu_seconds"]}


def drawing(folder: Path, kind: str, pairs: int) -> dict[str, Any]:
    """Of rows that are in memory."""
    table, draw = drawn_pairs(folder, kind, "train", None, 0)
    batch = table.with_format(None)[: min(1024, len(table))]
    rounds = -(-pairs // len(batch["text"]))
    spent = seconds_of(lambda: [draw(batch) for _ in range(rounds)])
    made = rounds * len(batch["text"])
    return {"pairs": made, **spent, "pairs_per_cpu_second": made / spent["cpu_seconds"]}


def at_once(folder: Path, kind: str, pairs: int, processes: int) -> dict[str, Any]:
    """By several processes at the same time, as a trainer's workers: their own figures, summed."""
    words = [sys.executable, __file__, "--read", str(folder), "--kind", kind, "--pairs", str(pairs)]
    running = [subprocess.Popen([*words, "--seed", str(seed)], stdout=subprocess.PIPE) for seed in range(processes)]
    found = [json.loads(process.communicate()[0]) for process in running]
    return {
        "processes": processes,
        "pairs_per_second": sum(one["pairs"] / one["seconds"] for one in found),
        "pairs_per_cpu_second": sum(one["pairs_per_cpu_second"] for one in found),
        "peak_bytes": max(one["peak_bytes"] for one in found),
    }


def measure(corpus: Path, kind: str, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "set"
        before = peak_bytes()
        prepared: dict[str, Any] = seconds_of(lambda: prepare(corpus, folder, unsupervised=kind))
        prepared |= {"more_peak_bytes": peak_bytes() - before}
        prepared |= {"rows": json.loads((folder / "prepare.json").read_text())["splits"]["train"]["rows"]}
        return {
            "kind": kind,
            "preparing": prepared,
            "drawing": drawing(folder, kind, pairs),
            "reading": [reading(folder, kind, pairs if batch > 8 else pairs // 4, batch) for batch in BATCHES],
            "at_once": [at_once(folder, kind, pairs, processes) for processes in (1, 2)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="a collection, or plain text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="repeatable; default: those that are drawn by chance")
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--read", type=Path, help="of a prepared set, in this process alone: prints its figures")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.read is not None:
        found = reading(args.read, args.kind[0], args.pairs, 128, args.seed)
        print(json.dumps({**found, "peak_bytes": peak_bytes()}))
        return
    kinds = args.kind or ["crops", "inverse-cloze", "neighbours"]
    rows = [measure(args.corpus, kind, args.pairs) for kind in kinds]
    document = {"provenance": provenance(0), "cores": os.cpu_count(), "corpus": args.corpus.name, "rows": rows}
    args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        by_batch = {one["batch"]: f"{one['pairs_per_cpu_second']:,.0f}" for one in row["reading"]}
        print(row["kind"], f"drawing {row['drawing']['pairs_per_cpu_second']:,.0f} a second, reading {by_batch}", row["at_once"])


if __name__ == "__main__":
    main()
