"""Runs as the rows of a table: those that differ only in their seed are one."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.report.folders import MEMORY, Evaluation, Run, number

REPEATED = ("seed", "output")  # fields in which the runs of one row may differ
LONGEST_NAME = 48


class Spread(NamedTuple):
    """A value over seeds."""

    mean: float
    deviation: float | None  # sample standard deviation; None of a single value
    values: list[float]

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, list(values))


@dataclass(frozen=True, eq=False)
class ConfigRow:
    """One configuration, trained with one or several seeds."""

    name: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def trained(self) -> bool:
        return self.runs[0].trained

    @property
    def evaluations(self) -> list[Evaluation]:
        return [run.evaluation for run in self.runs if run.evaluation is not None]

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the seeds that were evaluated, of the metrics that all of these have."""
        found = self.evaluations
        names = [name for name in found[0].metrics if all(name in other.metrics for other in found)] if found else []
        return {name: statistics.fmean(evaluation.metrics[name] for evaluation in found) for name in names}

    def metric(self, name: str) -> Spread | None:
        return Spread.of([evaluation.metrics[name] for evaluation in self.evaluations]) if name in self.metrics else None

    def per_query(self, metric: str) -> dict[str, float]:
        """query -> mean over the seeds; empty where the seeds were not judged on the same queries."""
        found = [evaluation.per_query.get(metric, {}) for evaluation in self.evaluations]
        if not found or any(values.keys() != found[0].keys() for values in found):
            return {}
        return {query: statistics.fmean(values[query] for values in found) for query in found[0]}

    def measured(self, name: str) -> Spread | None:
        """A number of the summaries, over the seeds that have it."""
        return Spread.of([value for run in self.runs if (value := run.measured(name)) is not None])

    @property
    def share_of_cores(self) -> float | None:
        """How much of its threads' time a run on a CPU really had, the least of its seeds; None on a GPU or where it is not known."""
        shares = []
        for run in self.runs:
            used, seconds, threads = (number(run.summary.get(name)) for name in ("cpu_seconds", "seconds", "threads"))
            if used is not None and seconds and threads and not run.summary.get("peak_bytes"):
                shares.append(used / (seconds * threads))
        return min(shares, default=None)

    @property
    def negatives_per_query(self) -> int | None:
        """The most that a query of an update had: the last micro-batch of an epoch may be smaller."""
        counts = [line["negatives_per_query"] for run in self.runs for line in run.log if isinstance(line.get("negatives_per_query"), int)]
        return max(counts, default=None)

    def as_json(self) -> dict[str, Any]:
        measures = ("seconds", "samples_per_second", "final_loss", *MEMORY)
        costs = {name: None if (spread := self.measured(name)) is None else spread.mean for name in measures}
        spreads = {metric: self.metric(metric) for metric in self.metrics}
        return {
            "name": self.name,
            "metrics": self.metrics,
            "deviations": {metric: spread.deviation for metric, spread in spreads.items() if spread is not None},
            "evaluated": len(self.evaluations),
            "seeds": [run.seed for run in self.runs],
            "negatives_per_query": self.negatives_per_query,
            **costs,
            "runs": [_run_json(run) for run in self.runs],
        }


def _run_json(run: Run) -> dict[str, Any]:
    metrics = None if run.evaluation is None else run.evaluation.metrics
    last = run.log[-1]["update"] if run.log else 0
    return {"folder": str(run.folder), "seed": run.seed, "updates": last, "metrics": metrics, "summary": run.summary or None}


def rows_of(runs: Sequence[Run], names: Mapping[Path, str] | None = None) -> list[ConfigRow]:
    """One row per configuration, in the order in which they first stand; `names` of folders, else names made of the configuration."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        kept = {name: value for name, value in run.config.items() if name not in REPEATED} if run.trained else {"folder": str(run.folder)}
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    members = list(groups.values())
    chosen = [(names or {}).get(group[0].folder) or made for group, made in zip(members, _names(members), strict=True)]
    return [ConfigRow(name, tuple(group)) for name, group in zip(_unique(chosen), members, strict=True)]


def _names(groups: list[list[Run]]) -> list[str]:
    """The method, and where rows share it the fields in which they differ: at first without those that are off, then all; where that is
    long, the folder's name."""
    short, full = ([_name(group[0].config, groups, off) for group in groups] for off in (False, True))
    chosen = [full[i] if short.count(short[i]) > 1 else short[i] for i in range(len(groups))]
    return [name if len(name) <= LONGEST_NAME else _folder_name(group) for name, group in zip(chosen, groups, strict=True)]


def _name(config: dict[str, Any], groups: list[list[Run]], off: bool) -> str:
    alike = [group[0].config for group in groups if group[0].config["method"] == config["method"]]
    differing = [name for name in config if name not in REPEATED and _differ([other.get(name) for other in alike])]
    fields = [(name, config[name]) for name in differing if off or config[name] not in (None, False)]
    parts = ", ".join(name if value is True and not off else f"{name}={value_text(value)}" for name, value in fields)
    return f"{config['method']} ({parts})" if parts else str(config["method"])


def _folder_name(group: list[Run]) -> str:
    paths = [run.folder.resolve() for run in group]
    folders = [path.parent.name if path.name == "run" else path.name for path in paths]  # the cells of `reproduce` are named above
    first, last = min(folders), max(folders)
    common = next((first[:place] for place in range(len(first)) if not last.startswith(first[: place + 1])), first)
    return common.rstrip("-_. ").removesuffix("seed").rstrip("-_. ") or folders[0]


def _unique(names: list[str]) -> list[str]:
    """The same names, those that repeat with a number."""
    return [name if names.count(name) == 1 else f"{name} #{names[: place + 1].count(name)}" for place, name in enumerate(names)]


def differences(rows: Sequence[ConfigRow]) -> dict[str, list[Any]]:
    """field -> each row's value, only of fields in which rows differ: the configuration's, then commit, machine and versions."""
    rows = [row for row in rows if row.trained]
    configs = [row.config for row in rows]
    fields = [name for name in dict.fromkeys(name for config in configs for name in config) if name not in REPEATED]
    found = {name: [config.get(name) for config in configs] for name in fields}
    found |= {
        f"{name} (run.json)": [_shown_value(row, name) for row in rows] for name in ("commit", "device", "python", "torch", "transformers")
    }
    seeds = {"seed": [", ".join(str(run.seed) for run in row.runs) for row in rows]}
    return {name: values for name, values in (found | seeds).items() if _differ(values)}


def _shown_value(row: ConfigRow, name: str) -> str | None:
    """What run.json says, of all seeds; None where no seed has it."""
    parts = [run.provenance.get(name, (run.provenance.get("versions") or {}).get(name)) for run in row.runs]
    return ", ".join(dict.fromkeys(str(value) for value in parts if value is not None)) or None


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def value_text(value: Any) -> str:
    """A configuration's value as one reads it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def memory_measure(rows: Sequence[ConfigRow]) -> str | None:
    """The first measure of `MEMORY` that any row has above 0."""
    for name in MEMORY:
        if any((spread := row.measured(name)) is not None and spread.mean > 0 for row in rows):
            return name
    return None


def updates_with_odd_loss(run: Run) -> int:
    """Updates whose loss is not finite."""
    return sum(not math.isfinite(line["loss"]) for line in run.log)
