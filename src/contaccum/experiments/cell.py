"""One cell: train, search and judge, or measure; the result is one JSON file that appears when it is whole.

`python -m contaccum.experiments.cell FOLDER` reads FOLDER/cell.json and writes FOLDER/result.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from contaccum.common.errors import CheckpointError, DivergedError
from contaccum.common.outputs import write_json
from contaccum.common.provenance import provenance
from contaccum.experiments.datasets import Ready
from contaccum.experiments.pretrain import FINE_TUNED, ZERO_SHOT, shown
from contaccum.training.logfile import read_log

PASSAGES_RANKED = 100  # for each query
SOURCES = ("collection", "queries", "qrels")


def run_cell(folder: Path) -> None:
    folder = folder.resolve()  # whoever reads its evaluation may do so from elsewhere
    spec = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    started = time.perf_counter()
    found = KINDS[spec["kind"]](folder, spec)
    record = {**found, "total_seconds": time.perf_counter() - started, "provenance": provenance(spec["seed"])}
    write_json(folder / "result.json", record)


def _train(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Train, or go on with what an interrupted try left."""
    data, run = Ready(**spec["data"]), folder / "run"
    summary = _trained(run, {**spec["options"], "data": data.train, "seed": spec["seed"]})
    metrics = judge_run(run / "model", run, data) if spec["evaluated"] else {}
    return {"metrics": metrics, "summary": summary, "diagnostics": _diagnosed(run)}


