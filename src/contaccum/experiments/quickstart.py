"""The first five minutes: harvest, train, search, compare, on two CPU cores and without a network.

1. Docstring -> source pairs from the installed packages become a BEIR folder.
2. A small encoder with a tokenizer of its own learns from half of them in large batches, as the pre-trained encoder to start from.
3. Every method fine-tunes it on the other half, by the command a user would type, one core each, two at a time.
4. Each model ranks the whole collection for the test queries: encode, search and evaluate, whose files lie in the run folders.
5. A table, plots and a page, as `contaccum report` makes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.common.outputs import write_json
from contaccum.common.provenance import provenance
from contaccum.data.harvest import harvest, write_beir
from contaccum.report.build import report
from contaccum.report.rows import ConfigRow
from contaccum.retrieval.judge import judge
from contaccum.towers.random_encoder import write_encoder

PARALLEL = 2
N_TOTAL = 128
# Names as the table shows them -> options of `contaccum train`. The paper's bank is as large as an update, as in its smaller data sets.
COMPARED: dict[str, dict[str, Any]] = {
    "gradaccum": {"method": "gradaccum"},
    "gradcache": {"method": "gradcache"},
    "contaccum (paper)": {"method": "contaccum", "drift_correction": "none", "gradient_scale": "paper", "bank": N_TOTAL},
    "contaccum": {"method": "contaccum"},
}
START = "start"  # folder and split of the encoder that all of them start from
# Metrics as `contaccum evaluate` calls them -> as the table shows them: with one relevant passage a query, recall is accuracy.
METRICS = {"Recall@1": "Top@1", "Recall@20": "Top@20", "Recall@100": "Top@100", "MRR@100": "MRR", "NDCG@10": "NDCG@10"}
INTRODUCTION = (
    "Docstrings are the queries, function bodies the passages, both from the Python packages installed here. A small encoder first learns "
    "from half of the pairs in large batches: it stands in for the pre-trained encoder that you would start from. Each method then "
    "fine-tunes it on the other half, with the same micro-batch and the same samples per update. contaccum (paper) is the method as "
    "published, with a bank as large as an update. contaccum is the default: it corrects the drift of stored vectors and keeps the "
    "gradients' scale, so that its bank can be larger."
)


@dataclass(frozen=True)
class Settings:
    pairs: int = 15_000  # the tests' apart, half for the encoder to start from and half for fine-tuning
    test: int = 1000
    epochs: float = 2
    n_total: int = N_TOTAL
    n_local: int = 8
    lr: float = 4e-4
    max_seq_length: int = 32
    seed: int = 42
    vocabulary: int = 8000
    width: int = 128
    layers: int = 2

    @property
    def shared(self) -> dict[str, Any]:
        """Options of every training here."""
        sizes = {"n_total": self.n_total, "n_local": self.n_local, "max_seq_length": self.max_seq_length}
        return {**sizes, "pooling": "mean", "similarity": "cosine", "save_every": 0, "seed": self.seed}

    @property
    def start_options(self) -> dict[str, Any]:
        return {**self.shared, "method": "dpr", "tied": True, "split": START, "epochs": 1, "lr": 1e-3}

    @property
    def train_options(self) -> dict[str, Any]:
        return {**self.shared, "epochs": self.epochs, "lr": self.lr}


def quickstart(output: Path, settings: Settings, say: Callable[[str], None] = print) -> list[ConfigRow]:
    """Do all five steps in `output`, a new folder, and return the results in the methods' order."""
    started = time.perf_counter()
    output.mkdir(parents=True)
    say("Reading docstrings and functions of the installed packages ...")
    pairs = harvest(limit=settings.pairs)
    write_beir(pairs, output / "data", test=settings.test, start=(len(pairs) - settings.test) // 2)
    write_encoder(
        (text for pair in pairs for text in (pair.query, pair.passage)),
        output / "encoder",
        vocabulary=settings.vocabulary,
        width=settings.width,
        layers=settings.layers,
        max_seq_length=settings.max_seq_length,
        seed=settings.seed,
    )
    say(f"{len(pairs):,} pairs, {settings.test:,} of them for testing. Training an encoder to start from on half of the others ...")
    _finish(output, {start_training(output, START, output / "encoder", settings.start_options, threads=PARALLEL): START})
    say(f"Fine-tuning it by {len(COMPARED)} methods, {PARALLEL} at a time ...\n  logs: {output / 'runs'}/*.log")
    _train_all(output, settings, say)
    say("Searching the whole collection with each model ...")
    folders = {name: run_folder(output, name) for name in COMPARED}
    for run in folders.values():
        judge_run(run, output / "data")
    described = {**provenance(settings.seed), "settings": settings.train_options, "total_seconds": round(time.perf_counter() - started)}
    return report(
        list(folders.values()),
        output / "report.html",
        json=output / "results.json",
        metric="MRR",
        names={run: name for name, run in folders.items()},
        title="contaccum quickstart",
        introduction=INTRODUCTION,
        provenance=described,
    ).rows


def run_folder(output: Path, name: str) -> Path:
    return output / "runs" / name.replace(" ", "-").replace("(", "").replace(")", "")


def _train_all(output: Path, settings: Settings, say: Callable[[str], None]) -> None:
    """Up to PARALLEL processes at once, one thread each."""
    waiting, running, started = list(COMPARED), dict[int, str](), time.perf_counter()
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            name = waiting.pop(0)
            options = {**settings.train_options, **COMPARED[name]}
            running[start_training(output, name, run_folder(output, START) / "model", options)] = name
        name = _finish(output, running)
        say(f"  {name}: done after {time.perf_counter() - started:.0f} s")


def _finish(output: Path, running: dict[int, str]) -> str:
    """Wait for one of the processes and return its name; its peak of memory, which only we can see, joins its summary."""
    pid, status, usage = os.wait4(-1, 0)
    while pid not in running:
        pid, status, usage = os.wait4(-1, 0)
    run = run_folder(output, name := running.pop(pid))
    if status:
        log = run.with_suffix(".log")
        raise RuntimeError(f"training {name} failed; the end of {log}:\n{log.read_text()[-2000:]}")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    write_json(run / "summary.json", {**summary, "process_peak_bytes": usage.ru_maxrss * 1024})
    return name


def start_training(output: Path, name: str, model: Path, options: dict[str, Any], threads: int = 1, data: Path | None = None) -> int:
    """The process that trains `model` by `contaccum train` with these options, in the run folder of that name."""
    run = run_folder(output, name)
    run.parent.mkdir(parents=True, exist_ok=True)
    given = {"data": data or output / "data", "model": model, "output": run, **options}
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", *(() if value is True else (str(value),)))]
    alone = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with open(run.with_suffix(".log"), "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "contaccum", "train", *words]
        return subprocess.Popen(command, env={**os.environ, **alone}, stdout=log, stderr=log).pid


def judge_run(run: Path, data: Path) -> None:
    """Rank the whole collection for the test queries; test.trec and evaluation.json join the run folder."""
    result = judge(run / "model", data, run, metrics=list(METRICS), dtype="float32", device="cpu", progress=False)
    named = {part: {METRICS[metric]: value for metric, value in result[part].items()} for part in ("metrics", "per_query")}
    write_json(run / "evaluation.json", {**result, **named})


def free_folder(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that is not there yet: nothing is overwritten."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
