"""`HalvingTrainer`: running out of memory, forward or backward, leaves nothing behind; the run equals one with smaller micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import BertConfig

from conftest import assert_close
from contaccum import CachedContAccumLoss, ContAccumLoss, ContAccumTrainer, dual_encoder
from contaccum.core import drift
from contaccum.core.log_sum_table import LogSumTable
from contaccum.memory.halving import HalvingTrainer, gradients_apart, rows_of, split
from contaccum.memory.limit import limit_memory
from contaccum.towers.cuda_graphs import graph_towers
from contaccum.training.diagnostics import Diagnostics
from contaccum.training.logfile import read_log
from contaccum.training.runlog import RunLog
from contaccum.training.trial import write_model, write_texts
from replayed import graphed
from test_trainer import arguments, dataset, state_of, trained

OUT = "CUDA out of memory (made up)"


class Small:
    """A device with room for `rows` texts in one pass of an encoder: beyond that, passes fail on the way there or on the way back.

    On the way back it fails in the first layer, when the gradients of all others have been added already. From micro-batch `start` on.
    """

    def __init__(self, model: nn.Module, rows: int, backward: bool, start: int = 0) -> None:
        self.rows, self.backward, self.start = rows, backward, start
        self.failures = self.passes = 0
        for module in model.modules():
            if type(module).__name__ == "BertEmbeddings":
                module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return output
        self.passes += 1
        if len(output) <= self.rows or self.passes <= 2 * self.start:  # two towers
            return output
        if not self.backward:
            self._fail()
        return _FailBackward.apply(output, self)

    def _fail(self) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError(OUT)


class _FailBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Small) -> Tensor:
        ctx.device = device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.device._fail()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("correction", [None, "mean"])
def test_equals_a_run_with_small_micro_batches(tiny_encoder, tmp_path, backward: bool, correction: str | None) -> None:
    """Without dropout, which draws other numbers for other batches. 8 rows an update: 2 x 4, cut to 4 x 2 at once."""

    def loss(model: nn.Module) -> ContAccumLoss:
        return ContAccumLoss(model, bank_size=12, drift_correction=correction)

    model = tiny_encoder(dropout=0.0)
    device = Small(model, 2, backward)
    halved = trained(model, tmp_path / "a", HalvingTrainer, loss(model))
    assert (device.failures, halved.halvings, halved.rows_at_once) == (1, 1, 2)
    model = tiny_encoder(dropout=0.0)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    small = trained(model, tmp_path / "b", ContAccumTrainer, loss(model), **options)
    assert_close(state_of(halved), state_of(small))
    assert halved.loss.criterion.bank.count == small.loss.criterion.bank.count == 32


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_in_the_midst_of_an_update_earlier_micro_batches_keep_their_share(tiny_encoder, tmp_path, backward: bool) -> None:
    """One update of two micro-batches of 4; the second fails and is done as 2 and 2. Gradients against those written down by hand."""
    model = tiny_encoder(dropout=0.0)
    device = Small(model, 2, backward, start=1)
    seen: dict[str, Tensor] = {}
    trainer = HalvingTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1, max_grad_norm=0),
        train_dataset=dataset(),
        loss=ContAccumLoss(model, bank_size=12),
    )
    batches = [dict(batch) for _, batch in zip(range(2), trainer.get_train_dataloader(), strict=False)]
    trainer.optimizer = _Watching(model, seen)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)
    trainer.train()
    assert device.failures == 1

    model = tiny_encoder(dropout=0.0)
    loss = ContAccumLoss(model, bank_size=12)
    reference = ContAccumTrainer(model=model, args=arguments(tmp_path), train_dataset=dataset(), loss=loss)
    for part, share in [(batches[0], 1 / 2), *((half, 1 / 4) for half in split(batches[1], 4, 2))]:
        (share * reference.compute_loss(model, dict(part))).backward()
    assert_close(seen, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


class _Watching(torch.optim.SGD):
    """Remembers the gradients of its first step."""

    def __init__(self, model: nn.Module, seen: dict[str, Tensor]) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=0.0)
        self._model, self._seen = model, seen

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._seen.update({name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None})
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "gradcache"])
def test_the_logs_count_what_was_done_again_once(tiny_encoder, tmp_path, cached: bool) -> None:
    """8 rows an update, the first pass fails on its way back: the log is that of a run that is small from the start."""

    def lines(small: bool) -> tuple[list[dict[str, Any]], int]:
        model, folder = tiny_encoder(dropout=0.0), tmp_path / f"small-{small}"
        folder.mkdir()
        device = None if small else Small(model, 2, backward=True)
        kind = partial(CachedContAccumLoss, mini_batch_size=2 if small else 4) if cached else ContAccumLoss
        loss = kind(model, bank_size=12)
        size = 8 if cached else 2 if small else 4
        log, diagnostics = RunLog(folder / "log.jsonl", loss.criterion), Diagnostics(folder / "diagnostics.jsonl", loss, every=1000)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "callbacks": [log, diagnostics]}
        trained(model, folder, HalvingTrainer, loss, **options)
        assert device is None or device.failures == 1
        return read_log(folder / "log.jsonl"), diagnostics.counted

    (halved, halved_samples), (small, small_samples) = lines(small=False), lines(small=True)
    assert halved_samples == small_samples == 32
    assert len(halved) == len(small) == 4
    for line, expected in zip(halved, small, strict=True):
        assert line == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_gradcache_halves_its_mini_batches_and_the_update_stays(tiny_encoder, tmp_path, backward: bool) -> None:
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    model = tiny_encoder(dropout=0.0)
    device = Small(model, 2, backward)
    halved = trained(model, tmp_path / "a", HalvingTrainer, CachedContAccumLoss(model, mini_batch_size=8, bank_size=12), **options)
    assert (device.failures, halved.loss.mini_batch_size, halved.rows_at_once) == (2, 2, None)
    model = tiny_encoder(dropout=0.0)
    whole = trained(model, tmp_path / "b", ContAccumTrainer, CachedContAccumLoss(model, mini_batch_size=8, bank_size=12), **options)
    assert_close(state_of(halved), state_of(whole))


def test_nothing_changes_while_memory_suffices(tiny_encoder, tmp_path) -> None:
    plain = trained(tiny_encoder(), tmp_path / "a", ContAccumTrainer)
    guarded = trained(tiny_encoder(), tmp_path / "b", HalvingTrainer)
    assert guarded.halvings == 0
    assert_close(state_of(guarded), state_of(plain), rtol=1e-6)


def test_halves_again_until_it_fits_and_gives_up_at_one(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    device = Small(model, 1, backward=False)
    assert trained(model, tmp_path / "a", HalvingTrainer).rows_at_once == 1
    assert device.failures == 2
    model = tiny_encoder()
    Small(model, 0, backward=False)
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        trained(model, tmp_path / "b", HalvingTrainer)


def runs_out_while_entering(monkeypatch: pytest.MonkeyPatch, correction: str | None, calls: Sequence[int]) -> list[int]:
    """Memory runs out at these calls of what is written once for every micro-batch that enters; at which it has, so far."""
    owner, name = (LogSumTable, "write_rows") if correction is None else (drift, "write_ring")
    real, numbers, failed = getattr(owner, name), itertools.count(1), []

    def write(*args: Any) -> Any:
        if (number := next(numbers)) in calls:
            failed.append(number)
            raise torch.OutOfMemoryError(OUT)
        return real(*args)

    monkeypatch.setattr(owner, name, write)
    return failed


def with_bank(model: Any, output: Path, correction: str | None) -> HalvingTrainer:
    return trained(model, output, HalvingTrainer, ContAccumLoss(model, bank_size=12, drift_correction=correction))


@pytest.mark.parametrize("correction", [None, "mean"])
@pytest.mark.parametrize("micro_batch", [3, 5])
def test_a_bank_that_was_being_written_when_memory_ran_out_is_written_then(
    tiny_encoder, tmp_path, monkeypatch, correction: str | None, micro_batch: int
) -> None:
    """A micro-batch enters in the forward pass of the next: the run equals one in which that pass failed by itself."""
    model = tiny_encoder(dropout=0.0)
    Small(model, 2, backward=False, start=micro_batch)
    by_itself = with_bank(model, tmp_path / "a", correction)
    runs_out_while_entering(monkeypatch, correction, (micro_batch, micro_batch + 1))
    entering = with_bank(tiny_encoder(dropout=0.0), tmp_path / "b", correction)
    assert by_itself.halvings == entering.halvings == 1
    assert_close(state_of(entering), state_of(by_itself))
    assert entering.loss.criterion.bank.count == 32


@pytest.mark.parametrize("correction", [None, "mean"])
@pytest.mark.parametrize("micro_batch", [3, 4])
def test_a_bank_that_could_not_be_written_once_is_written_at_the_second_try(
    tiny_encoder, tmp_path, monkeypatch, correction: str | None, micro_batch: int
) -> None:
    """Also where no forward pass is under way that could be halved: an update's last micro-batch enters after the update."""
    undisturbed = with_bank(tiny_encoder(dropout=0.0), tmp_path / "a", correction)
    failed = runs_out_while_entering(monkeypatch, correction, (micro_batch,))
    entering = with_bank(tiny_encoder(dropout=0.0), tmp_path / "b", correction)
    assert failed == [micro_batch]
    assert entering.halvings == 0
    assert_close(state_of(entering), state_of(undisturbed))


