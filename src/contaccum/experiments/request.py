"""What `contaccum reproduce` is asked for, and the cells that makes. Nothing here needs PyTorch: a dry run holds little."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contaccum.experiments import ablation, bank_size, gradnorm, main_table, memory, pretrain, simmass, speed
from contaccum.experiments.grid import DATASETS, SCALES, Cell, Experiment, with_seeds

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT for module in (main_table, ablation, bank_size, speed, gradnorm, simmass, memory, pretrain)
}
MEASURED = {"speed": {"bank"}, "memory": set[str]()}  # experiments that train nothing, and the settings that they have


@dataclass(frozen=True)
class Request:
    """What `contaccum reproduce` is asked for."""

    experiment: str
    output: Path
    dataset: str = "harvest"
    data: Path | None = None
    scale: str = "small"
    model: str | None = None  # None: bert-base-uncased, at scale tiny as "random": an encoder of random weights
    seeds: tuple[int, ...] = (0,)
    jobs: int = 1
    settings: tuple[tuple[str, Any], ...] = ()  # TrainConfig fields that override the scale's
    only: tuple[str, ...] = ()  # cells whose group has one of these in its name; none: all
    pretraining_samples: int | None = None  # of each cell of pretrain; None: the scale's

    def check(self) -> None:
        for name, known in (("experiment", EXPERIMENTS), ("dataset", DATASETS), ("scale", SCALES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(known)}")
        if self.jobs < 0 or not self.seeds:
            raise ValueError(f"jobs={self.jobs} must be 0 (all in this process) or more, and there must be a seed")
        self._check_settings()

    def _check_settings(self) -> None:
        """Nothing that would be left unused, and nothing that leaves the figure empty."""
        settings, name = dict(self.settings), self.experiment
        if name in MEASURED:
            if self.model is not None:
                raise ValueError(f"--model has no meaning for {name}, which trains nothing; leave it out")
            if unused := sorted(settings.keys() - MEASURED[name]):
                raise ValueError(f"--set {unused[0]} has no meaning for {name}, which trains nothing; leave it out")
        if self.pretraining_samples is not None:
            self._check_samples(self.pretraining_samples)
        if EXPERIMENTS[name].diagnosed and settings.get("diagnose_every") == 0:
            raise ValueError(f"--set diagnose_every=0 leaves {name} nothing to show; leave it out")
        if name == "gradnorm" and settings.get("tied"):
            raise ValueError("--set tied=true has one tower, and gradnorm shows the ratio of two; leave it out")

    def _check_samples(self, samples: int) -> None:
        largest = max(SCALES[self.scale].pretraining.batches)
        if self.experiment != pretrain.EXPERIMENT.name:
            raise ValueError(f"--pretraining-samples has no meaning for {self.experiment}; leave it out")
        if samples < largest:
            raise ValueError(f"--pretraining-samples {samples} fill no update of {largest}; give {largest} or more")

    def identity(self) -> dict[str, Any]:
        """What results in one folder have in common, as JSON keeps it."""
        shared = {name: getattr(self, name) for name in ("experiment", "dataset", "scale", "model", "pretraining_samples")}
        data = None if self.data is None else os.path.realpath(self.data)
        found: dict[str, Any] = json.loads(json.dumps({**shared, "data": data, "settings": dict(self.settings)}))
        return found


def planned(request: Request) -> list[Cell]:
    scale = SCALES[request.scale]
    settings = dict(request.settings)
    if request.pretraining_samples is not None:
        scale = replace(scale, pretraining=replace(scale.pretraining, samples=request.pretraining_samples))
    bank = settings.get("bank", DATASETS[request.dataset].bank if request.scale == "paper" else scale.bank)
    if bank == "auto":
        raise ValueError("--set bank=auto is no bank of the paper's; leave it out for the scale's, or give a number")
    cells = EXPERIMENTS[request.experiment].cells(scale, bank, DATASETS[request.dataset].form in ("dpr", "msmarco"))
    chosen = [cell for cell in cells if not request.only or any(word in cell.group for word in request.only)]
    if not chosen:
        raise ValueError(f"--only {request.only[0]!r} names no cell; they are {'; '.join(cell.group for cell in cells)}")
    return with_seeds(chosen, request.seeds)
