"""What a run leaves behind while it trains: a line of JSON per update, and a progress bar for the person watching."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.adapters.trainer import FlushedLog, SkippedSteps
from contaccum.core.criterion import DualBankInfoNCE
from contaccum.core.micro_batch import MicroStep
from contaccum.data.training_set import DrawnByEpoch
from contaccum.memory.limit import peak_bytes, process_peak_bytes
from contaccum.training.logfile import append_lines, keep_updates, read_log
from contaccum.training.sound import check_learns, check_losses

SHOWN_EVERY = 1.0  # seconds between new figures in the bar: reading a loss waits for the GPU


class RunLog(FlushedLog, SkippedSteps):
    """One line per update in `log.jsonl`: nothing in it depends on the clock, so that a resumed run's log equals an uninterrupted one's.

    Values stay on the device until they are written, every `every` updates and before every checkpoint.
    """

    def __init__(self, file: Path, criterion: DualBankInfoNCE, every: int = 10, writes: bool = True) -> None:
        self.file, self.every, self.writes = file, every, writes
        self.losses: list[Tensor] = []  # of the micro-steps since the last update
        self.left_out: list[Tensor] = []  # negatives of a query that were too similar, likewise
        self.negatives, self.has_bank = 0, criterion.bank.size > 0
        self.waiting: list[dict[str, Any]] = []
        self.written: list[dict[str, Any]] = []  # lines, also those of a run that is resumed
        criterion.observers.append(self._observe)

    def _observe(self, step: MicroStep) -> None:
        self.losses.append(step.loss)
        self.negatives = step.negatives_per_query
        if step.blocks.left_out is not None:
            self.left_out.append(step.blocks.left_out / len(step.rows))

    @property
    def counted(self) -> int:
        return len(self.losses)

    @counted.setter
    def counted(self, micro_steps: int) -> None:
        del self.losses[micro_steps:], self.left_out[micro_steps:]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.losses, self.left_out, self.waiting = [], [], []
        if self.writes:
            keep_updates(self.file, state.global_step)
        self.written = read_log(self.file) if self.writes else []

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Before the schedule moves on: this update's own learning rate."""
        self.lr = float(optimizer.param_groups[0]["lr"])
        self.skipped = self.was_skipped(optimizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        line = {"update": state.global_step, "epoch": state.epoch, "lr": self.lr, "losses": self.losses, "left_out": self.left_out}
        self.waiting.append(line | {"negatives_per_query": self.negatives} | ({"skipped": True} if self.skipped else {}))
        self.losses, self.left_out = [], []
        if state.global_step % self.every == 0:
            self.flush()

    def flush(self) -> None:
        lines = [_resolved(line) for line in self.waiting]
        self.waiting = []
        self.written += lines
        if self.writes:
            append_lines(self.file, lines)
        check_losses(self.written)
        if not self.has_bank:  # which may come later, and bring negatives
            check_learns(self.written)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        check_losses(self.written, ended=True)
        check_learns(self.written, ended=True)

    def newest(self) -> dict[str, Any]:
        """The line of the update that ended last, written or not; its losses are waited for."""
        return _resolved(self.waiting[-1]) if self.waiting else self.written[-1]

    def final_loss(self) -> float | None:
        """Mean over the micro-batches of the last tenth of the updates, at most 50: the last alone may be a short one."""
        last = self.written[-max(1, min(50, len(self.written) // 10)) :]
        micro_batches = sum(line["micro_batches"] for line in last)
        return sum(line["loss"] * line["micro_batches"] for line in last) / micro_batches if micro_batches else None

    @property
    def most_negatives(self) -> int | None:
        """Of a query; the last micro-batch of an epoch may be smaller."""
        return max((line["negatives_per_query"] for line in self.written), default=None)


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Of tensors with one value each: read together, the device is waited for once."""
    return torch.stack(list(tensors)).tolist() if tensors else []


def _resolved(line: dict[str, Any]) -> dict[str, Any]:
    """The line with its tensors read: means over the micro-batches."""
    losses, left_out = numbers(line["losses"]), numbers(line["left_out"])
    known = {key: value for key, value in line.items() if key not in ("losses", "left_out")}
    counted = {"left_out_per_query": sum(left_out) / len(left_out)} if left_out else {}
    return known | counted | {"loss": sum(losses) / max(1, len(losses)), "micro_batches": len(losses)}


class Progress(TrainerCallback):
    """A bar with loss, negatives per query, samples/s and time left; where nobody watches (a log file), a line every tenth of the run."""

    def __init__(self, log: RunLog, samples_per_update: int) -> None:
        self.log, self.samples_per_update = log, samples_per_update
        self.bar: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.started, self.first, self.shown = time.perf_counter(), state.global_step, 0.0
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="update", dynamic_ncols=True, disable=None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is None:
            return
        done, total = state.global_step, state.max_steps
        tenth = done * 10 // total > (done - 1) * 10 // total
        if tenth if self.bar.disable else time.perf_counter() - self.shown > SHOWN_EVERY:
            self.shown = time.perf_counter()
            speed, line = (done - self.first) * self.samples_per_update / (self.shown - self.started), self.log.newest()
            text = f"loss {line['loss']:.4f}, {line['negatives_per_query']} negatives, {speed:.0f} samples/s{_memory()}"
            if self.bar.disable:
                print(f"update {done:,} of {total:,}: {text}", file=sys.stderr, flush=True)
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(1)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()


def _memory() -> str:
    """The peak so far, on the GPU or of the process."""
    peak = peak_bytes() or process_peak_bytes()
    return f", {peak / 1e9:.1f} GB" if peak else ""


class EpochForDraws(TrainerCallback):
    """Keeps the epoch of what is drawn again for each (hard negatives, pairs) at the trainer's."""

    def __init__(self, draw: DrawnByEpoch) -> None:
        self.draw = draw

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.draw.epoch = int((state.epoch or 0.0) + 1e-6)
