"""Predictions for one model and one memory: which micro-batch sizes there are, and the largest that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from contaccum.memory.prediction.predict import Prediction, Predictor
from contaccum.methods.config import TrainConfig
from contaccum.methods.table import get_method

MARGIN = 0.05  # of the memory, left free


@dataclass(frozen=True)
class Fit:
    """A configuration and the peak predicted for it."""

    config: TrainConfig
    prediction: Prediction


@dataclass(frozen=True)
class Alternative:
    """A change of options and what it would allow."""

    options: str
    n_local: int
    peak_bytes: int
    price: str


@dataclass(frozen=True)
class Measured:
    """What real updates took on this machine's GPU."""

    n_local: int
    gradient_checkpointing: bool
    peak_bytes: int  # reserved
    allocated_bytes: int
    samples_per_second: float
    cuda_graphs: bool = False


@dataclass(frozen=True)
class Plan:
    config: TrainConfig  # resolved: n_local and gradient_checkpointing are those planned
    memory_bytes: int
    prediction: Prediction
    more: list[Alternative] = field(default_factory=list)
    measured: Measured | None = None
    slower: list[Measured] = field(default_factory=list)  # what was tried beside it

    @property
    def micro_batches(self) -> int:
        """K: micro-batches, or GradCache's mini-batches, that make one update."""
        return 1 if get_method(self.config.method).one_batch else self.config.n_total // self.config.n_local

    @property
    def bank(self) -> int:
        return self.config.bank_size if get_method(self.config.method).bank else 0

    def as_dict(self) -> dict[str, Any]:
        names = ["model", "method", "n_total", "n_local", "hard_negatives", "max_seq_length", "precision", "tied"]
        names += ["gradient_checkpointing", "cuda_graphs"]
        return {
            **{name: getattr(self.config, name) for name in names},
            "micro_batches": self.micro_batches,
            "bank": self.bank,
            "memory_bytes": self.memory_bytes,
            "margin": MARGIN,
            **vars(self.prediction),
            "more": [vars(alternative) for alternative in self.more],
            "measured": None if self.measured is None else vars(self.measured),
            "slower": [vars(found) for found in self.slower],
        }


# Real updates of a configuration, within so many bytes, with queries of at most so many tokens; None where memory ran out.
TryOut = Callable[[TrainConfig, int, int | None], Measured | None]


@dataclass(frozen=True)
class Planner:
    """Answers questions about one model, memory and number of samples per update."""

    predictor: Predictor
    memory_bytes: int
    query_tokens: int | None = None
    processes: int = 1
    apart: bool = False
    try_out: TryOut | None = None
    say: Callable[[str], None] = lambda line: None

    @property
    def room(self) -> int:
        return int(self.memory_bytes * (1 - MARGIN))

    def predict(self, config: TrainConfig) -> Fit:
        return Fit(config, self.predictor.predict(config, self.query_tokens, self.processes, self.apart))

    def sizes(self, config: TrainConfig) -> list[int]:
        """Micro-batch sizes to choose from, smallest first."""
        share = config.n_total // self.processes
        if get_method(config.method).one_batch:
            return [share]
        return [n for n in range(1, share + 1) if share % n == 0]

    def largest(self, config: TrainConfig) -> Fit | None:
        """The largest size that fits, or None. Peaks grow with the size, so sizes are bisected."""
        sizes = self.sizes(config)
        found, low, high = None, 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            fit = self.predict(replace(config, n_local=sizes[middle]))
            if fit.prediction.peak_bytes <= self.room:
                found, low = fit, middle + 1
            else:
                high = middle
        return found


def describe(found: TrainConfig | Measured) -> str:
    """How a micro-batch is computed, as plans tell it."""
    marks = [" and gradient checkpointing"] * found.gradient_checkpointing + [" and CUDA graphs"] * found.cuda_graphs
    return f"n = {found.n_local}{''.join(marks)}"


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
