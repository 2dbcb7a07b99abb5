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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from contaccum.common.errors import DataError
from contaccum.data.readers.files import read_lines, shown
from contaccum.methods.config import TrainConfig

Line = dict[str, Any]


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
        summary=_object(folder / "summary.json") or {},
        provenance=_object(folder / "run.json") or {},
        diagnostics=list(_lines(folder / "diagnostics.jsonl")),
        dev=list(_lines(folder / "dev.jsonl")),
        evaluation=_evaluation(folder / "evaluation.json"),
    )


def _baseline_name(folder: Path) -> str:
    path = folder.resolve()
    return path.parent.name if path.name == "run" else path.name


def number(value: Any) -> float | None:
    """A finite number as a float, anything else as None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _config(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}; is this the config.yaml of a run?") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} must hold fields and values, as 'lr: 2.0e-5'; is this the config.yaml of a run?")
    return {**asdict(TrainConfig()), **values}


def _log(path: Path) -> list[Line]:
    lines = []
    for line in _lines(path):
        if number(line.get("update")) is None or "loss" not in line:
            raise DataError(f"{path} holds a line without 'update' and 'loss', {shown(line)}; is this the log of a run?")
        loss = line["loss"]
        lines.append({**line, "loss": float(loss) if isinstance(loss, (int, float)) else math.nan})
    return lines


def _lines(path: Path) -> Iterator[Line]:
    """The objects of a log, none where there is no file; a last line that was cut off is left out."""
    waiting: DataError | None = None
    for place, text in read_lines(path) if path.is_file() else []:
        if waiting is not None:
            raise waiting
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            yield line
        elif text.strip():
            waiting = DataError(f"{path}, line {place}: a JSON object is needed, not {shown(text.strip())}; remove that line")


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}; write it again or remove it") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} must hold a JSON object, not {shown(value)}; write it again or remove it")
    return value


def _evaluation(path: Path) -> Evaluation | None:
    stored = _object(path)
    if stored is None:
        return None
    metrics, per_query, sources = stored.get("metrics"), stored.get("per_query") or {}, stored.get("sources") or {}
    if not metrics or not _all_numbers(metrics):
        raise DataError(f"{path} holds no numbers under 'metrics'; write it with contaccum evaluate RUNFILE --output {path}")
    if not isinstance(per_query, dict) or not all(_all_numbers(values) for values in per_query.values()):
        raise DataError(f"{path} holds no numbers per query under 'per_query'; write it with contaccum evaluate RUNFILE --output {path}")
    return Evaluation(metrics, per_query, sources if isinstance(sources, dict) else {})


def _all_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(number(value) is not None for value in values.values())
