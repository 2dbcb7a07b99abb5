"""Run folders as `contaccum train` and `contaccum evaluate` leave them, made in milliseconds, for tests of the report."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from contaccum.methods.config import TrainConfig
from contaccum.report.folders import read_run_folder
from contaccum.report.rows import rows_of
from contaccum.report.summary import Summary, summarise
from contaccum.retrieval.run_metrics import evaluate_run

QUERIES, PASSAGES = 30, 60
HOSTILE = '</script><script>document.title = "owned"</script><img src=x onerror="document.title=1"> \'"&amp; <!-- \u2028'


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_data(folder: Path) -> Path:
    """A BEIR folder: query qI's passage is dI; some texts are hostile."""
    (folder / "qrels").mkdir(parents=True)
    write_lines(folder / "corpus.jsonl", ({"_id": f"d{i}", "title": f"Title {i}", "text": _text(i)} for i in range(PASSAGES)))
    write_lines(
        folder / "queries.jsonl", ({"_id": f"q{i}", "text": f"query number {i} {HOSTILE if i == 1 else ''}"} for i in range(QUERIES))
    )
    lines = "".join(f"q{i}\td{i}\t1\n" for i in range(QUERIES))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
    return folder


def _text(number: int) -> str:
    return f"passage {number} {HOSTILE}" if number % 7 == 0 else f"passage {number} " + "long " * (200 if number % 5 == 0 else 3)


def make_run(folder: Path, log: list[float] | None = None, finished: bool = True, **config: Any) -> Path:
    """config.yaml, run.json, log.jsonl and, where finished, summary.json."""
    folder.mkdir(parents=True)
    values = asdict(TrainConfig(data="data", output=str(folder))) | config
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (folder / "run.json").write_text(json.dumps({"commit": "abc", "device": "a CPU", "versions": {"torch": "2.9"}, "seed": values["seed"]}))
    losses = log if log is not None else [4.0 - 0.02 * update for update in range(1, 131)]
    lines = ({"update": i, "epoch": i / 100, "lr": 1e-4, "loss": loss, "negatives_per_query": 7} for i, loss in enumerate(losses, 1))
    write_lines(folder / "log.jsonl", lines)
    if finished:
        result = {
            "method": values["method"],
            "updates": len(losses),
            "samples_per_second": 100.0,
            "seconds": 91.0,
            "final_loss": losses[-1],
        }
        peaks = {"negatives_per_query": 7, "peak_bytes": 2_500_000_000, "bank_bytes": 0, "resumed_at_update": None}
        (folder / "summary.json").write_text(json.dumps(result | peaks))
    return folder


def rank_and_judge(run: Path, data: Path, skill: float, seed: int = 0, **options: Any) -> dict[str, Any]:
    """A run file in which the relevant passage stands first with probability `skill`, and its evaluation.json."""
    chance, lines = random.Random(seed), []
    for i in range(QUERIES):
        others = [f"d{j}" for j in chance.sample(range(PASSAGES), 25) if j != i][:20]
        place = 0 if chance.random() < skill else chance.choice([1, 4, 14, None])
        hits = others if place is None else [*others[:place], f"d{i}", *others[place:]]
        lines += [f"q{i} Q0 {key} {rank} {100 - rank} test\n" for rank, key in enumerate(hits, 1)]
    (run / "test.trec").write_text("".join(lines))
    return evaluate_run(run / "test.trec", qrels=data, output=run / "evaluation.json", **options)


def add_diagnostics(run: Path, ratio: float = 1.5, updates: int = 120) -> Path:
    """diagnostics.jsonl and dev.jsonl with everything that they may hold."""
    lines: list[dict[str, Any]] = []
    for update in range(1, updates + 1):
        line: dict[str, Any] = {"update": update, "query_grad_norm": 1.0, "passage_grad_norm": ratio, "grad_norm_ratio": ratio}
        if update % 10 == 0:
            line |= {"seconds": {"forward": 0.5, "loss": 0.1, "backward": 1.0, "update": 0.2}, "samples_per_second": 50.0}
            line["memory"] = {"peak_bytes": None, "bank_bytes": 10, "bank_predicted_bytes": 10}
            masses = [0.5, 0.3, 0.1] if update > updates // 2 else [1.0, 0.0, 0.0]
            line["sim_mass"] = {"positive": 0.1, "by_age": [{"age_updates": a, "mass": m, "passages": 8} for a, m in enumerate(masses)]}
            line["drift"] = [{"age_updates": a, "query_cosine": 1 - 0.1 * a, "passage_cosine": 1 - 0.2 * a, "samples": 8} for a in (1, 2)]
        lines.append(line)
    write_lines(run / "diagnostics.jsonl", lines)
    write_lines(run / "dev.jsonl", ({"update": u, "NDCG@10": 0.2 + u / 1000, "MRR@10": 0.1 + u / 1000} for u in (50, 100)))
    return run


def two_methods(tmp_path: Path) -> list[Path]:
    """gradaccum with two seeds, contaccum with two that are much better: everything is there."""
    data, runs = make_data(tmp_path / "data"), []
    for method, skill in (("gradaccum", 0.1), ("contaccum", 0.9)):
        for seed in (1, 2):
            run = make_run(tmp_path / f"{method}-seed{seed}", method=method, seed=seed)
            rank_and_judge(run, data, skill, seed)
            runs.append(add_diagnostics(run, 1.0 + seed))
    return runs


def summary_of(folders: list[Path], **options: Any) -> Summary:
    return summarise(rows_of([read_run_folder(folder) for folder in folders]), **options)
