"""Real updates on this machine's GPU, to compare a prediction with: the training command itself, on random weights and made-up texts.

`measure` runs in this process; `try_in_process` in one of its own, where running out of memory ends that process and not this one.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from contaccum.common.errors import DivergedError
from contaccum.memory.planner import Measured
from contaccum.methods.config import TrainConfig, with_bank
from contaccum.methods.table import get_method
from contaccum.towers.random_encoder import write_weights, write_word_tokenizer
from contaccum.training.logfile import read_log
from contaccum.training.run import train

Lengths = Sequence[tuple[int, int]]  # tokens of a row's query and passages
WORDS = 50
UPDATES = 4


def start_process() -> subprocess.Popen[str]:
    """A process that loads what a trial needs, and waits for it."""
    words = [sys.executable, "-m", "contaccum.training.trial"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def try_in_process(
    config: TrainConfig,
    limit_bytes: int,
    query_tokens: int | None = None,
    lengths: Lengths = (),
    seconds: float | None = None,
    process: subprocess.Popen[str] | None = None,
) -> Measured | None:
    """`measure` in a process of its own; None if memory ran out, `subprocess.TimeoutExpired` if the `seconds` did. 0 bytes: no limit.
    `process`: one that waits for it."""
    limited = replace(config, memory=f"{limit_bytes}B" if limit_bytes else None)
    work = json.dumps({"config": asdict(limited), "query_tokens": query_tokens, "lengths": list(lengths)})
    process = process or start_process()
    try:
        output, errors = process.communicate(work, seconds)
    except BaseException:
        end_process(process)
        raise
    if process.returncode == 0:
        return Measured(**json.loads(output.splitlines()[-1]))
    if "out of memory" in errors.lower():
        return None
    raise RuntimeError(f"measuring failed:\n{errors}")


def measure(
    config: TrainConfig, query_tokens: int | None = None, lengths: Lengths = (), updates: int = UPDATES, written: Path | None = None
) -> Measured:
    """Train for a few updates, as `config` says; the peaks are those of this process since they were last reset.

    Texts are of full length, or of these `lengths` in turns. `written`: a folder that `write_model` wrote for both towers, to save
    writing another.
    """
    import torch

    from contaccum.memory.prediction.towers import tower_configs

    config = with_bank(config)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if written is None:
            query, passage = tower_configs(config.model, config.passage_model, config.tokenizer)
            two = not config.tied and query.to_dict() != passage.to_dict()
            write_model(folder / "query", query)  # which notes in its configuration what was written
            if two:
                write_model(folder / "passage", passage)
        negatives = config.hard_negatives or 0
        rows = max(config.n_total * updates, config.bank_size if get_method(config.method).bank else 0)
        write_texts(folder / "texts.jsonl", rows, negatives, query_tokens or config.max_seq_length, config.max_seq_length, lengths)
        options: dict[str, Any] = {
            "model": str(written or folder / "query"),
            "passage_model": str(folder / "passage") if (folder / "passage").exists() else None,
            "data": str(folder / "texts.jsonl"),
            "output": str(folder / "run"),
            "hard_negatives": negatives,
            "max_updates": updates,
        }
        with suppress(DivergedError):  # what is learnt of made-up texts, if anything, is of no interest
            train(replace(config, **options, tokenizer=None, dev=None, save_every=0, diagnose_every=1))
        rates = [line["samples_per_second"] for line in read_log(folder / "run" / "diagnostics.jsonl")]
    return Measured(
        n_local=config.n_local,
        gradient_checkpointing=config.gradient_checkpointing,
        cuda_graphs=config.cuda_graphs,
        peak_bytes=torch.cuda.max_memory_reserved(),
        allocated_bytes=torch.cuda.max_memory_allocated(),
        samples_per_second=statistics.median(rates[1:] or rates),  # the first update warms up
    )


def write_model(folder: Path, config: Any) -> None:
    """Random weights, and a tokenizer of made-up words."""
    write_word_tokenizer(_words(), folder)
    write_weights(config, folder)


def write_texts(file: Path, rows: int, negatives: int, query_tokens: int, passage_tokens: int, lengths: Lengths = ()) -> None:
    """Every other text is a word short of the full length, so that all batches are of full length and padded. With `lengths`, rows have
    these in turns."""
    draw, longest = random.Random(0), [(query_tokens, passage_tokens)]

    def text(tokens: int, row: int) -> str:
        return " ".join(draw.choices(_words(), k=max(1, tokens - 2 - row % 2)))

    with open(file, "w", encoding="utf-8") as out:
        for row in range(rows):
            query_tokens, passage_tokens = (lengths or longest)[row % len(lengths or longest)]
            query, positive = text(query_tokens, row), text(passage_tokens, row)
            others = [text(passage_tokens, row) for _ in range(negatives)]
            out.write(json.dumps({"query": query, "positive": positive, **({"negatives": others} if others else {})}) + "\n")


def _words() -> list[str]:
    return [f"w{number}" for number in range(WORDS)]


if __name__ == "__main__":
    work = json.loads(sys.stdin.read())
    print(json.dumps(vars(measure(TrainConfig(**work["config"]), work["query_tokens"], work["lengths"]))))
