"""Predicted against measured peak memory of training: small to large encoders, short to long texts, precisions, checkpointing, methods.

    python benchmarks/memory.py --json memory.json     # needs a CUDA device; under four minutes on an H200

Every cell trains a few updates with the training command itself, on random weights and made-up texts of full length, and compares PyTorch's
`max_memory_reserved` and `max_memory_allocated` with what `contaccum plan` predicts. Goals: within 10 %, and never low by more than 5 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "MiniLM-L3": {"hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 12, "intermediate_size": 1536},
    "MiniLM-L6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "BERT-base": {},
    "BERT-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
WITHIN, LOW = 0.10, 0.05
PARTS = ("fp32", "bf16")  # a process each


@dataclass(frozen=True)
class Cell:
    size: str
    n_local: int
    tokens: int
    precision: str = "fp32"
    checkpointing: bool = False
    hard_negatives: int = 0
    method: str = "contaccum"
    micro_steps: int = 2
    bank: int = 256
    drift_correction: str | None = "auto"
    tied: bool = False
    query_tokens: int | None = None

    @property
    def name(self) -> str:
        parts = [f"{self.size} n={self.n_local} tokens={self.tokens}", self.precision, f"h={self.hard_negatives}", self.method]
        parts += (
            ["checkpointing"] * self.checkpointing
            + ["tied"] * self.tied
            + [f"drift {self.drift_correction}"] * (self.drift_correction != "auto")
        )
        return " ".join(parts + ([f"queries of {self.query_tokens}"] if self.query_tokens else []))


CELLS = [
    Cell("MiniLM-L3", 32, 128, hard_negatives=1),
    Cell("MiniLM-L3", 64, 256, "bf16"),
    Cell("MiniLM-L6", 32, 256, hard_negatives=1),
    Cell("MiniLM-L6", 128, 128, "bf16"),
    Cell("MiniLM-L6", 64, 256, checkpointing=True, hard_negatives=1),
    Cell("BERT-base", 8, 256, hard_negatives=1),
    Cell("BERT-base", 16, 256, "bf16", hard_negatives=1),
    Cell("BERT-base", 32, 128),
    Cell("BERT-base", 8, 512),
    Cell("BERT-base", 4, 256, hard_negatives=4),
    Cell("BERT-base", 64, 256, "bf16", checkpointing=True, hard_negatives=1),
    Cell("BERT-base", 16, 256, hard_negatives=1, query_tokens=32),
    Cell("BERT-base", 16, 256, method="gradcache", micro_steps=4, hard_negatives=1),
    Cell("BERT-base", 32, 256, method="dpr", micro_steps=1),
    Cell("BERT-base", 8, 256, tied=True, hard_negatives=1),
    Cell("BERT-base", 8, 128, bank=4096),
    Cell("BERT-base", 8, 128, bank=4096, drift_correction=None),
    Cell("BERT-large", 8, 256),
    Cell("BERT-large", 8, 256, "bf16", hard_negatives=1),
    Cell("BERT-large", 32, 256, "bf16", checkpointing=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--seconds", type=float, default=230.0, help="no cell is begun later than this")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    require_cuda()
    if args.part:
        run_part(args.part, time.monotonic() + args.seconds)
        return
    end, rows = time.monotonic() + args.seconds, []
    print(f"{'':<72} {'predicted':>10} {'measured':>10} {'ratio':>6}   {'in use':>8} {'measured':>9} {'ratio':>6}")
    for part in PARTS:
        rows += watch_part(part, end - time.monotonic())
    left_out = [cell.name for cell in CELLS if cell.name not in {row["name"] for row in rows}]
    ratios = [row["predicted_bytes"] / row["measured_bytes"] for row in rows]
    good = [1 - LOW <= ratio <= 1 + WITHIN for ratio in ratios]
    if ratios:
        print(f"{sum(good)} of {len(good)} within the goals; ratios {min(ratios):.3f} to {max(ratios):.3f}")
    if left_out:
        print(f"left out for lack of time: {'; '.join(left_out)}")
    if args.json:
        from contaccum.common.provenance import provenance

        args.json.write_text(json.dumps({"provenance": provenance(), "cells": rows, "left_out": left_out}, indent=1) + "\n")


def require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/memory.py compares with a CUDA device's memory, and there is none here; `contaccum plan` predicts without one"
        )


def watch_part(part: str, seconds: float) -> list[dict[str, Any]]:
    """The cells of one precision, in a process of their own; what they print passes through."""
    command = [sys.executable, __file__, "--part", part, "--seconds", str(max(0.0, seconds))]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                print(table_row(rows[-1]), flush=True)
    if process.returncode:
        raise SystemExit(f"the cells of {part} failed with exit code {process.returncode}")
    return rows


def run_part(part: str, end: float) -> None:
    from contaccum.training.trial import write_model

    with tempfile.TemporaryDirectory() as folder:
        for size in SHAPES:
            written = Path(folder) / size
            for cell in (cell for cell in CELLS if (cell.size, cell.precision) == (size, part)):
                if time.monotonic() < end:
                    if not written.exists():
                        write_model(written, bert(size))
                    print(json.dumps(run_cell(cell, written)), flush=True)


def run_cell(cell: Cell, written: Path) -> dict[str, Any]:
    import torch

    from contaccum.memory.prediction.predict import Predictor
    from contaccum.methods.config import TrainConfig
    from contaccum.training.trial import measure

    config = TrainConfig(
        model=str(written),
        n_total=cell.n_local * cell.micro_steps,
        n_local=cell.n_local,
        max_seq_length=cell.tokens,
        precision=cell.precision,
        unpad=False,  # as is predicted
        gradient_checkpointing=cell.checkpointing,
        hard_negatives=cell.hard_negatives,
        method=cell.method,
        bank=cell.bank,
        drift_correction=cell.drift_correction,
        tied=cell.tied,
    )
    predicted = Predictor(config).predict(config, cell.query_tokens)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    measured = measure(config, cell.query_tokens, updates=3, written=written)
    return {
        **asdict(cell),
        "name": cell.name,
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured.peak_bytes,
        "predicted_allocated_bytes": predicted.allocated_bytes,
        "measured_allocated_bytes": measured.allocated_bytes,
        "held_before_bytes": before,  # left over from the cell before: should be next to nothing
        "parts": predicted.parts,
    }


def bert(size: str) -> Any:
    from transformers import BertConfig

    return BertConfig(**SHAPES[size])


def table_row(row: dict[str, Any]) -> str:
    def pair(predicted: int, measured: int) -> str:
        return f"{predicted / 1e9:8.2f}GB {measured / 1e9:8.2f}GB {predicted / measured:6.3f}"

    reserved = pair(row["predicted_bytes"], row["measured_bytes"])
    return f"{row['name']:<72} {reserved}  {pair(row['predicted_allocated_bytes'], row['measured_allocated_bytes'])}"


if __name__ == "__main__":
    main()
