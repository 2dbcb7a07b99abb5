"""Going on when memory runs out: `HalvingTrainer` cuts micro-batches in half from then on and keeps the bank, the order of the data and
the size of an update.

1. A micro-batch's gradients are computed apart from those of the update's earlier ones and added to them only when its backward pass has
   succeeded. If it runs out of memory, forward or backward, they are dropped, and nothing of it is left in the update. This needs no
   copy of gradients: those of earlier micro-batches are put aside, not copied, and the new ones replace the sums that the backward pass
   would have written to. Both are held only towards the end of a backward pass, when most activations are gone.
2. What it had left for the bank is dropped too, so that the bank is as it was before, and what observers had counted of it.
3. The micro-batch is cut in half, and so is every later one. A half weighs in the update by its share of the samples: the update equals
   that of a run whose micro-batches are that small from this one on. By GradCache, which keeps the batch whole, mini-batches are halved
   instead, and the update stays the same.

Recorded layers (`contaccum.towers.cuda_graphs`) keep their memory between micro-batches. What the optimizer keeps of each parameter is
made in its first step, so they give it back for that one, and are recorded again in what is left: from then on only micro-batches ask for
much.

Where a single sample is too large, where the batch cannot be cut, or where after an update not even the bank can be written, the error is
raised. For one process: several would have to agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.adapters.data_sets import bank_losses
from contaccum.adapters.gradcache import CachedContAccumLoss
from contaccum.adapters.trainer import ContAccumTrainer, CountsMicroSteps
from contaccum.towers.cuda_graphs import forget_recordings

Inputs = dict[str, Any]


class HalvingTrainer(ContAccumTrainer):
    """`ContAccumTrainer` that goes on with half the micro-batch when memory runs out. `halvings` counts how often it had to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows_at_once: int | None = None  # None: micro-batches as they come
        self.halvings = 0
        self.add_callback(RoomForOptimizer())

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """The micro-batch's share of the update's loss, computed in as many parts as memory asks for."""
        rows = rows_of(inputs)
        if rows is None or self.accelerator.num_processes > 1:
            return super().training_step(model, inputs, num_items_in_batch)
        waiting = split(inputs, rows, self.rows_at_once or rows)
        losses: list[Tensor] = []
        while waiting:
            loss, error = self._attempt(model, dict(waiting[0]), num_items_in_batch, rows)
            if loss is not None:
                losses.append(loss)
                del waiting[0]
                continue
            size = self._halve(rows_of(waiting[0]) or 1, error)
            error = None  # it holds the failed pass and all its activations
            forget_recordings(self.model)
            waiting = [part for batch in waiting for part in split(batch, rows_of(batch) or 1, size)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _attempt(
        self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any, rows: int
    ) -> tuple[Tensor | None, torch.OutOfMemoryError | None]:
        """Loss of a part of a micro-batch of `rows` rows, its gradients added; or the error, with nothing changed."""
        banks: list[Any] = [bank for loss in bank_losses(self.loss) for bank in loss.criterion.banks]
        pending = [bank.arrivals for bank in banks]
        counts = [(callback, callback.counted) for callback in self.callback_handler.callbacks if isinstance(callback, CountsMicroSteps)]
        share = (rows_of(inputs) or rows) / rows
        try:
            with gradients_apart(self.model), self.weighing(share):
                return super().training_step(model, inputs, num_items_in_batch), None
        except torch.OutOfMemoryError as error:
            for bank, arrivals in zip(banks, pending, strict=True):
                if bank.arrivals is not arrivals:  # else what waits is an earlier micro-batch's
                    bank.arrivals = None
            for callback, counted in counts:
                callback.counted = counted
            return None, error

    def _halve(self, rows: int, error: torch.OutOfMemoryError | None) -> int:
        """Rows to go on with."""
        cached = [loss for loss in bank_losses(self.loss) if isinstance(loss, CachedContAccumLoss)]
        before = min((loss.mini_batch_size for loss in cached), default=rows)
        if before == 1 and error is not None:
            raise error
        half = -(-min(before, rows) // 2)
        self.halvings += 1
        print(f"note: memory ran out; going on with micro-batches of {half}", file=sys.stderr)
        if not cached:
            self.rows_at_once = half
            return half
        for loss in cached:
            loss.mini_batch_size = half
            loss.mini_batch_num_tokens = None if loss.mini_batch_num_tokens is None else -(-loss.mini_batch_num_tokens // 2)
        return rows


class RoomForOptimizer(TrainerCallback):
    """Recorded layers give their memory back before the optimizer's first step. A resumed one has made what it keeps."""

    first = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.first = True

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if self.first and not any(optimizer.state.values()):
            forget_recordings(model)
        self.first = False


@contextmanager
def gradients_apart(model: nn.Module) -> Iterator[None]:
    """Gradients computed inside are added to those there were when it ends well, and dropped when it does not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    earlier = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
        for p, gradient in zip(parameters, earlier, strict=True):
            if gradient is None and p.grad is not None and p.grad.untyped_storage().nbytes() > p.grad.nbytes:
                p.grad = p.grad.clone()  # part of a larger tensor, where recorded layers will add the next micro-batch's
    except BaseException:
        for p, gradient in zip(parameters, earlier, strict=True):
            p.grad = gradient
        raise
    both = [(p.grad, gradient) for p, gradient in zip(parameters, earlier, strict=True) if p.grad is not None and gradient is not None]
    if both:
        torch._foreach_add_([gradient for _, gradient in both], [new for new, _ in both])
    for p, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            p.grad = gradient


def rows_of(inputs: Inputs) -> int | None:
    """Samples of a batch as the trainer gets it; None where it cannot be cut by rows."""
    ids = [value for name, value in inputs.items() if name.endswith("input_ids") and isinstance(value, Tensor)]
    flattened = any(name.endswith("cu_seq_lens_q") for name in inputs)
    if not ids or flattened or any(value.dim() != 2 or len(value) != len(ids[0]) for value in ids):
        return None
    return len(ids[0])


def split(inputs: Inputs, rows: int, size: int) -> list[Inputs]:
    """The batch in parts of `size` rows, the last perhaps shorter."""
    return [part_of(inputs, rows, i, i + size) for i in range(0, rows, size)]


def part_of(inputs: Inputs, rows: int, start: int, stop: int) -> Inputs:
    """These of a batch's rows. What is not per row stays whole."""

    def per_row(value: Any) -> bool:
        return (isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)) and len(value) == rows

    return {name: value[start:stop] if per_row(value) else value for name, value in inputs.items()}