def test_gradients_apart() -> None:
    weight = nn.Parameter(torch.ones(3))
    module = nn.ParameterList([weight])
    (2 * weight).sum().backward()

    def fail_midway() -> None:
        with gradients_apart(module):
            (5 * weight).sum().backward()
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fail_midway()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]
    with gradients_apart(module):
        (5 * weight).sum().backward()
    assert weight.grad.tolist() == [7, 7, 7]
    weight.grad = None
    with gradients_apart(module):
        (3 * weight).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]


def test_batches_are_cut_by_rows() -> None:
    batch = {"query_input_ids": torch.arange(10).view(5, 2), "positive_input_ids": torch.arange(15).view(5, 3), "query_task": "query"}
    assert rows_of(batch) == 5
    parts = split(batch, 5, 2)
    assert [rows_of(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["positive_input_ids"] for part in parts]), batch["positive_input_ids"])
    assert all(part["query_task"] == "query" for part in parts)
    assert rows_of({"query_input_ids": torch.arange(10)[None], "query_cu_seq_lens_q": torch.tensor([0, 4, 10])}) is None
    assert rows_of({"label": torch.arange(3)}) is None


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_recorded_layers_make_room_for_the_optimizer(tiny_encoder, by_hand, tmp_path, optim: str) -> None:
    """Its first step, which makes what it keeps, if anything, finds no recordings. Later ones do, and the run is the same."""
    recordings: list[int] = []

    def look(*_: Any) -> None:
        recordings.append(sum(len(pool.recordings) for stack in graphed(model) for pool in stack.pools))

    plain = trained(tiny_encoder(), tmp_path / "plain", optim=optim)
    model = tiny_encoder()
    graph_towers(model)
    handle = register_optimizer_step_pre_hook(look)
    try:
        halving = trained(model, tmp_path / "graphs", HalvingTrainer, optim=optim)
    finally:
        handle.remove()
    assert recordings[0] == 0
    assert len(recordings) > 1
    assert all(recordings[1:])
    assert_close(state_of(halving), state_of(plain), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_real_memory_runs_out_and_training_goes_on(tmp_path: Path, graphs: bool) -> None:
    """128 x 128 tokens through both towers need more than 1 GB. Of 600 MB the parameters and all that belongs to them take 240."""
    write_model(tmp_path / "model", BertConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=8000))
    write_texts(tmp_path / "texts.jsonl", 256, 0, 128, 128)
    model = dual_encoder(tmp_path / "model", max_seq_length=128)
    if graphs:
        graph_towers(model)
    assert limit_memory(600_000_000) is None
    try:
        options = {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 2, "use_cpu": False, "max_steps": 3}
        data = Dataset.from_json(str(tmp_path / "texts.jsonl"))
        trainer = trained(model, tmp_path / "run", HalvingTrainer, ContAccumLoss(model, bank_size=64), data, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.halvings > 0
    assert trainer.loss.criterion.bank.count == 3 * 256
    assert torch.cuda.max_memory_reserved() <= 600_000_000
    assert not graphs or all(any(pool.recordings for pool in stack.pools) for stack in graphed(model))
