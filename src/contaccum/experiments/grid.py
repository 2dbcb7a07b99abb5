"""An experiment as data: cells that differ in a few training options, at one of three scales, on one of the data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

TRAINED = ("train", "pretrain", "fine-tune")
# Encoders that are measured, not trained: layers, width and heads.
SIZES = {"tiny": (1, 32, 2), "minilm-l3": (3, 384, 12), "minilm-l6": (6, 384, 12), "bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)}


@dataclass(frozen=True)
class Cell:
    """One training run, or one measurement, of an experiment. Seeds of one `group` are averaged."""

    group: str  # "contaccum, n = 8"
    options: dict[str, Any]  # TrainConfig fields, or of the measurement
    facts: dict[str, Any] = field(default_factory=dict)  # what tables and plots sort by: {"n": 8, "bank": 1024}
    kind: str = "train"  # or another of `contaccum.experiments.cell.KINDS`
    evaluated: bool = True  # search and judge the test queries after training
    seed: int = 0

    @property
    def trains(self) -> bool:
        """Whether it is no mere measurement."""
        return self.kind in TRAINED

    @property
    def name(self) -> str:
        """A folder's name."""
        words = "".join(letter if letter.isalnum() or letter in ".+" else " " for letter in self.group).split()
        return "-".join([*words, f"seed{self.seed}"])


@dataclass(frozen=True)
class PreTraining:
    """How large the runs of `pretrain` are."""

    samples: int  # of each cell
    batches: tuple[int, ...]  # of GradCache
    micro: tuple[int, ...]
    banks: tuple[int, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Scale:
    """How large the runs are. `micro` are the sizes that fit 11, 24 and 80 GB in the paper; the last is a whole update."""

    micro: tuple[int, int, int]
    bank: int
    banks: tuple[int, ...]
    totals: tuple[int, ...]  # samples per update, of bank-size
    speed_totals: tuple[int, ...]
    speed_banks: tuple[int, ...]
    memory_banks: tuple[int, ...]
    bench_model: str
    bench_tokens: tuple[int, int]  # queries, passages
    train: dict[str, Any]  # TrainConfig fields
    pretraining: PreTraining
    diagnose_every: int = 10  # of experiments whose figure shows diagnostics
    rows: int | None = None  # training rows, test queries and passages at most; None: all
    queries: int | None = None
    passages: int | None = None
    speed_rounds: int = 3  # turns of each way
    speed_updates: int = 3  # timed per turn

    @property
    def n(self) -> int:
        return self.micro[0]

    @property
    def n_total(self) -> int:
        return self.micro[2]


PAPERS = {"drift_correction": None, "gradient_scale": "paper"}  # the paper's bank: vectors as they were stored, averaged over all rows
CORRECTED = {"drift_correction": "mean+zero-sum"}  # our default, see docs/drift.md
_PAPER = {"similarity": "dot", "pooling": "cls", "max_seq_length": 256, "lr": 2e-5, "warmup_updates": 1237}
_SMALL = {"similarity": "cosine", "pooling": "cls", "max_seq_length": 128, "lr": 1e-4, "epochs": 1, "save_every": 0}
_TINY = {"similarity": "cosine", "pooling": "mean", "max_seq_length": 16, "lr": 1e-3, "epochs": 1, "save_every": 0}
_PAPERS = Scale(
    micro=(8, 32, 128),
    bank=2048,
    banks=(0, 128, 512, 1024, 2048),
    totals=(8, 32, 64, 128),
    speed_totals=(8, 16, 32, 64, 128, 256, 512),
    speed_banks=(128, 512, 1024, 2048, 8192),
    memory_banks=(128, 512, 1024, 2048, 5096),
    bench_model="bert-base",
    bench_tokens=(256, 256),
    train=_PAPER,
    pretraining=PreTraining(8192 * 1250, (128, 1024, 8192), (8, 32), (1024, 8192, 65_536), (2e-5, 1e-4, 5e-4)),
)
_SMALLER = replace(
    _PAPERS,
    bank=1024,
    speed_totals=(8, 32, 128, 512),
    bench_tokens=(32, 128),
    train=_SMALL,
    pretraining=PreTraining(8192 * 125, (128, 1024, 8192), (8, 32), (1024, 8192, 65_536), (2e-5, 1e-4, 5e-4)),
    rows=20_000,
    speed_updates=1,
)
_SHORT = {**_SMALL, "pooling": "mean", "max_seq_length": 32, "diagnose_every": 0}
_ON_CPU = PreTraining(8192 * 4, (128, 1024, 8192), (8, 32), (256, 1024), (1e-3, 4e-3))
SCALES = {
    "paper": _PAPERS,
    "small": _SMALLER,
    "cpu": replace(_SMALLER, train=_SHORT, pretraining=_ON_CPU, rows=5120, queries=1000, passages=5000),
    "tiny": Scale(
        micro=(2, 4, 8),
        bank=16,
        banks=(0, 8, 16),
        totals=(2, 8),
        speed_totals=(8, 16),
        speed_banks=(8, 16),
        memory_banks=(16, 64),
        bench_model="tiny",
        bench_tokens=(8, 8),
        train=_TINY,
        pretraining=PreTraining(32, (8, 16), (2,), (16,), (1e-3,)),
        diagnose_every=1,
        rows=48,
        queries=12,
        passages=60,
    ),
}


@dataclass(frozen=True)
class DataSet:
    """`form`: beir, msmarco, dpr or harvest. `epochs` and `bank` are the paper's."""

    form: str
    split: str = "test"
    epochs: float = 40
    bank: int = 1024
    metrics: tuple[str, ...] = ("MRR@10", "NDCG@10", "Recall@20", "Recall@100")
    match: str = "string"

    @property
    def headline(self) -> str:
        return "Top@20" if self.form == "dpr" else self.metrics[0]


DATASETS = {
    "acl": DataSet("beir"),
    "harvest": DataSet("harvest"),
    "squad-wiki": DataSet("dpr", bank=128),
    "nq": DataSet("dpr", bank=2048),
    "trivia": DataSet("dpr", epochs=100, bank=512),
    "webq": DataSet("dpr", epochs=100, bank=128),
    "trec": DataSet("dpr", epochs=40, bank=128, match="regex"),
    "msmarco": DataSet("msmarco", "dev", 10, 1024, ("NDCG@20", "NDCG@100", "Recall@20", "Recall@100")),
}


@dataclass(frozen=True)
class Experiment:
    """`cells` of a scale, for data with or without hard negatives and a bank of so many tuples; `draw` makes its figure."""

    name: str
    paper: str  # where it is in the paper
    title: str
    cells: Callable[[Scale, int, bool], list[Cell]]
    draw: Callable[[Sequence[dict[str, Any]], str], Any]  # result rows, headline metric -> matplotlib figure
    diagnosed: bool = False  # its figure shows what diagnostics found


def with_seeds(cells: Sequence[Cell], seeds: Sequence[int]) -> list[Cell]:
    """Every cell once per seed, seed by seed, so that an interrupted grid is complete for the first seeds. Measurements have one."""
    return [replace(cell, seed=seed) for i, seed in enumerate(seeds) for cell in cells if i == 0 or cell.trains]
