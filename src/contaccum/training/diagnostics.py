"""What happens inside a training run, as a line of JSON per update in `diagnostics.jsonl`.

1. Every update: gradient norm of each tower after clipping, and their ratio, passages over queries (the paper's GradNormRatio).
2. Every `every` updates: seconds of its forward, loss, backward and update; samples per second; memory held, and the bank's as predicted;
   how far the mean of the vectors moved while the bank was filled (`bank_shift`).
3. Every `mass_every` updates, at the last micro-step: the softmax mass that the current queries give to passages of each age (SimMass).
4. Every `drift_every` updates, on request: cosine between vectors in the bank and the same texts encoded now, by age.

Nothing here changes the training: no random number is drawn, and values of 1 stay on the device until they are written.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from contaccum.adapters.losses import ContAccumLoss
from contaccum.adapters.trainer import FlushedLog
from contaccum.core.bank import DualBank
from contaccum.core.micro_batch import MicroStep
from contaccum.memory.limit import peak_bytes
from contaccum.training.logfile import append_lines, keep_updates
from contaccum.training.probe import BankProbe
from contaccum.training.runlog import numbers
from contaccum.training.stopwatch import Stopwatch

HURTFUL_SHIFT = 1.0  # of `bank_shift`: 2.5 in the quickstart's collapsing run, 0.1 in the corrected one
HURTFUL_RATIO = 10.0  # of gradient norms, either way: the paper saw 30 with one bank; the quickstart's stay between 1 and 2.5
SHIFT_FROM = 32  # tuples in a bank: in a smaller one the means' own noise is no less than a hurtful shift
PHASES = ("forward", "loss", "backward", "update")


class Diagnostics(FlushedLog):
    """Watches `loss` in a trainer to whose callbacks it is added; an interval of 0 leaves that part out."""

    def __init__(
        self, file: Path, loss: ContAccumLoss, every: int = 10, mass_every: int = 50, drift_every: int = 0, writes: bool = True
    ) -> None:
        self.file, self.loss, self.writes = file, loss, writes
        self.every, self.mass_every, self.drift_every = every, mass_every, drift_every
        self.towers = tower_parameters(loss.model)
        self._parameter = next(loss.model.parameters())
        self.probe = BankProbe(loss) if drift_every else None
        self.update = 1  # the one that is being computed
        self._begin()
        loss.register_forward_pre_hook(lambda *_: self._mark("start"))
        loss.criterion.register_forward_pre_hook(lambda *_: self._mark("forward"))
        loss.criterion.register_forward_hook(lambda *_: self._mark("loss"))
        loss.criterion.observers.append(self._observe)

    def _begin(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self.norms: dict[str, Tensor] = {}
        self.scores: Scores | None = None
        self.left_out: list[Tensor] = []  # negatives of a query that were too similar, by micro-step
        self.watch = Stopwatch()
        self.counted, self.since = 0, time.perf_counter()  # samples
        self.warned: set[str] = set()

    def _due(self, every: int) -> bool:
        return every > 0 and self.update % every == 0

    def _mark(self, phase: str) -> None:
        if self._due(self.every):
            self.watch.mark(phase, self._parameter.device)  # the model's own `device` looks at all of it

    def _observe(self, step: MicroStep) -> None:
        self.counted += len(step.rows)
        if step.blocks.left_out is not None and self._due(self.every):
            self.left_out.append(step.blocks.left_out / len(step.rows))
        if self._due(self.mass_every):
            self.scores = Scores.of(step)  # the update's last micro-step stays

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.update = state.global_step + 1
        self._begin()
        if self.writes:
            keep_updates(self.file, state.global_step)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark("backward")

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark("backward")
        self.norms = {name: torch.nn.utils.get_total_norm(_gradients(parameters)) for name, parameters in self.towers.items()}

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark("update")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        line: dict[str, Any] = {"update": state.global_step, "norms": self.norms}
        if self.scores is not None:
            line["sim_mass"], self.scores = sim_mass(self.scores), None
        if self.probe is not None and self._due(self.drift_every):
            line["drift"] = self.probe.drift()
        if timed := self._due(self.every):
            line["watch"], self.watch = self.watch, Stopwatch()
            line |= {"memory": memory(self.loss.criterion.bank), "bank_shift": bank_shift(self.loss.criterion.bank)}
            if self.left_out:
                line["left_out"], self.left_out = self.left_out, []
        self.waiting.append(line)
        self.update = state.global_step + 1
        if timed or "drift" in line:
            self.flush()

    def flush(self) -> None:
        lines, self.waiting = [self._resolved(line) for line in self.waiting], []
        if self.writes:
            append_lines(self.file, lines)
            self._warn(lines)

    def _warn(self, lines: Sequence[dict[str, Any]]) -> None:
        """Once a run for each trouble that these lines show."""
        for kind, text in troubles(lines, self.loss.criterion.drift_correction):
            if kind not in self.warned:
                self.warned.add(kind)
                warnings.warn(text, stacklevel=2)

    def _resolved(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line with tensors and clocks read."""
        of_tower = line.pop("norms")
        norms = dict(zip(of_tower, numbers(list(of_tower.values())), strict=True))
        entry = {"update": line.pop("update"), **{f"{name}_grad_norm": norm for name, norm in norms.items()}}
        entry["grad_norm_ratio"] = norms["passage"] / norms["query"] if norms.get("query") else None
        if left_out := numbers(line.pop("left_out", [])):
            entry["left_out_per_query"] = sum(left_out) / len(left_out)
        watch: Stopwatch | None = line.pop("watch", None)
        if watch is not None:
            entry["seconds"] = watch.seconds(PHASES)  # waits for the GPU, hence the clock is right
            entry["samples_per_second"] = self.counted / (time.perf_counter() - self.since)
            self.counted, self.since = 0, time.perf_counter()
        return entry | line


