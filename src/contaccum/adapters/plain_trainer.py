"""A `ContAccumLoss` in a trainer that knows nothing of banks: it adds its callback by itself.

A loss is given texts, not the trainer. It finds it where it is called from:

1. A trainer is made and moves its losses to the model's device. The callback that is added then knows when training begins, also where
   the first batches are all for other losses.
2. At a training step, for a trainer that did not: it calls its loss from `compute_loss`. Updates that have passed by then are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from contaccum.adapters.data_sets import bank_losses, served_by
from contaccum.adapters.losses import ContAccumLoss
from contaccum.adapters.trainer import ContAccumCallback, ContAccumTrainer


class OwnCallback(ContAccumCallback):
    """Of a trainer that was given none: for all its losses, from the checkpoint that it resumes. For none where one was given later."""

    def __init__(self, trainer: Any) -> None:
        super().__init__({})
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if any(callback is not self for callback in _callbacks(self.trainer)):
            self.loss = {}
            return
        self.loss = _losses(self.trainer)
        folder = _resumed(self.trainer)
        self.begin(args, state, folder, **kwargs)
        begun = 0 if folder is None else TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step
        for loss in bank_losses(self.loss):
            for _ in range(state.global_step - begun):
                loss.criterion.after_update()


def meet_trainer() -> None:
    """Give the trainer that is being made a callback, if one is."""
    trainer = _caller("prepare_loss")
    if trainer is not None and not isinstance(trainer, ContAccumTrainer) and not _callbacks(trainer):
        trainer.add_callback(OwnCallback(trainer))


def join_training(loss: ContAccumLoss) -> None:
    """See that the trainer that calls has a callback for this loss, if a trainer calls. ValueError where that is not enough."""
    trainer = _caller("compute_loss")
    if trainer is None:
        return
    callbacks = _callbacks(trainer)
    if any(loss in callback.joined for callback in callbacks):
        return
    if not any(callback.knows_data_sets for callback in callbacks):
        _refuse_shared_banks(loss, trainer)
    if not callbacks:
        callbacks = [_late_callback(trainer)]
    if not any(loss in bank_losses(callback.loss) for callback in callbacks):
        raise ValueError(_why_unknown(loss, trainer))
    for callback in callbacks:
        callback.joined.add(loss)


def _late_callback(trainer: Any) -> ContAccumCallback:
    callback, handler = OwnCallback(trainer), trainer.callback_handler
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=handler.model, train_dataloader=handler.train_dataloader)
    trainer.add_callback(callback)
    return callback


def _frames() -> Iterator[FrameType]:
    """Of those that called, the latest first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _caller(method: str) -> Any:
    """The trainer whose method calls, whoever is in between."""
    for frame in _frames():
        if frame.f_code.co_name == method and isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
    return None


def _resumed(trainer: Any) -> Path | None:
    """The checkpoint that this training began with: its loop has it as an argument, and nobody keeps it."""
    for frame in _frames():
        found = frame.f_locals
        if found.get("self") is trainer and "resume_from_checkpoint" in found:
            return Path(found["resume_from_checkpoint"]) if found["resume_from_checkpoint"] else None
    return None


def _callbacks(trainer: Any) -> list[ContAccumCallback]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ContAccumCallback)]


def _losses(trainer: Any) -> Any:
    return getattr(trainer, "loss", {})  # a trainer of transformers has none


def _why_unknown(loss: ContAccumLoss, trainer: Any) -> str:
    if loss in bank_losses(_losses(trainer)):
        return "the trainer's ContAccumCallback is of another loss than it trains with; give it that loss, or leave it out"
    return (
        "a ContAccumLoss is called that is not found in trainer.loss: it is in a plain list there, or an overridden compute_loss calls it; "
        "keep losses in an nn.ModuleList, or give a SentenceTransformerTrainer callbacks=[ContAccumCallback(loss)]"
    )


def _refuse_shared_banks(loss: ContAccumLoss, trainer: Any) -> None:
    """Batches of several data sets come to it, and nobody says which is of which."""
    rows = dict.fromkeys(trainer.train_dataset, 0) if isinstance(trainer.train_dataset, dict) else {}
    names = served_by(loss, _losses(trainer), rows)
    if len(names) > 1 and loss.criterion.bank.size:
        raise ValueError(
            f"one ContAccumLoss serves the data sets {', '.join(names)}, and this trainer does not tell it which of them a batch is of; "
            "use ContAccumTrainer, or a loss for each: loss={name: ContAccumLoss(model) for name in train_dataset}"
        )
