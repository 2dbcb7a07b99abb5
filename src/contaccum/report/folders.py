"""What `contaccum train` and `contaccum evaluate` left in a run folder, checked, as data.

config.yaml, log.jsonl       must be there
summary.json                 there when the run is finished
run.json                     commit, versions, machine
diagnostics.jsonl            gradient norms, similarity mass, drift, time and memory inside the run
dev.jsonl                    metrics of dev queries during training
evaluation.json              metrics, per query too, of the finished model: `contaccum evaluate MODEL DATA --output RUN`

A folder with evaluation.json alone is a baseline: a model that was not trained here, or BM25.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contaccum.common.errors import DataError
from contaccum.common.inputs import read_object, read_yaml, readable
from contaccum.data.readers.files import read_lines, shown
from contaccum.methods.config import TrainConfig, typed

Line = dict[str, Any]
# Peaks by what measured them: the CUDA allocator, the operating system, the bank's own count. Never mixed in one table or plot.
MEMORY = {"peak_bytes": "peak memory on the GPU", "process_peak_bytes": "peak memory of the process", "bank_bytes": "memory of the bank"}
LARGEST = 3.5e38  # that a loss, which is a number of single precision, can be


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]  # fractions, e.g. {"MRR@10": 0.288}
    per_query: dict[str, dict[str, float]]  # metric -> query -> value; empty where only means are known
    sources: dict[str, Any]  # the files that gave it, as `contaccum.retrieval.evaluate` was given them; empty where unknown


@dataclass(frozen=True)
class Run:
    folder: Path
    config: dict[str, Any]  # every field; those that an older run does not have, at their defaults
    log: list[Line] = field(repr=False)  # an update each, with finite "update" and a float "loss"
    summary: dict[str, Any]  # empty while the run is not finished
    provenance: dict[str, Any]
    diagnostics: list[Line] = field(repr=False)
    dev: list[Line] = field(repr=False)
    evaluation: Evaluation | None = field(repr=False)

    @property
    def trained(self) -> bool:
        """Whether it is a run of training, not a baseline."""
        return "data" in self.config

    @property
    def seed(self) -> Any:
        return self.config["seed"]

    def measured(self, name: str) -> float | None:
        """A number of the summary; None where there is none. Time of a run that was resumed is only a part of it, and none."""
        partial = name == "seconds" and self.summary.get("resumed_at_update")
        return None if partial else number(self.summary.get(name))


def read_run_folder(folder: str | Path) -> Run:
    """DataError that names the folder or file and the remedy where it cannot be used."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give run folders that contaccum train wrote")
    if (folder / "evaluation.json").is_file() and not (folder / "config.yaml").exists():
        return Run(folder, {"method": _baseline_name(folder), "seed": None}, [], {}, {}, [], [], _evaluation(folder / "evaluation.json"))
    for name in ("config.yaml", "log.jsonl"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} is not a run folder: it has no {name}; give one that contaccum train wrote")
    return Run(
        folder=folder,
        config=_config(folder / "config.yaml"),
        log=_log(folder / "log.jsonl"),
        summary=_summary(folder / "summary.json"),
        provenance=_object(folder / "run.json") or {},
        diagnostics=list(_lines(folder / "diagnostics.jsonl")),
        dev=_dev(folder / "dev.jsonl"),
        evaluation=_evaluation(folder / "evaluation.json"),
    )


def _baseline_name(folder: Path) -> str:
    path = folder.resolve()
    return path.parent.name if path.name == "run" else path.name


def number(value: Any) -> float | None:
    """A finite number as a float, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def _config(path: Path) -> dict[str, Any]:
    values = read_yaml(path, "is this the config.yaml of a run?")
    known = asdict(TrainConfig())
    with readable(f"{path} is no configuration of a run", "give a folder that contaccum train wrote"):
        return {**known, **{name: typed(name, value) if name in known else value for name, value in values.items()}}


def _log(path: Path) -> list[Line]:
    """Lines of rising updates; a loss is a number, perhaps NaN, which JSON has as null."""
    lines: list[Line] = []
    for line in _lines(path):
        update, loss = line.get("update"), line.get("loss", "")
        if not _is_count(update) or not (loss is None or _is_loss(loss)):
            raise DataError(
                f"{path} holds a line without an 'update' and a 'loss' that are numbers, {shown(line)}; is this the log of a run?"
            )
        for name in ("lr", "negatives_per_query"):
            if name in line and not (number(line[name]) is not None and line[name] >= 0):
                raise DataError(f"{path} holds {name}={shown(line[name])}, which must be a number of at least 0; is this the log of a run?")
        if lines and update <= lines[-1]["update"]:
            raise DataError(f"{path} holds update {update} behind update {lines[-1]['update']}; is this the log of one run?")
        lines.append({**line, "loss": math.nan if loss is None else float(loss)})
    return lines


def _is_loss(value: Any) -> bool:
    """Perhaps NaN or infinite, but no finite number that single precision cannot hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= LARGEST or (isinstance(value, float) and not math.isfinite(value))


def _is_count(value: Any) -> bool:
    return number(value) is not None and 0 <= value < 2**53 and value == int(value)


def _dev(path: Path) -> list[Line]:
    lines = list(_lines(path))
    for line in lines:
        if not _is_count(line.get("update")) or not _all_shares({name: value for name, value in line.items() if name != "update"}):
            raise DataError(f"{path} holds {shown(line)}; an 'update' and metrics between 0 and 1 are needed; remove that line")
    return lines


def _lines(path: Path) -> Iterator[Line]:
    """The objects of a log, none where there is no file; a last line that was cut off is left out."""
    waiting: DataError | None = None
    for place, text in read_lines(path) if path.is_file() else []:
        if waiting is not None:
            raise waiting
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict):
            yield line
        elif text.strip():
            waiting = DataError(f"{path}, line {place}: a JSON object is needed, not {shown(text.strip())}; remove that line")


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file."""
    if not path.is_file():
        return None
    return read_object(path, "write it again or remove it")


def _summary(path: Path) -> dict[str, Any]:
    summary = _object(path) or {}
    for name in ("updates", "seconds", "samples_per_second", "cpu_seconds", "threads", *MEMORY):
        value = summary.get(name)
        if value is not None and (number(value) is None or value < 0):
            raise DataError(f"{path} holds {name}={shown(value)}, which is no amount; write it again or remove it")
    return summary


def _evaluation(path: Path) -> Evaluation | None:
    stored = _object(path)
    if stored is None:
        return None
    metrics, per_query, sources = stored.get("metrics"), stored.get("per_query") or {}, stored.get("sources") or {}
    remedy = f"write it with contaccum evaluate RUNFILE --output {path}"
    if not metrics or not _all_shares(metrics):
        raise DataError(f"{path} holds no numbers between 0 and 1 under 'metrics' but {shown(metrics)}; {remedy}")
    if not isinstance(per_query, dict) or not all(_all_shares(values) for values in per_query.values()):
        raise DataError(f"{path} holds no numbers between 0 and 1 per query under 'per_query'; {remedy}")
    return Evaluation(metrics, per_query, sources if isinstance(sources, dict) else {})


def _all_shares(values: Any) -> bool:
    return isinstance(values, dict) and all((share := number(value)) is not None and 0 <= share <= 1 for value in values.values())