def troubles(lines: Sequence[dict[str, Any]], correction: str | None = None) -> Iterator[tuple[str, str]]:
    """(kind, a sentence that names the value and the remedy) for what will hurt a training with this drift correction."""
    corrected = "" if correction == "mean+zero-sum" else 'drift_correction="mean+zero-sum", '
    shifts = [max(line["bank_shift"].values()) for line in lines if line.get("bank_shift")]
    if shifts and shifts[-1] > HURTFUL_SHIFT:
        remedy = f"use {corrected}a smaller bank or a lower learning rate"
        yield "shift", f"the bank's vectors have shifted by {shifts[-1]:.1f} of their spread since they were stored; {remedy}"
    ratios = sorted(line["grad_norm_ratio"] for line in lines if line.get("grad_norm_ratio"))
    middle = ratios[len(ratios) // 2] if ratios else 1.0
    if not 1 / HURTFUL_RATIO < middle < HURTFUL_RATIO:
        remedy = f"use {corrected}as many queries as passages in the bank (query_bank_size=None) or a lower learning rate"
        yield "ratio", f"the passage tower's gradient is {middle:.2g} times the query tower's; {remedy}"


# 1. Gradient norms ---------------------------------------------------------------------------------------------------------


def tower_parameters(model: SentenceTransformer) -> dict[str, list[torch.nn.Parameter]]:
    """The trained parameters of the query and the passage tower, or of "both" where they are one."""
    router = next((module for module in model.modules() if isinstance(module, Router)), None)
    towers = {"both": model} if router is None else {"query": router.sub_modules["query"], "passage": router.sub_modules["document"]}
    return {name: [p for p in tower.parameters() if p.requires_grad] for name, tower in towers.items()}


def _gradients(parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


# 2. Memory and shift -----------------------------------------------------------------------------------------------------------------


def memory(bank: DualBank) -> dict[str, int | None]:
    return {"peak_bytes": peak_bytes(), "bank_bytes": bank.nbytes, "bank_predicted_bytes": bank.vector_bytes}


def bank_shift(bank: DualBank) -> dict[str, float] | None:
    """Distance between the means of the newest and the oldest vectors in a full bank, over the vectors' spread, as the loss reads them.

    Sampling alone gives about sqrt(2 / vectors in a mean): 0.2 for 64. None while the bank fills, and of a small one.
    """
    if bank.size < SHIFT_FROM or len(bank) < bank.size:
        return None
    entry = {"passage": bank.passages[:, 0], "query": bank.queries}
    return {name: _shift(vectors.float()) for name, vectors in entry.items() if len(vectors) >= SHIFT_FROM}


def _shift(vectors: Tensor) -> float:
    end = min(128, len(vectors) // 4)
    spread = (vectors - vectors.mean(0)).norm(dim=1).square().mean().sqrt()
    return float((vectors[-end:].mean(0) - vectors[:end].mean(0)).norm() / spread)


# 3. Similarity mass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What a micro-step's current queries were compared with."""

    current: Tensor  # (n, n, c) own micro-batch
    banked: Tensor | None  # (n, m, c')
    ages: Tensor | None  # (m,) of the bank's tuples, in updates at peak learning rate

    @staticmethod
    def of(step: MicroStep) -> Scores:
        """A copy: the bank goes on."""
        return Scores(step.blocks.current_current.clone(), step.blocks.current_bank, None if step.ages is None else step.ages.clone())


def sim_mass(scores: Scores) -> dict[str, Any]:
    """The share of the current queries' softmax, averaged over them, that falls on their positives, and on other passages by age.

    Tuples of one update share an age; age 0 is this update, the micro-batch itself included. `passages` counts columns of that age per
    query, masked ones included.
    """
    n, _, c = scores.current.shape
    parts = [scores.current.flatten(1)] + ([] if scores.banked is None else [scores.banked.flatten(1)])
    weights = torch.cat(parts, dim=1).double().softmax(1)  # (n, n * c + m * c')
    own = weights[:, : n * c].view(n, n, c)
    positive = own[:, :, 0].diagonal().clone()
    of_age = {0.0: [float(own.sum() - positive.sum()) / n, n * c - 1]}
    if scores.banked is not None and scores.ages is not None:
        per_tuple = weights[:, n * c :].view(n, -1, scores.banked.shape[2]).sum(2).mean(0)  # (m,)
        ages, which, counts = torch.unique(scores.ages, return_inverse=True, return_counts=True)
        masses = torch.zeros_like(ages, dtype=torch.float64).index_add(0, which, per_tuple)
        for age, mass, count in zip(ages.tolist(), masses.tolist(), counts.tolist(), strict=True):
            known = of_age.setdefault(age, [0.0, 0])
            known[0], known[1] = known[0] + mass, known[1] + count * scores.banked.shape[2]
    by_age = [
        {"age_updates": i, "age": age, "mass": mass, "passages": int(passages)}
        for i, (age, (mass, passages)) in enumerate(sorted(of_age.items()))
    ]
    return {"positive": float(positive.mean()), "by_age": by_age}
