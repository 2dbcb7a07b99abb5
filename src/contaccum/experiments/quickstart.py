"""The first five minutes: harvest, train, search, compare, on two CPU cores and without a network.

1. Docstring -> source pairs from the installed packages become a BEIR folder.
2. A small two-tower encoder with random weights and a tokenizer of its own is written to a folder.
3. Every method trains it by the same command a user would type, one core each, two at a time.
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
# Names as the table shows them -> options of `contaccum train`.
COMPARED: dict[str, dict[str, Any]] = {
    "gradaccum": {"method": "gradaccum"},
    "gradcache": {"method": "gradcache"},
    "contaccum (paper)": {"method": "contaccum", "drift_correction": "none"},
    "contaccum (ours)": {"method": "contaccum"},
}
# Metrics as `contaccum evaluate` calls them -> as the table shows them: with one relevant passage a query, recall is accuracy.
METRICS = {"Recall@1": "Top@1", "Recall@20": "Top@20", "Recall@100": "Top@100", "MRR@100": "MRR", "NDCG@10": "NDCG@10"}
INTRODUCTION = (
    "Docstrings are the queries, function bodies the passages, both from the Python packages installed here. The same small two-tower "
    "encoder is trained from random weights by each method, with the same micro-batch and the same samples per update. contaccum (paper) "
    "reads banked vectors as they were stored, which is too old for weights that move this fast; contaccum (ours) reads them with the "
    "present mean and keeps the passages from being pushed all the same way."
)


@dataclass(frozen=True)
class Settings:
    pairs: int = 8000
    test: int = 1000
    epochs: float = 3
    n_total: int = 128
    n_local: int = 8
    bank: int = 512
    lr: float = 5e-4
    max_seq_length: int = 32
    seed: int = 42
    vocabulary: int = 8000
    width: int = 128
    layers: int = 2

    def train_options(self) -> dict[str, Any]:
        sizes = {"n_total": self.n_total, "n_local": self.n_local, "bank": self.bank, "max_seq_length": self.max_seq_length}
        fixed = {"pooling": "mean", "similarity": "cosine", "save_every": 0}
        return {**sizes, **fixed, "epochs": self.epochs, "lr": self.lr, "seed": self.seed}


def quickstart(output: Path, settings: Settings, say: Callable[[str], None] = print) -> list[ConfigRow]:
    """Do all five steps in `output`, a new folder, and return the results in the methods' order."""
    started = time.perf_counter()
    output.mkdir(parents=True)
    say("Reading docstrings and functions of the installed packages ...")
    pairs = harvest(limit=settings.pairs)
    write_beir(pairs, output / "data", test=settings.test)
    write_encoder(
        (text for pair in pairs for text in (pair.query, pair.passage)),
        output / "encoder",
        vocabulary=settings.vocabulary,
        width=settings.width,
        layers=settings.layers,
        max_seq_length=settings.max_seq_length,
        seed=settings.seed,
    )
    say(f"{len(pairs):,} pairs, {settings.test:,} of them for testing. Training {len(COMPARED)} methods, {PARALLEL} at a time ...")
    say(f"  logs: {output / 'runs'}/*.log")
    _train_all(output, settings, say)
    say("Searching the whole collection with each model ...")
    folders = {name: run_folder(output, name) for name in COMPARED}
    for run in folders.values():
        judge_run(run, output / "data")
    described = {**provenance(settings.seed), "settings": settings.train_options(), "total_seconds": round(time.perf_counter() - started)}
    return report(
        list(folders.values()),
        output / "report.html",
        json_output=output / "results.json",
        metric="MRR",
        names={run: name for name, run in folders.items()},
        title="contaccum quickstart",
        introduction=INTRODUCTION,
        provenance=described,
    ).rows


def run_folder(output: Path, name: str) -> Path:
    return output / "runs" / name.replace(" ", "-").replace("(", "").replace(")", "")


def _train_all(output: Path, settings: Settings, say: Callable[[str], None]) -> None:
    """Up to PARALLEL processes at once, one thread each; each one's peak of memory, which only we can see, joins its summary."""
    waiting, running, started = list(COMPARED), dict[int, str](), time.perf_counter()
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            name = waiting.pop(0)
            running[_start(output, name, settings)] = name
        pid, status, usage = os.wait4(-1, 0)
        if pid not in running:
            continue
        run = run_folder(output, name := running.pop(pid))
        if status:
            log = run.with_suffix(".log")
            raise RuntimeError(f"training {name} failed; the end of {log}:\n{log.read_text()[-2000:]}")
        say(f"  {name}: done after {time.perf_counter() - started:.0f} s")
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        write_json(run / "summary.json", {**summary, "process_peak_bytes": usage.ru_maxrss * 1024})


def _start(output: Path, name: str, settings: Settings) -> int:
    run = run_folder(output, name)
    run.parent.mkdir(exist_ok=True)
    options = {"data": output / "data", "model": output / "encoder", "output": run, **settings.train_options(), **COMPARED[name]}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", *(() if value is True else (str(value),)))]
    alone = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
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
