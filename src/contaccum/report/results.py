"""What one run came to: the data that tables and plots draw."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contaccum.logfile import read_log


@dataclass(frozen=True)
class RunResult:
    name: str
    metrics: dict[str, float]  # fractions, e.g. {"MRR": 0.288}
    seconds: float
    peak_bytes: int
    negatives_per_query: int
    log: list[dict[str, Any]] = field(repr=False)  # lines of log.jsonl

    def as_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "log"}


def log_of(run_folder: Path) -> list[dict[str, Any]]:
    return read_log(run_folder / "log.jsonl")


def best(results: list[RunResult], metric: str) -> float:
    return max(result.metrics[metric] for result in results)
