"""Search against faiss's IndexFlatIP and encode against SentenceTransformer.encode, side by side.

    python benchmarks/retrieval.py search --count 2000000 --json search.json     # 3 GB of fp16 vectors in a scratch folder
    python benchmarks/retrieval.py encode --model MODEL --texts passages.tsv --limit 5000 --json encode.json

Search: random unit vectors in shards of 100,000; each way runs in a process of its own, so that its peak memory is its own. Ours reads
the shards, checks their checksums and searches; faiss has its index in memory before its time starts ("load" tells how long that took).
Encode: the same passages, from texts to vectors; on a CPU in CPU seconds, which do not depend on what else the machine does. Ways take
turns; the median of the rounds is shown.
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
import torch

from contaccum.common.outputs import write_json
from contaccum.common.provenance import provenance
from contaccum.retrieval.shards import ShardEntry, Vectors, write_shard

SEED = 0
SHARD = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "encode", "way"))
    parser.add_argument("--count", type=int, default=2_000_000, help="vectors")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--ways", nargs="+", default=["torch", "IndexFlatIP"], help="torch (contaccum search), IndexFlatIP")
    parser.add_argument("--scratch", type=Path, help="folder for the vectors (default: a temporary one)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="SentenceTransformer to encode with")
    parser.add_argument("--texts", type=Path, help="collection to encode")
    parser.add_argument("--limit", type=int, default=5000, help="its first passages")
    parser.add_argument("--max-seq-length", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if args.what == "way":
        print(json.dumps(one_way(args.ways[0], args.scratch, args.k, args.device)))
        return
    measured = search(args) if args.what == "search" else encode(args)
    result = {"provenance": provenance(SEED), **measured}
    print(json.dumps(measured, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def search(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder = Path(name)
        write_random(folder / "vectors", args.count, args.dim, SEED)
        write_random(folder / "queries", args.queries, args.dim, SEED + 1)
        rounds = [{way: run_way(way, name, args) for way in args.ways} for _ in range(args.rounds)]
        same = {way: float(np.mean(rows_of(folder, way) == rows_of(folder, args.ways[0]))) for way in args.ways}
    sizes = {"count": args.count, "dim": args.dim, "queries": args.queries, "k": args.k, "device": args.device}
    told_peak = matrix_peak(args.device, args.dim) if args.device != "cpu" else None
    found = {way: summed_up([measured[way] for measured in rounds], args) for way in args.ways}
    ratio = found["IndexFlatIP"]["seconds"] / found["torch"]["seconds"] if {"IndexFlatIP", "torch"} <= set(found) else None
    return {**sizes, "ways": found, "same_places": same, "faiss_time_over_ours": ratio, "matrix_product_gigaflops": told_peak}


def run_way(way: str, folder: str, args: argparse.Namespace) -> dict[str, float]:
    words = ["way", "--ways", way, "--scratch", folder, "--k", str(args.k), "--device", args.device]
    result = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def summed_up(rounds: list[dict[str, float]], args: argparse.Namespace) -> dict[str, Any]:
    """Median of the rounds, whose times are all shown."""
    seconds = [measured["seconds"] for measured in rounds]
    middle = statistics.median(seconds)
    rest = {"load_seconds": statistics.median(m["load_seconds"] for m in rounds), "peak_bytes": max(m["peak_bytes"] for m in rounds)}
    return {"seconds": middle, "rounds": seconds, **rest, "gigaflops": 2e-9 * args.count * args.queries * args.dim / middle}


def write_random(folder: Path, count: int, dim: int, seed: int) -> None:
    """Random unit vectors, fp16, as `contaccum encode` would write them."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    entries: list[ShardEntry] = []
    for start in range(0, count, SHARD):
        size = min(SHARD, count - start)
        vectors = generator.standard_normal((size, dim), np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        entries.append(write_shard(folder, len(entries), vectors.astype(np.float16), [str(start + i) for i in range(size)], ""))
    manifest = {"complete": True, "dim": dim, "dtype": "float16", "model_checksum": "random", "normalized": True}
    write_json(folder / "manifest.json", {**manifest, "shards": [vars(entry) for entry in entries]})


def one_way(way: str, folder: Path, k: int, device: str) -> dict[str, float]:
    """Seconds and peak bytes of one way, alone in this process; its results are left in the folder."""
    vectors, queries = Vectors(folder / "vectors"), np.concatenate(list(Vectors(folder / "queries").arrays()))
    load = 0.0
    if way == "IndexFlatIP":
        import faiss

        started = time.perf_counter()
        index = faiss.IndexFlatIP(vectors.dim)
        for _, block in vectors.blocks(SHARD):
            index.add(block.astype(np.float32))
        load = time.perf_counter() - started
        started = time.perf_counter()
        rows = index.search(queries.astype(np.float32), k)[1]
    else:
        from contaccum.retrieval.exact import exact_search

        if device != "cpu":
            torch.ones(1, device=device) @ torch.ones(1, device=device)  # starting CUDA is no part of the search
        started = time.perf_counter()
        rows = exact_search(queries, vectors, k, device)[1]
    seconds = time.perf_counter() - started
    np.save(folder / f"{way}.npy", rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "load_seconds": load, "peak_bytes": peak}


def rows_of(folder: Path, way: str) -> Any:
    return np.load(folder / f"{way}.npy")


def matrix_peak(device: str, dim: int) -> float:
    """GFLOP/s of a large half-precision product with the inner dimension of the search."""
    one, other = (torch.randn(16_384, dim, device=device, dtype=torch.float16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        torch.mm(one, other.T)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2e-9 * 16_384**2 * dim / best


def encode(args: argparse.Namespace) -> dict[str, Any]:
    from contaccum.data.readers.collections import encoded_texts
    from contaccum.retrieval.batches import ahead
    from contaccum.retrieval.encode import WINDOW, make_encoder, stored
    from contaccum.retrieval.model import model_on_device

    if args.model is None or args.texts is None:
        raise SystemExit("give --model and --texts")
    texts = [text for _, text in islice(encoded_texts(args.texts), args.limit)]
    model = model_on_device(args.model, args.device, args.max_seq_length)
    encoder = make_encoder(model, "document", None, None)

    def ours() -> Any:
        windows = (texts[begin : begin + WINDOW] for begin in range(0, len(texts), WINDOW))
        return np.concatenate([stored(encoder.vectors(b), "float16") for b in ahead(encoder.batches(w) for w in windows)])

    def theirs() -> Any:
        return model.encode_document(texts, normalize_embeddings=encoder.normalize)

    ways: dict[str, Callable[[], Any]] = {"contaccum": ours, "SentenceTransformer.encode": theirs}
    for way in ways.values():
        way()  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    clock, results = time.process_time if args.device == "cpu" else time.perf_counter, {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            started = clock()
            results[name] = way()
            seconds[name].append(clock() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    difference = float(np.abs(results["contaccum"].astype(np.float32) - results["SentenceTransformer.encode"]).max())
    rates = {name: len(texts) / value for name, value in medians.items()}
    speedup = medians["SentenceTransformer.encode"] / medians["contaccum"]
    shape = {"texts": len(texts), "device": args.device, "max_seq_length": model.max_seq_length, "precision": encoder.precision}
    return {**shape, "seconds": seconds, "texts_per_second": rates, "speedup": speedup, "largest_difference": difference}


if __name__ == "__main__":
    main()
