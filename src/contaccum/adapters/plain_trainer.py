"""A `ContAccumLoss` in a trainer that knows nothing of banks: it adds its callback by itself.

A loss is given texts, not the trainer. It finds it where it is called from, at the first training step: a trainer calls its loss from
`compute_loss`. From then on the callback does all it would have done from the start.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import Trainer

from contaccum.adapters.data_sets import bank_losses, served_by
from contaccum.adapters.losses import ContAccumLoss
from contaccum.adapters.trainer import ContAccumCallback


def join_training(loss: ContAccumLoss) -> None:
    """See that the trainer that calls has a callback for this loss, if a trainer calls. ValueError where that is not enough."""
    trainer = _calling_trainer()
    if trainer is None:
        return
    callbacks = [c for c in trainer.callback_handler.callbacks if isinstance(c, ContAccumCallback)]
    if any(loss in callback.joined for callback in callbacks):
        return
    if not any(callback.told_data_sets for callback in callbacks):
        _refuse_shared_banks(loss, trainer)
    if not callbacks:
        callbacks = [_added_callback(trainer)]
    if not any(loss in bank_losses(callback.loss) for callback in callbacks):
        raise ValueError("the trainer's ContAccumCallback is of another loss than it trains with; give it that loss, or leave it out")
    for callback in callbacks:
        callback.joined.add(loss)


def _calling_trainer() -> Any:
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name == "compute_loss" and isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
    return None


def _added_callback(trainer: Any) -> ContAccumCallback:
    callback, handler = ContAccumCallback(trainer.loss), trainer.callback_handler
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=handler.model, train_dataloader=handler.train_dataloader)
    trainer.add_callback(callback)
    return callback


def _refuse_shared_banks(loss: ContAccumLoss, trainer: Any) -> None:
    """Batches of several data sets come to it, and nobody says which is of which."""
    rows = dict.fromkeys(trainer.train_dataset, 0) if isinstance(trainer.train_dataset, dict) else {}
    names = served_by(loss, trainer.loss, rows)
    if len(names) > 1 and loss.criterion.bank.size:
        raise ValueError(
            f"one ContAccumLoss serves the data sets {', '.join(names)}, and this trainer does not tell it which of them a batch is of; "
            "use ContAccumTrainer, or a loss for each: loss={name: ContAccumLoss(model) for name in train_dataset}"
        )
