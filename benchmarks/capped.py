"""Samples per second in a memory cap: the official way, sentence-transformers' GradCache at its best, and ours as shipped, in one run.

    python benchmarks/capped.py --json results/capped-h200.json                     # texts of full length
    python benchmarks/capped.py --lengths varied --json results/capped-varied-h200.json

BERT-base towers, queries of 32 and passages of 256 tokens, one hard negative, n_total samples per update. The official way is that of the
paper's own code: n = 8, fp32 without TF32, the whole matrix. CachedMultipleNegativesRankingLoss gets bf16 and several mini-batch sizes,
in samples and in tokens, with gradient checkpointing four times as large ones; its best counts. Ours is contaccum in bf16, drift
correction included, with the n that `contaccum plan` predicts for eager towers, also with CUDA graphs; and with gradient checkpointing
and eight times as many. Both are also shown with compiled and unpadded towers. `--few` leaves out what differs little from another row.
Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contaccum.cli.bench import table
from contaccum.common.provenance import provenance
from contaccum.common.sizes import parse_bytes
from contaccum.experiments.bench import Case, measure_cases
from contaccum.experiments.grid import SIZES
from contaccum.experiments.workloads import Workload, tower_config
from contaccum.memory.limit import limit_memory
from contaccum.memory.plan import plan
from contaccum.methods.config import TrainConfig
from contaccum.report.terminal import show_lines

SEED = 0
OFFICIAL, CACHED, OURS = "official contaccum", "CachedMultipleNegativesRankingLoss", "contaccum (default)"
BY_TOKENS = f"{CACHED} by tokens"  # its mini_batch_num_tokens
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base", choices=SIZES)
    parser.add_argument("--memory", default="11GB")
    parser.add_argument("--n-total", type=int, default=512)
    parser.add_argument("--n-local", type=int, help="ours; left out: as planned")
    parser.add_argument("--bank", type=int, default=1024)
    parser.add_argument("--query-tokens", type=int, default=32)
    parser.add_argument("--passage-tokens", type=int, default=256)
    parser.add_argument("--lengths", default="fixed", choices=("fixed", "varied"))
    parser.add_argument("--minis", type=int, nargs="+", default=[16, 32, 64, 128], help="mini-batches of GradCache")
    parser.add_argument("--few", action="store_true", help="fewer rows")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if cannot := limit_memory(parse_bytes(args.memory)):
        print(f"note: {cannot}")
    torch.set_float32_matmul_precision("highest")  # no TF32
    shape = {name: getattr(args, name) for name in ("n_total", "bank", "query_tokens", "passage_tokens", "lengths")}
    n = args.n_local or planned_size(args.model, args.memory, Workload(**shape, precision="bf16"))
    rows = measure_cases(
        args.model,
        list(cases(Workload(**shape), n, args.minis, args.few)),
        args.rounds,
        args.updates,
        seed=SEED,
        say=partial(print, flush=True),
    )
    show_lines(table(rows))
    result = ratios(rows)
    for name, value in result.items():
        print(f"{name}: {'not measured' if value is None else f'x{value:.2f}'}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"provenance": provenance(SEED), "memory": args.memory, "planned_n": n, "ratios": result, "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def cases(work: Workload, n: int, minis: Sequence[int], few: bool = False) -> Iterable[Case]:
    half = replace(work, precision="bf16")

    def of(way: str, size: int, **options: Any) -> Iterator[Case]:
        if work.n_total % size == 0:
            yield Case(way, replace(half, n_local=size, **options))

    yield Case(OFFICIAL, replace(work, n_local=8))
    for mini in minis:
        yield from of(CACHED, mini)
        yield from of(BY_TOKENS, mini)
        for way in (CACHED, BY_TOKENS):
            yield from of(way, 4 * mini, checkpointing=True)
    yield from of("gradaccum", n)
    yield from of(OURS, n)
    yield from of(OURS, n, graphs=True)
    yield from of(OURS, 8 * n, checkpointing=True)
    yield from of(OURS, 2 * n, graphs=True, compile=True)
    yield from of(OURS, 8 * n, checkpointing=True, compile=True)
    if not few:
        yield from of(OURS, n, unpad=True)
        yield from of(OURS, 8 * n, checkpointing=True, unpad=True)
        yield from of(OURS, n, graphs=True, compile=True)
        yield from of(OURS, 2 * n, unpad=True, compile=True)
        yield from of(OURS, 8 * n, checkpointing=True, unpad=True, compile=True)
    for mini in minis:
        yield from of(BY_TOKENS, 4 * mini, checkpointing=True, unpad=True, compile=True)


def ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """Of samples per second, the best of ours over the best of each."""

    def plain(row: Row) -> bool:
        return not row["compile"] and not row["unpad"]

    def cached(row: Row) -> bool:
        return row["way"] in (CACHED, BY_TOKENS)

    ours = best(rows, lambda row: row["way"] == OURS)
    others = {
        "over the official way (n = 8, fp32)": best(rows, lambda row: row["way"] == OFFICIAL),
        f"over {CACHED} (bf16)": best(rows, lambda row: cached(row) and plain(row) and not row["checkpointing"]),
        f"over {CACHED} (bf16, with gradient checkpointing)": best(rows, lambda row: cached(row) and plain(row) and row["checkpointing"]),
        f"over {CACHED} (bf16, with our compiled and unpadded towers)": best(rows, lambda row: cached(row) and not plain(row)),
    }
    return {name: ours / other if ours and other else None for name, other in others.items()}


def best(rows: Sequence[Row], chosen: Callable[[Row], bool]) -> float | None:
    return max((row["samples_per_second"] for row in rows if chosen(row) and not row["failed"]), default=None)


def planned_size(size: str, memory: str, work: Workload) -> int:
    """The n that `contaccum plan` gives for these towers."""
    with tempfile.TemporaryDirectory() as folder:
        tower_config(size).save_pretrained(folder)
        config = TrainConfig(
            model=folder,
            memory=memory,
            n_total=work.n_total,
            bank=work.bank,
            hard_negatives=work.hard_negatives,
            max_seq_length=work.passage_tokens,
            precision=work.precision,
        )
        return plan(config, work.query_tokens, alternatives=False).config.n_local


if __name__ == "__main__":
    main()
