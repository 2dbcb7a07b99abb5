"""The first five minutes: `compare` on text that every machine has, on two CPU cores and without a network.

1. Docstring -> source pairs from the installed packages become a BEIR folder.
2. A small encoder with a tokenizer of its own learns from half of them in large batches, as the pre-trained encoder to start from.
3. `compare` fine-tunes it by every method on the other half.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.comparison.compare import Comparison, compare
from contaccum.data.harvest import harvest, write_beir
from contaccum.methods.config import TrainConfig
from contaccum.towers.random_encoder import write_encoder

N_TOTAL = 128
# Names as the table shows them -> options of `contaccum train`. The paper's bank is as large as an update, as in its smaller data sets.
COMPARED: dict[str, dict[str, Any]] = {
    "gradaccum": {"method": "gradaccum"},
    "gradcache": {"method": "gradcache"},
    "contaccum (paper)": {"method": "contaccum", "drift_correction": None, "gradient_scale": "paper", "bank": N_TOTAL},
    "contaccum": {"method": "contaccum"},
}
START = "start"  # folder and split of the encoder that all of them start from
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
    dev: int = 200  # for the learning curves
    epochs: float = 2
    n_total: int = N_TOTAL
    n_local: int = 8
    lr: float = 4e-4
    max_seq_length: int = 32
    seed: int = 42
    vocabulary: int = 8000
    width: int = 128
    layers: int = 2

    def check(self) -> None:
        """ValueError for what cannot be; each part of the pairs must fill an update."""
        TrainConfig(epochs=self.epochs, seed=self.seed, lr=self.lr, **self.sizes()).check_values()
        if self.pairs < (least := 4 * self.n_total):
            raise ValueError(f"pairs={self.pairs} are too few for updates of {self.n_total}; use {least} or more")

    def sizes(self) -> dict[str, Any]:
        return {"n_total": self.n_total, "n_local": self.n_local, "max_seq_length": self.max_seq_length}


def quickstart(output: Path, settings: Settings, say: Callable[[str], None] | None = None) -> Comparison:
    """All three steps in `output`, a new folder."""
    tell = say or (lambda line: print(line, file=sys.stderr, flush=True))
    settings.check()
    output.mkdir(parents=True)
    model = starting_point(output, settings, tell)
    return compare(
        output / "data",
        model=str(model),
        output=output / "compare",
        **settings.sizes(),
        epochs=settings.epochs,
        lr=settings.lr,
        minutes=0,
        seeds=[settings.seed],
        settings={"tied": False},
        configurations=COMPARED,
        title="contaccum quickstart",
        introduction=INTRODUCTION,
        say=tell,
    )


def starting_point(output: Path, settings: Settings, say: Callable[[str], None]) -> Path:
    """The data in `output`, and the encoder to start from, which is returned."""
    from contaccum.training.run import train

    say("Reading docstrings and functions of the installed packages ...")
    pairs = harvest(limit=settings.pairs)
    held = settings.test + settings.dev
    write_beir(pairs, output / "data", test=settings.test, dev=settings.dev, start=(len(pairs) - held) // 2)
    texts = (text for pair in pairs for text in (pair.query, pair.passage))
    shape: dict[str, Any] = {"vocabulary": settings.vocabulary, "width": settings.width, "layers": settings.layers, "seed": settings.seed}
    write_encoder(texts, output / "encoder", **shape, max_seq_length=settings.max_seq_length)
    say(f"{len(pairs):,} pairs. Training an encoder to start from on half of them ...")
    folders: dict[str, Any] = {"data": str(output / "data"), "model": str(output / "encoder"), "output": str(output / START)}
    options: dict[str, Any] = {
        "method": "dpr",
        "tied": True,
        "split": START,
        "epochs": 1.0,
        "lr": 1e-3,
        "save_every": 0,
        "seed": settings.seed,
    }
    train(TrainConfig(**folders, **settings.sizes(), **options, pooling="mean", similarity="cosine"))
    return output / START / "model"


def free_folder(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that is not there yet: nothing is overwritten."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
