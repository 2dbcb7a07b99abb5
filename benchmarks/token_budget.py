"""`contaccum train` with micro-batches of n_local samples beside micro-batches of as many tokens as n_local of the longest texts have.

    python benchmarks/token_budget.py --json results/token-budget-cpu.json

Random weights and made-up texts: queries of up to 32 tokens, passages whose lengths are spread as those of real collections are (lognormal,
median 60, cut at 256). Both need the same room for their largest micro-batch. They take turns; on a CPU seconds are those of its cores.
"without padding" are the micro-batches that the same budget makes where towers compute no padding: counted, not run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig

from contaccum.common.provenance import provenance
from contaccum.experiments.grid import SIZES
from contaccum.memory.token_budget import budgeted
from contaccum.methods.config import TrainConfig
from contaccum.training.logfile import read_log
from contaccum.training.run import train
from contaccum.training.trial import WORDS, write_model

SEED = 0
QUERY, LONGEST, MEDIAN, SPREAD = 32, 256, 60, 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm-l3", choices=list(SIZES))
    parser.add_argument("--n-total", type=int, default=64)
    parser.add_argument("--n-local", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        layers, width, heads = SIZES[args.model]
        config = BertConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width)
        write_model(Path(name) / "model", config)
        lengths = write_varied(Path(name) / "texts.jsonl", args.n_total * args.updates)
        for n in args.n_local:
            cases = {"samples": {"n_local": n}, "tokens": {"local_tokens": n * (QUERY + LONGEST)}}
            turns: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
            for turn in range(args.rounds):
                for case, options in cases.items():
                    turns[case].append(one_run(Path(name), f"{case}-{n}-{turn}", args, options))
            unpadded = len(budgeted(lengths, n * (QUERY + LONGEST), padded=False)) / args.updates
            rows.append({"n_local": n, **{case: summed_up(runs) for case, runs in turns.items()}, "without padding": unpadded})
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        result = {"model": args.model, "n_total": args.n_total, "updates": args.updates, "precision": args.precision, "rows": rows}
        args.json.write_text(json.dumps({"provenance": provenance(SEED), **result}, indent=1) + "\n", encoding="utf-8")


def one_run(folder: Path, name: str, args: argparse.Namespace, options: dict[str, int]) -> dict[str, Any]:
    config = TrainConfig(
        data=str(folder / "texts.jsonl"),
        model=str(folder / "model"),
        output=str(folder / name),
        tied=True,
        pooling="mean",
        similarity="cosine",
        n_total=args.n_total,
        bank=args.n_total,
        epochs=1,
        precision=args.precision,
        save_every=0,
        diagnose_every=0,
        **options,  # type: ignore[arg-type]
    )
    summary = train(config)
    micro_batches = [line["micro_batches"] for line in read_log(folder / name / "log.jsonl")]
    on_gpu = torch.cuda.is_available()
    return {
        "seconds": summary["seconds" if on_gpu else "cpu_seconds"],
        "micro_batches": statistics.mean(micro_batches),
        "peak_bytes": summary["peak_bytes"],
    }


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median, and all."""
    seconds = [run["seconds"] for run in runs]
    return {**runs[0], "seconds": statistics.median(seconds), "all_seconds": seconds}


def write_varied(file: Path, rows: int) -> list[list[int]]:
    """The tokens of each query and passage."""
    draw, lengths = random.Random(SEED), []

    def text(tokens: int) -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(max(1, tokens - 2)))

    with open(file, "w", encoding="utf-8") as out:
        for _ in range(rows):
            lengths.append([draw.randint(6, QUERY), min(LONGEST, max(8, round(draw.lognormvariate(0, SPREAD) * MEDIAN)))])
            query, positive = map(text, lengths[-1])
            out.write(json.dumps({"query": query, "positive": positive}) + "\n")
    return lengths


if __name__ == "__main__":
    main()
