"""Training with a bank in sentence-transformers: `ContAccumTrainer`, or `ContAccumCallback` for a trainer of your own."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformerTrainer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.adapters.checkpoint_folders import checkpoint_folder, is_complete, last_complete_checkpoint, resumed_folder
from contaccum.adapters.losses import ContAccumLoss
from contaccum.common.errors import CheckpointError
from contaccum.common.outputs import whole_path
from contaccum.core.bank_size import auto_bank

STATE_NAME = "contaccum_state"


@runtime_checkable
class BeforeCheckpoint(Protocol):
    """A callback with something to write into, or beside, a checkpoint before it counts as complete."""

    def before_checkpoint(self, folder: Path) -> None: ...


@runtime_checkable
class CountsMicroSteps(Protocol):
    """A callback that observes micro-steps: `counted` is put back to what it was where one has failed and will be done again."""

    counted: int


class FlushedLog(TrainerCallback, ABC):
    """A log that holds lines back: they are written when training ends, and before a checkpoint counts as complete."""

    @abstractmethod
    def flush(self) -> None: ...

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.flush()

    def before_checkpoint(self, folder: Path) -> None:
        self.flush()


class SkippedSteps(TrainerCallback):
    """Knows whether the last optimizer step was skipped for fp16 overflow.

    Accelerate notices only where the scaler leaves out the optimizer's `step`; a fused optimizer is called all the same and skips
    inside, which shows in the scaler's lowered scale.
    """

    scale_before: float | None = None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.scale_before = _loss_scale(optimizer)

    def was_skipped(self, optimizer: Any) -> bool:
        scale = _loss_scale(optimizer)
        lowered = scale is not None and self.scale_before is not None and scale < self.scale_before
        return lowered or bool(getattr(optimizer, "step_was_skipped", False))


def _loss_scale(optimizer: Any) -> float | None:
    scaler = getattr(optimizer, "scaler", None)
    return None if scaler is None else float(scaler.get_scale())


class ContAccumCallback(SkippedSteps):
    """Keeps the banks of a loss (or of several, or of one inside another) in step with a `SentenceTransformerTrainer`.

    1. Training begins: banks are reset, and those of automatic size get it; or they are read from the checkpoint that is resumed.
    2. An optimizer update ends: `after_update` with its learning rate over the peak one. A step skipped for overflow changed no
       weights and does not count.
    3. A checkpoint is saved: banks are written into it, one file per process where they differ.
    """

    def __init__(self, loss: nn.Module | dict[str, nn.Module], checkpoint: str | None = None) -> None:
        self.loss = loss
        self.checkpoint = checkpoint  # the folder that is resumed, where it is not output_dir/checkpoint-N

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 0:
            for loss in bank_losses(self.loss):
                loss.criterion.reset()
                if loss.criterion.auto_bank:
                    loss.criterion.resize_bank(self._bank_size(loss, args, state, kwargs.get("train_dataloader")))
        else:
            self.load(Path(self.checkpoint) if self.checkpoint else resumed_folder(args, state))
        self._correct_card(getattr(kwargs.get("model"), "model_card_data", None))

    def _correct_card(self, card: Any) -> None:
        """A model card got the losses' options when the trainer was made, before banks of automatic size had theirs."""
        for dataset in [] if card is None else [*card.train_datasets, *card.eval_datasets]:
            loss = self.loss.get(dataset.get("name")) if isinstance(self.loss, dict) else self.loss
            if loss is not None:
                no_data = SimpleNamespace(column_names=[])  # what the card says of the loss alone
                entry = card.compute_dataset_metrics(no_data, {}, loss)["loss"]
                if dataset.get("loss", entry)["fullname"] == entry["fullname"]:  # else a data set of another loss
                    dataset["loss"] = entry

    def _bank_size(self, loss: ContAccumLoss, args: TrainingArguments, state: TrainerState, loader: Any) -> int:
        """`auto_bank` of what enters this bank: of all processes if it gathers, and of several losses its share."""
        batch = state.train_batch_size or args.train_batch_size
        processes = args.world_size if loss.gather_across_devices else 1
        rows, share = self._rows_and_share(loss, args, getattr(loader, "dataset", None))
        n_total = max(1, round(batch * args.gradient_accumulation_steps * processes * share))
        rows = None if rows is None else rows * processes // args.world_size
        return auto_bank(n_total, (loss.micro_batch_size or batch) * processes, rows)

    def _rows_and_share(self, loss: ContAccumLoss, args: TrainingArguments, data: Any) -> tuple[int | None, float]:
        """Training rows of this loss, where they are known, and its share of the micro-batches."""
        rows = len(data) if isinstance(data, Sized) else None
        if not isinstance(self.loss, dict):
            return rows, 1.0
        by_name = {part[0]["dataset_name"]: len(part) for part in getattr(data, "datasets", [])}
        if not by_name:
            losses = len({id(part) for part in self.loss.values()})
            return (None if rows is None else rows // losses), 1 / losses
        mine = [by_name[name] for name, part in self.loss.items() if name in by_name and loss in part.modules()]
        in_turn = getattr(getattr(args, "multi_dataset_batch_sampler", None), "value", None) == "round_robin"
        return sum(mine), len(mine) / len(by_name) if in_turn else sum(mine) / sum(by_name.values())

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if self.was_skipped(optimizer):
            return
        group = optimizer.param_groups[0]
        peak = float(group.get("initial_lr", args.learning_rate))  # which a schedule starts from, of whatever optimizer
        for loss in bank_losses(self.loss):
            loss.criterion.after_update(float(group["lr"]) / peak if peak else 1.0)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = checkpoint_folder(args, state)
        if not self._file(folder).exists():
            self.before_checkpoint(folder)

    def before_checkpoint(self, folder: Path) -> None:
        if self._file(folder) != folder / f"{STATE_NAME}.pt" or _rank() == 0:
            with whole_path(self._file(folder)) as part:
                torch.save([loss.criterion.state_dict() for loss in bank_losses(self.loss)], part)

    def load(self, folder: Path) -> None:
        file = self._file(folder)
        if not file.exists():
            raise CheckpointError(
                f"{folder} has no {file.name}: it was not saved with ContAccumTrainer or ContAccumCallback by as many processes as now, "
                "so its bank cannot be restored; resume from another checkpoint or start again"
            )
        try:
            states = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{file} cannot be read ({error}); resume from another checkpoint or start again") from error
        losses = list(bank_losses(self.loss))
        if len(losses) != len(states):
            raise CheckpointError(f"{file} holds the banks of {len(states)} losses, but there are {len(losses)}; resume with those losses")
        for loss, state in zip(losses, states, strict=True):
            loss.criterion.load_state_dict(state)

    def _file(self, folder: Path) -> Path:
        """One file for all processes where they hold the same bank."""
        same = all(loss.gather_across_devices for loss in bank_losses(self.loss))
        return folder / (f"{STATE_NAME}.pt" if same or _world_size() == 1 else f"{STATE_NAME}_{_rank()}.pt")


class ContAccumTrainer(SentenceTransformerTrainer):
    """`SentenceTransformerTrainer` whose checkpoints hold the bank, and are resumed only when complete.

    Anything with a `before_checkpoint(folder)` among the callbacks is called, on every process, before a checkpoint counts as complete.
    `loss.criterion.observers` are called with every training micro-step (see `DualBankInfoNCE`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bank_callback = ContAccumCallback(self.loss)
        self.add_callback(self.bank_callback)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_complete_checkpoint(checkpoint_folder(self.args, self.state).parent))
        for callback in self.callback_handler.callbacks[:]:
            if isinstance(callback, ContAccumCallback) and callback is not self.bank_callback:
                self.remove_callback(callback)  # one counts the updates
        self.bank_callback.loss = self.loss
        self.bank_callback.checkpoint = resume_from_checkpoint or None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder = checkpoint_folder(self.args, self.state)
        try:
            super()._save_checkpoint(*args, **kwargs)
        except Exception as error:
            if self.args.should_save and not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"could not save {folder}: {error}; earlier checkpoints are untouched: make room and go on with --resume"
            ) from error

    def _save_rng_state(self, output_dir: str) -> None:
        """The last thing each process writes before the trainer's state makes the checkpoint complete and older ones are deleted."""
        super()._save_rng_state(output_dir)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, BeforeCheckpoint):
                callback.before_checkpoint(Path(output_dir))
        self.accelerator.wait_for_everyone()


def bank_losses(loss: nn.Module | dict[str, nn.Module]) -> Iterator[ContAccumLoss]:
    """Each once, also where one serves several data sets."""
    found = [m for part in (loss.values() if isinstance(loss, dict) else [loss]) for m in part.modules() if isinstance(m, ContAccumLoss)]
    yield from dict.fromkeys(found)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
