"""What the loss and the bank allocate, recorded from the real ones on tensors without data."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from contaccum.adapters.losses import ContAccumLoss
from contaccum.core.bank import DualBank
from contaccum.core.finite import Finite
from contaccum.memory.prediction.trace import Events, Recorder, Trace
from contaccum.methods.config import TrainConfig
from contaccum.methods.loss import build_loss
from contaccum.methods.table import Batches

STEPS = 3  # recorded: the first, which allocates the bank, and two with a full bank
FORWARD, BACKWARD, END = 0, 1, 2  # segments of a step


@dataclass(frozen=True)
class LossTrace:
    trace: Trace
    bank: frozenset[int]  # allocations that are the bank's buffers

    @property
    def kinds(self) -> list[str]:
        return ["bank" if i in self.bank else "loss" for i in range(len(self.trace.sizes))]

    @property
    def bank_bytes(self) -> int:
        return sum(self.trace.sizes[i] for i in self.bank)

    def segment(self, step: int, part: int) -> Events:
        return self.trace.segments[3 * step + part]


class _Accepted(Finite):
    """There is no data to ask."""

    def __init__(self) -> None: ...

    def verdict(self) -> bool:
        return True


def accept_arrivals(bank: DualBank) -> None:
    """Let the micro-batch that waits enter, whatever its values."""
    if bank.arrivals is not None:
        bank.arrivals = replace(bank.arrivals, finite=_Accepted())


def bank_loss(config: TrainConfig) -> ContAccumLoss:
    """The loss that `train` makes of a configuration, around no model."""
    always = replace(config, start_update=0, query_bank_stop_update=None)
    no_model: Any = nn.Identity()
    return build_loss(always, no_model, Batches(1, 1, None))  # GradCache's embeddings come from elsewhere; its loss is this one on all


def record_loss(config: TrainConfig, samples: int, width: int) -> LossTrace:
    """Micro-steps of `samples` vectors of `width`: the first, then with a full bank."""
    columns = 2 + (config.hard_negatives or 0)
    with FakeTensorMode():
        loss = bank_loss(config)
        bank = loss.criterion.bank
        embeddings = [torch.zeros(samples, width, requires_grad=True) for _ in range(columns)]
        recorder = Recorder(embeddings)  # which are the towers'
        gc.disable()
        try:
            with recorder:
                for step in range(STEPS):
                    _micro_step(loss, recorder, embeddings)
                    if step == 0:
                        bank.count = 2 * bank.size  # as if it had been filled
        finally:
            gc.enable()
        buffers = frozenset(number for buffer in bank.buffers() if (number := recorder.number(buffer)) is not None)
        return LossTrace(recorder.trace(), buffers)


def _micro_step(loss: ContAccumLoss, recorder: Recorder, embeddings: list[Tensor]) -> None:
    keys: list[Tensor | None] = [torch.zeros(len(column), dtype=torch.int64) for column in embeddings]
    value = loss.compute_loss_from_embeddings(embeddings, keys=keys)
    accept_arrivals(loss.criterion.bank)
    del keys
    recorder.next_segment()
    value.backward()
    recorder.next_segment()
    del value
    for column in embeddings:
        column.grad = None
    recorder.next_segment()