def _trained(run: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A run's summary, of training that is done now or was before."""
    from contaccum.methods.config import TrainConfig
    from contaccum.training.run import train
    from contaccum.training.run_folder import finished, remove_checkpoints

    options = {**options, "output": str(run)}
    share = options.pop("query_bank_stop_share", None)
    if share is not None:
        options["query_bank_stop_update"] = round(share * _updates(options))
    config = TrainConfig(**options)
    if (summary := finished(run)) is not None:
        remove_checkpoints(run, config.checkpoints_at_end)
        return summary
    return train(config, resume=(run / "config.yaml").exists())


def _pretrain(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Train on pairs drawn from the texts of the collection, judge, fine-tune on the training set, judge again."""
    run = folder / "pretraining"
    summary = _trained(run, {**spec["options"], "data": spec["documents"], "seed": spec["seed"]})
    metrics, _ = _tuned(folder, spec, run, run / "model")
    return {"metrics": metrics, "summary": summary, "diagnostics": _diagnosed(run)}


def _fine_tune(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """The same without pre-training."""
    from contaccum.experiments.baselines import untrained_model

    metrics, summary = _tuned(folder, spec, folder / "untrained", untrained_model(spec["fine_tuning"]))
    return {"metrics": metrics, "summary": summary, "diagnostics": _diagnosed(folder / "run")}


def _tuned(folder: Path, spec: dict[str, Any], before: Path, model: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics before and after fine-tuning, and its summary. `before`: the run folder of the model as it is, or a new one."""
    data, run = Ready(**spec["data"]), folder / "run"
    data = replace(data, metrics=shown(data.metrics))
    metrics = {f"{ZERO_SHOT} {name}": value for name, value in judge_run(model, before, data).items()}
    start = {"model": str(model)} if isinstance(model, Path) else {}
    summary = _trained(run, {**spec["fine_tuning"], **start, "data": data.train, "seed": spec["seed"]})
    return metrics | {f"{FINE_TUNED} {name}": value for name, value in judge_run(run / "model", run, data).items()}, summary


def _untrained(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    from contaccum.experiments.baselines import untrained_model

    model = untrained_model(spec["options"])
    return {"metrics": judge_run(model, folder / "run", Ready(**spec["data"]))}


def _bm25(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    from contaccum.experiments.baselines import search_by_words
    from contaccum.retrieval.run_metrics import evaluate_run

    data, ranked = Ready(**spec["data"]), folder / "run" / "test.trec"
    search_by_words(data.collection, data.queries, data.split, PASSAGES_RANKED, ranked)
    sources, options = _sources(data)
    if data.qrels is not None:
        del sources["queries"]  # as with a model: the report then finds the same files behind both
    return {"metrics": evaluate_run(ranked, **sources, **options, output=ranked.with_name("evaluation.json"))["metrics"]}


def _updates(options: dict[str, Any]) -> int:
    """Of the whole run, as `train` will count them."""
    import math

    from contaccum.data.training_set import load_training_set

    rows = len(load_training_set(options["data"], "train", options.get("limit")))
    per_epoch: int = math.ceil(rows / options.get("n_total", 128))
    return math.ceil(float(options.get("epochs", 40)) * per_epoch)


def judge_run(model: Any, run: Path, data: Ready) -> dict[str, float]:
    """A model's metrics; its ranking and evaluation.json join the run folder."""
    from contaccum.retrieval import evaluate

    sources, options = _sources(data)
    collection = sources.pop("collection")
    found: dict[str, float] = evaluate(model, collection, output=run, **sources, **options, k=PASSAGES_RANKED, progress=False)["metrics"]
    return found


def _sources(data: Ready) -> tuple[dict[str, Any], dict[str, Any]]:
    """The files to judge by, and the options."""
    sources: dict[str, Any] = {name: str(Path(path).resolve()) for name in SOURCES if (path := getattr(data, name)) is not None}
    by: dict[str, Any] = (
        {"top": [int(name.partition("@")[2]) for name in data.metrics]} if data.qrels is None else {"metrics": data.metrics}
    )
    return sources, {"split": data.split, "match": data.match, **by}


def _diagnosed(run: Path) -> dict[str, Any]:
    """What the figures of gradnorm and simmass draw."""
    lines = read_log(run / "diagnostics.jsonl")
    ratios = [[line["update"], line["grad_norm_ratio"]] for line in lines if line.get("grad_norm_ratio") is not None]
    masses = [{"update": line["update"], **line["sim_mass"]} for line in lines if "sim_mass" in line]
    return {"grad_norm_ratio": ratios, "sim_mass": masses}


def _speed(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    from contaccum.experiments.bench import measure
    from contaccum.experiments.workloads import Workload

    options = dict(spec["options"])
    size, ways, rounds, updates = (options.pop(name) for name in ("size", "ways", "rounds", "updates"))
    return {"ways": measure(size, Workload(**options), ways, rounds, updates)}


def _memory(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a full bank: as predicted, as its vectors take, with its table; and of the whole matrix in fp32."""
    import torch

    from contaccum.core.criterion import DualBankInfoNCE

    bank, n, width, h = (spec["options"][name] for name in ("bank", "n", "width", "hard_negatives"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    criterion = DualBankInfoNCE(bank_size=bank, drift_correction=None)  # the paper's
    for _ in range(0, bank, n):
        vectors = torch.randn(n, 2 + h, width, device=device, requires_grad=True)
        criterion(vectors[:, 0], vectors[:, 1], vectors[:, 2:] if h else None)
    rows, columns = bank + n, (bank + n) * (1 + h)
    return {
        "predicted_bytes": bank * (2 + h) * width * 4,
        "vector_bytes": criterion.bank.queries.nbytes + criterion.bank.passages.nbytes,
        "bank_bytes": criterion.bank.nbytes,
        "matrix_bytes": rows * columns * 4,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


KINDS = {
    "train": _train,
    "pretrain": _pretrain,
    "fine-tune": _fine_tune,
    "untrained": _untrained,
    "bm25": _bm25,
    "speed": _speed,
    "memory": _memory,
}


def end_with_parent() -> None:
    """A process whose parent was killed would go on beside the one that the same command starts next."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def explained(error: Exception) -> str:
    """What goes into a cell's log: a line for what was refused or went wrong in a known way, the traceback of anything else."""
    known = isinstance(error, (ValueError, CheckpointError, DivergedError))
    return f"error: {error}" if known else "".join(traceback.format_exception(error))


if __name__ == "__main__":
    end_with_parent()
    try:
        run_cell(Path(sys.argv[1]))
    except Exception as error:
        sys.exit(explained(error))
