"""Exact search in a small collection of a trained model's vectors, and what its command takes beside Python and torch.

    python benchmarks/small_search.py MODEL COLLECTION --passages 8000 --queries 1000 --json results/small-search-cpu.json

A collection's first passages are searched for those that follow them. Results are compared with the definition, `brute_force`. Times are
CPU seconds of the process, medians of the rounds: they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.common.provenance import provenance
from contaccum.data.readers.collections import encoded_texts
from contaccum.retrieval.encode import encode
from contaccum.retrieval.exact import brute_force, exact_search
from contaccum.retrieval.shards import Vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("collection", type=Path)
    parser.add_argument("--passages", type=int, default=8000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--max-seq-length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        passages, queries = (
            encoded(args, folder, *part) for part in (("passages", 0, args.passages), ("queries", args.passages, args.queries))
        )
        rows = np.concatenate(list(queries.arrays()))
        scores, found = exact_search(rows, passages, args.k, "cpu")
        vectors = np.concatenate(list(passages.arrays()))
        expected = brute_force(rows, vectors, passages.ids_at(np.arange(len(passages))), args.k)
        command = ["-m", "contaccum", "search", str(folder / "passages"), str(folder / "queries"), "--output", str(folder / "run.txt")]
        seconds = {
            "the search alone": median(lambda: cpu_seconds(lambda: exact_search(rows, passages, args.k, "cpu")), args.rounds),
            "one float32 product and its k best": median(lambda: cpu_seconds(lambda: plain(rows, vectors, args.k)), args.rounds),
            "contaccum search": median(lambda: of_python([*command, "--k", str(args.k), "--device", "cpu"]), args.rounds),
            "python -c 'import torch'": median(lambda: of_python(["-c", "import torch"]), args.rounds),
            "contaccum --help": median(lambda: of_python(["-m", "contaccum", "--help"]), args.rounds),
        }
    sizes = {"passages": len(passages), "queries": len(queries), "k": args.k, "dim": passages.dim}
    exact = bool(np.array_equal(scores, expected[0]) and np.array_equal(found, expected[1]))
    measured = {**sizes, "equals_brute_force": exact, "cpu_seconds": seconds}
    print(json.dumps(measured, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"provenance": provenance(), **measured}, indent=1) + "\n", encoding="utf-8")


def encoded(args: argparse.Namespace, folder: Path, name: str, start: int, count: int) -> Vectors:
    """Vectors of a part of the collection."""
    file = folder / f"{name}.jsonl"
    part = islice(encoded_texts(args.collection), start, start + count)
    file.write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in part), encoding="utf-8")
    encode(args.model, file, folder / name, queries=name == "queries", max_seq_length=args.max_seq_length, device="cpu", progress=False)
    return Vectors(folder / name)


def plain(queries: Any, vectors: Any, k: int) -> Any:
    return np.argpartition(-(queries.astype(np.float32) @ vectors.astype(np.float32).T), k)[:, :k]


def cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def of_python(words: list[str]) -> float:
    """CPU seconds of a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def median(measured: Callable[[], float], rounds: int) -> float:
    return statistics.median(measured() for _ in range(rounds))


if __name__ == "__main__":
    main()
