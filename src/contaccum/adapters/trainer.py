"""Training with a bank in sentence-transformers: `ContAccumTrainer`, or `ContAccumCallback` for a trainer of your own."""

from __future__ import annotations

import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
import torch.distributed as dist
from datasets import DatasetDict
from sentence_transformers import SentenceTransformerTrainer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.adapters.checkpoint_folders import checkpoint_folder, is_complete, last_complete_checkpoint, resumed_folder
from contaccum.adapters.combinations import refuse_combinations
from contaccum.adapters.data_sets import BankSizes, Losses, bank_losses, names_of, rows_by_data_set, served_by
from contaccum.adapters.losses import ContAccumLoss
from contaccum.common.errors import CheckpointError, not_saved
from contaccum.common.outputs import whole_path

STATE_NAME = "contaccum_state"
DATA_SETS = "data_sets"  # beside a criterion's state


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

    1. Training begins: banks are reset, and those of automatic size get it; or they are read from the checkpoint that is resumed. A loss
       that serves several data sets has a bank for each.
    2. An optimizer update ends: `after_update` with its learning rate over the peak one. A step skipped for overflow changed no
       weights and does not count.
    3. A checkpoint is saved: banks are written into it, one file per process where they differ.
    """

    knows_data_sets = False  # whether `select_banks` is called with the data set of every batch

    def __init__(self, loss: Losses, checkpoint: str | None = None) -> None:
        self.loss = loss
        self.checkpoint = checkpoint  # the folder that is resumed, where it is not output_dir/checkpoint-N
        self.shared: dict[ContAccumLoss, list[str]] = {}  # losses that serve several data sets, with their names
        self.saved: Path | None = None  # the checkpoint that has been written last
        self.saves = _rank() == 0  # whether this process writes what is the same for all: one of each node where save_on_each_node
        self.joined: WeakSet[ContAccumLoss] = WeakSet()  # losses that have met their trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        resumed = Path(self.checkpoint) if self.checkpoint else None
        self.begin(args, state, None if state.global_step == 0 else resumed or resumed_folder(args, state), **kwargs)

    def begin(self, args: TrainingArguments, state: TrainerState, resumed: Path | None, **kwargs: Any) -> None:
        """Empty banks, or those of the checkpoint that is resumed."""
        refuse_combinations(self.loss)
        self.saved, self.saves = None, args.should_save
        loader = kwargs.get("train_dataloader")
        self.shared = self._shared_banks(args, rows_by_data_set(loader))
        if resumed is None:
            sizes = BankSizes(self.loss, args, state, loader)
            for loss in bank_losses(self.loss):
                self._start(loss, sizes, served_by(loss, self.loss, rows_by_data_set(loader)))
        else:
            self.load(resumed)
        self._correct_card(getattr(kwargs.get("model"), "model_card_data", None))

    def _start(self, loss: ContAccumLoss, sizes: BankSizes, data_sets: list[str]) -> None:
        """Empty banks: one, or one for each data set that the loss serves."""
        loss.criterion.reset()
        for name in self.shared.get(loss, [""]):
            loss.criterion.use_bank(name)
            served, size = [name] if name else data_sets, loss.criterion.bank.size
            if loss.criterion.auto_bank:
                loss.criterion.resize_bank(sizes.of(loss, served))
            elif (rows := sizes.rows(loss, served)) is not None and size > rows:
                warnings.warn(
                    f"bank_size={size} is more than the {rows} training rows that enter the bank; use less, or 'auto'", stacklevel=2
                )

    def _shared_banks(self, args: TrainingArguments, rows: dict[str, int]) -> dict[ContAccumLoss, list[str]]:
        """The losses that serve several data sets, with their names. ValueError where their banks could not be kept apart."""
        shared: dict[ContAccumLoss, list[str]] = {}
        for loss in bank_losses(self.loss):
            names = served_by(loss, self.loss, rows)
            if not loss.criterion.bank.size or len(rows) < 2:
                continue
            if loss.gather_across_devices and args.world_size > 1:
                raise ValueError(
                    "gather_across_devices=True would mix data sets: at one step each process may have a batch of another one; "
                    "use gather_across_devices=False, or concatenate the data sets"
                )
            if len(names) > 1 and self.knows_data_sets:
                shared[loss] = names
        return shared

    def select_banks(self, data_set: str) -> None:
        """A batch of this data set comes next."""
        for loss, names in self.shared.items():
            if data_set in names:
                loss.criterion.use_bank(data_set)

    def _correct_card(self, card: Any) -> None:
        """A model card got the losses' options when the trainer was made, before banks of automatic size had theirs."""
        for dataset in [] if card is None else [*card.train_datasets, *card.eval_datasets]:
            loss = self.loss.get(dataset.get("name")) if isinstance(self.loss, dict) else self.loss
            if loss is not None:
                self.select_banks(dataset.get("name"))
                no_data = SimpleNamespace(column_names=[])  # what the card says of the loss alone
                entry = card.compute_dataset_metrics(no_data, {}, loss)["loss"]
                if dataset.get("loss", entry)["fullname"] == entry["fullname"]:  # else a data set of another loss
                    dataset["loss"] = entry

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if self.was_skipped(optimizer):
            for loss in bank_losses(self.loss):
                loss.criterion.after_skipped_update()
            return
        group = optimizer.param_groups[0]
        peak = float(group.get("initial_lr", args.learning_rate))  # which a schedule starts from, of whatever optimizer
        for loss in bank_losses(self.loss):
            loss.criterion.after_update(float(group["lr"]) / peak if peak else 1.0)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = checkpoint_folder(args, state)
        if self.saved != folder and any(bank_losses(self.loss)):
            self.before_checkpoint(folder)

    def before_checkpoint(self, folder: Path) -> None:
        """Write the banks, and remove those of an earlier run by another number of processes."""
        file, self.saved = self._file(folder), folder
        # in each process: all go on alike
        states = [{**loss.criterion.state_dict(), DATA_SETS: self._data_sets(loss)} for loss in bank_losses(self.loss)]
        if file.name != f"{STATE_NAME}.pt" or self.saves:
            with whole_path(file) as part:
                torch.save(states, part)
        if self.saves:
            current = {f"{STATE_NAME}_{rank}.pt" for rank in range(_world_size())} if file.name != f"{STATE_NAME}.pt" else {file.name}
            for other in folder.glob(f"{STATE_NAME}*.pt"):
                if other.name not in current:
                    other.unlink(missing_ok=True)

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
            saved, present = state.pop(DATA_SETS, None), self._data_sets(loss)
            if saved not in (None, present):  # None: of an older version
                raise CheckpointError(
                    f"{file} holds a bank of {_listed(saved)}, but its loss is now for {_listed(present)}; "
                    "resume with the same data sets under the same names, or start again"
                )
            loss.criterion.load_state_dict(state)

    def _data_sets(self, loss: ContAccumLoss) -> list[str]:
        """Those that have a bank of their own, or that the loss is named by."""
        return sorted(self.shared.get(loss, [])) or names_of(loss, self.loss)

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
        self.bank_callback.knows_data_sets = True
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

    def should_dataset_name_column_be_added(self, dataset: Any, args: Any, loss: Losses) -> bool:
        """Of several data sets always: a loss may keep a bank for each."""
        return isinstance(dataset, DatasetDict) or bool(super().should_dataset_name_column_be_added(dataset, args, loss))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "dataset_name" in inputs:
            self.bank_callback.select_banks(inputs["dataset_name"])
        return super().compute_loss(model, inputs, *args, **kwargs)

    @contextmanager
    def weighing(self, share: float) -> Iterator[None]:
        """Inside, `training_step` takes a part of a micro-batch, this share of its samples: it divides the loss by that much more."""
        before = self.current_gradient_accumulation_steps
        self.current_gradient_accumulation_steps = before / share  # type: ignore[assignment]  # a divisor, nothing else
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps = before

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """None once all updates are done: resumed from a last checkpoint within an epoch, the trainer would go on to the epoch's end."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder = checkpoint_folder(self.args, self.state)
        try:
            if self.args.should_save and folder.exists():  # of an interrupted save, or damaged: it would count as complete too early
                shutil.rmtree(folder)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(*args, **kwargs)
        except Exception as error:
            failed = not_saved(folder, error, "go on with --resume: earlier checkpoints are untouched")
            if self.args.should_save and not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise failed from error

    def _save_rng_state(self, output_dir: str) -> None:
        """The last thing each process writes before the trainer's state makes the checkpoint complete and older ones are deleted."""
        super()._save_rng_state(output_dir)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, BeforeCheckpoint):
                callback.before_checkpoint(Path(output_dir))
        self.accelerator.wait_for_everyone()


def _listed(names: list[str]) -> str:
    return f"the data sets {', '.join(names)}" if names else "data without a name"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
