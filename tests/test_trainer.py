"""`ContAccumTrainer` and `ContAccumCallback`: when banks are reset, aged and left alone; and what else people train with."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from torch import Tensor

from conftest import assert_close, rows
from contaccum import CachedContAccumLoss, ContAccumCallback, ContAccumLoss, ContAccumTrainer
from contaccum.adapters.data_sets import bank_losses

ROUTES = {"query": "query", "positive": "document"}


def dataset(count: int = 32) -> Dataset:
    return Dataset.from_list([{"query": row["query"], "positive": row["positive"]} for row in rows(count)])


def arguments(folder: Path, **options: Any) -> SentenceTransformerTrainingArguments:
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "router_mapping": ROUTES,
    }
    return SentenceTransformerTrainingArguments(**(defaults | options))


def trained(model: SentenceTransformer, folder: Path, trainer_class=ContAccumTrainer, loss=None, data=None, **options: Any):
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    callbacks = options.pop("callbacks", None)
    eval_dataset = options.pop("eval_dataset", None)
    resume = options.pop("resume", None)
    trainer = trainer_class(
        model=model,
        args=arguments(folder, **options),
        train_dataset=dataset() if data is None else data,
        eval_dataset=eval_dataset,
        loss=loss or ContAccumLoss(model, bank_size=12),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    moved = [name for name, p in model.named_parameters() if p.requires_grad and not torch.equal(p, before[name])]
    assert len(moved) > len(before) / 2, "hardly anything was trained"
    return trainer


def state_of(trainer: Any) -> dict[str, Tensor]:
    (loss,) = bank_losses(trainer.loss)
    return {**trainer.model.state_dict(), **{f"bank.{k}": v for k, v in loss.criterion.state_dict().items() if isinstance(v, Tensor)}}


def assert_bit_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_evaluation_during_training_leaves_the_bank_untouched(tiny_encoder, tmp_path) -> None:
    """Without dropout: evaluation draws random numbers of its own."""
    plain = trained(tiny_encoder(dropout=0.0), tmp_path / "a")
    evaluated = trained(tiny_encoder(dropout=0.0), tmp_path / "b", eval_dataset=dataset(8), eval_strategy="steps", eval_steps=1)
    assert any("eval_loss" in line for line in evaluated.state.log_history)
    assert_bit_equal(state_of(plain), state_of(evaluated))


def test_ages_follow_the_true_learning_rate(tiny_encoder, tmp_path) -> None:
    """Linear decay over four updates: lr/peak is 1, 3/4, 2/4, 1/4. Eight samples an update, the newest twelve in the bank."""
    trainer = trained(tiny_encoder(), tmp_path)
    assert trainer.loss.criterion.updates == 4
    assert trainer.loss.criterion.bank.ages.tolist() == [0.75] * 4 + [0.25] * 8


def test_a_skipped_step_is_no_update(tiny_encoder) -> None:
    loss = ContAccumLoss(tiny_encoder(), bank_size=4)
    callback = ContAccumCallback(loss)
    for skipped in (True, False, True):
        optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}], step_was_skipped=skipped)
        loss.criterion(*torch.randn(2, 20, 8).requires_grad_())
        callback.on_optimizer_step(SimpleNamespace(learning_rate=1.0), None, None, optimizer=optimizer)
    assert loss.criterion.updates == 1
    assert loss.criterion.bank.means.window == 20


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_by_the_loss_scaler_is_no_update(tiny_encoder, fused: bool) -> None:
    """A real scaler and optimizer, on the CPU: infinite gradients leave the weights alone, fused or not."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)  # its optimizer asks for the process's state
    weight = torch.nn.Parameter(torch.ones(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = AcceleratedOptimizer(torch.optim.AdamW([weight], lr=0.1, fused=fused), scaler=scaler)
    loss = ContAccumLoss(tiny_encoder(), bank_size=4)
    callback = ContAccumCallback(loss)
    for gradient in (1.0, float("inf"), 1.0):
        before = weight.detach().clone()
        scaler.scale(weight.sum() * gradient).backward()
        callback.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
        optimizer.step()
        callback.on_optimizer_step(SimpleNamespace(learning_rate=0.1), None, None, optimizer=optimizer)
        assert torch.equal(weight, before) == (gradient == float("inf"))
        optimizer.zero_grad()
    assert loss.criterion.updates == 2


def test_a_new_training_starts_with_an_empty_bank(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=100)
    trainer = trained(model, tmp_path, loss=loss)
    assert len(loss.criterion.bank) == 32
    trainer.train()
    assert len(loss.criterion.bank) == 32
    assert loss.criterion.updates == 4


def test_without_past_encoder_the_trainer_empties_the_bank(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    trainer = trained(model, tmp_path, loss=ContAccumLoss(model, bank_size=100, clear_after_update=True))
    assert len(trainer.loss.criterion.bank) == 0


@pytest.mark.parametrize(
    ("options", "rows", "expected"),
    [
        ({}, 2048, 64),  # 8 updates of 4 x 2
        ({"gradient_accumulation_steps": 5}, 2048, 128),  # a sixteenth of the rows
        ({}, 32, 4),  # at least a micro-batch
    ],
)
@pytest.mark.parametrize("way", ["trainer", "callback"])
def test_a_bank_of_automatic_size_fits_updates_and_data(tiny_encoder, tmp_path, way, options, rows, expected) -> None:
    model = tiny_encoder()
    loss = ContAccumLoss(model)
    assert loss.criterion.bank.size == 1024
    plain = {"trainer_class": SentenceTransformerTrainer, "callbacks": [ContAccumCallback(loss)]} if way == "callback" else {}
    trained(model, tmp_path, loss=loss, data=dataset(rows), max_steps=2, **options, **plain)
    assert loss.criterion.bank.size == loss.criterion.bank.query_size == expected
    assert loss.get_config_dict()["bank_size"] == expected
    assert len(loss.criterion.bank) == min(expected, 2 * 4 * options.get("gradient_accumulation_steps", 2))


@pytest.mark.parametrize("way", ["trainer", "callback"])
def test_the_model_card_tells_the_size_that_the_bank_got(tiny_encoder, tmp_path, way) -> None:
    """A new training, then a resumed one; with one loss for all data, evaluation's included."""
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = tiny_encoder()
        loss = ContAccumLoss(model)
        plain = {"trainer_class": SentenceTransformerTrainer, "callbacks": [ContAccumCallback(loss, resume)]} if way == "callback" else {}
        saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "resume": resume, "eval_dataset": dataset(8)}
        trained(model, tmp_path, loss=loss, data=dataset(2048), **saved, **plain)
        model.save_pretrained(str(tmp_path / "model"))
        for folder in ("checkpoint-3", "model"):
            card = (tmp_path / folder / "README.md").read_text()
            assert re.findall(r'"((?:query_)?bank_size)": (\d+)', card) == [("bank_size", "64"), ("query_bank_size", "64")] * 2


def test_the_model_card_tells_the_bank_of_each_data_set(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    data = DatasetDict({"few": dataset(64), "many": dataset(2048)})
    loss = {"few": ContAccumLoss(model, bank_size=5), "many": ContAccumLoss(model)}
    trained(model, tmp_path, loss=loss, data=data, max_steps=2)
    sizes = [re.findall(r'"bank_size": (\d+)', info["loss"]["config_code"]) for info in model.model_card_data.train_datasets]
    assert sizes == [["5"], ["64"]]
    assert loss["many"].criterion.bank.size == 64


def test_the_model_card_keeps_other_losses(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    data = DatasetDict({"ours": dataset(64), "other": dataset(64)})
    loss = {"ours": ContAccumLoss(model, bank_size=5), "other": MultipleNegativesRankingLoss(model)}
    callback = ContAccumCallback(loss["ours"])
    trained(model, tmp_path, loss=loss, data=data, max_steps=2, trainer_class=SentenceTransformerTrainer, callbacks=[callback])
    result = [info["loss"]["fullname"].rpartition(".")[2] for info in model.model_card_data.train_datasets]
    assert result == ["ContAccumLoss", "MultipleNegativesRankingLoss"]


@pytest.mark.parametrize(
    ("gathers", "micro_batch_size", "losses", "expected"),
    [
        (True, None, 1, 8 * 4 * 2 * 2),  # all processes' samples enter
        (False, None, 1, 8 * 4 * 2),  # its own
        (False, None, 2, 8 * 4),  # every other micro-batch
        (True, 2, 1, 8 * 4 * 2 * 2),
    ],
)
def test_what_enters_a_bank_decides_its_automatic_size(tiny_encoder, gathers, micro_batch_size, losses, expected) -> None:
    model = tiny_encoder()
    made = [ContAccumLoss(model, gather_across_devices=gathers, micro_batch_size=micro_batch_size) for _ in range(losses)]
    callback = ContAccumCallback(dict(enumerate(made)) if losses > 1 else made[0])
    args = SimpleNamespace(should_save=True, world_size=2, gradient_accumulation_steps=2)
    state = SimpleNamespace(global_step=0, train_batch_size=4)
    callback.on_train_begin(args, state, None, train_dataloader=SimpleNamespace(dataset=range(10_000)))
    assert [loss.criterion.bank.size for loss in made] == [expected] * losses
    callback.on_train_begin(args, state, None, train_dataloader=SimpleNamespace(dataset=iter(())))  # of unknown length
    assert [loss.criterion.bank.size for loss in made] == [expected] * losses
    few = 320  # rows: a sixteenth of those that enter, at least a micro-batch
    callback.on_train_begin(args, state, None, train_dataloader=SimpleNamespace(dataset=range(few)))
    micro_batch = (micro_batch_size or 4) * (2 if gathers else 1)
    assert made[0].criterion.bank.size == max(few // 16 // losses // (1 if gathers else 2), micro_batch)


@pytest.mark.parametrize(("size", "warned"), [(65, True), (64, False), ("auto", False), (0, False)])
def test_a_bank_larger_than_the_training_rows_is_warned_of_once(tiny_encoder, tmp_path, size, warned) -> None:
    model = tiny_encoder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(model, tmp_path, SentenceTransformerTrainer, ContAccumLoss(model, bank_size=size), dataset(64), max_steps=3)
    told = [str(one.message) for one in caught if "training rows" in str(one.message)]
    assert told == (["bank_size=65 is more than the 64 training rows that enter the bank; use less, or 'auto'"] if warned else [])


def test_one_loss_for_two_data_sets_counts_once(tiny_encoder) -> None:
    loss = ContAccumLoss(tiny_encoder())
    callback = ContAccumCallback({"a": loss, "b": loss})
    args = SimpleNamespace(should_save=True, world_size=1, gradient_accumulation_steps=2, learning_rate=1.0)
    state = SimpleNamespace(global_step=0, train_batch_size=4)
    callback.on_train_begin(args, state, None, train_dataloader=SimpleNamespace(dataset=range(10_000)))
    callback.on_optimizer_step(args, state, None, optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}]))
    assert (loss.criterion.bank.size, loss.criterion.updates) == (8 * 4 * 2, 1)


def test_a_callback_of_one_s_own_does_not_count_updates_twice(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=12)
    trainer = trained(model, tmp_path, loss=loss, callbacks=[ContAccumCallback(loss)])
    assert loss.criterion.updates == trainer.state.global_step == 4


def test_ages_follow_an_optimizer_of_one_s_own(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizers = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    loss = ContAccumLoss(model, bank_size=12)
    trained(model, tmp_path, partial(ContAccumTrainer, optimizers=optimizers), loss)
    assert loss.criterion.bank.ages.tolist() == [2.0] * 4 + [1.0] * 8


def test_short_last_micro_batch(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=100)
    trained(model, tmp_path, loss=loss, data=dataset(27))
    assert len(loss.criterion.bank) == 27


def test_auto_find_batch_size_starts_over_with_an_empty_bank(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()

    class OutOfMemoryOnce(ContAccumLoss):
        calls = 0

        def forward(self, *args: Any) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(*args)

    loss = OutOfMemoryOnce(model, bank_size=100)
    trainer = trained(model, tmp_path, loss=loss, auto_find_batch_size=True)
    assert trainer._train_batch_size < 4
    assert len(loss.criterion.bank) == 32


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "qwen"])
@pytest.mark.parametrize("loss_class", [ContAccumLoss, CachedContAccumLoss])
def test_model_families_train_and_learn(tiny_encoder, tmp_path, family, loss_class) -> None:
    model = tiny_encoder(family, dropout=0.0)
    losses: list[float] = []
    loss = loss_class(model, bank_size=16)
    loss.criterion.observers.append(lambda step: losses.append(step.loss.item()))
    trained(model, tmp_path, loss=loss, num_train_epochs=8, learning_rate=3e-3)
    full = losses[8:]  # from here on the bank is full
    assert sum(full[-8:]) < 0.8 * sum(full[:8])


def test_gradient_checkpointing_changes_no_gradient(tiny_encoder, tmp_path) -> None:
    plain = trained(tiny_encoder(), tmp_path / "a", optim="sgd")
    checkpointed = trained(tiny_encoder(), tmp_path / "b", optim="sgd", gradient_checkpointing=True)
    assert_close(plain.model.state_dict(), checkpointed.model.state_dict())


def test_torch_compile(tiny_encoder, tmp_path) -> None:
    """Traced and run eagerly: the code generator would take a minute and is not ours."""
    plain = trained(tiny_encoder(dropout=0.0), tmp_path / "a", optim="sgd")
    compiled = trained(tiny_encoder(dropout=0.0), tmp_path / "b", optim="sgd", torch_compile=True, torch_compile_backend="aot_eager")
    assert_close(plain.model.state_dict(), compiled.model.state_dict())


def test_several_data_sets_with_a_bank_each(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    losses = {"a": ContAccumLoss(model, bank_size=100), "b": ContAccumLoss(model, bank_size=100)}
    data = {"a": dataset(32), "b": dataset(16)}
    trained(model, tmp_path, loss=losses, data=data)
    assert [len(loss.criterion.bank) for loss in losses.values()] == [32, 16]


@pytest.mark.parametrize(("sampler", "expected"), [("proportional", [56, 8]), ("round_robin", [32, 20])])
def test_an_automatic_bank_is_of_its_own_data_set_s_size(tiny_encoder, tmp_path, sampler: str, expected: list[int]) -> None:
    """8 updates' worth of what comes to it: of 8 samples 5 in 6, or every other; at most a sixteenth of its rows."""
    model = tiny_encoder()
    losses = {"b": ContAccumLoss(model), "a": ContAccumLoss(model)}
    data = {"a": dataset(320), "b": dataset(1600)}
    trained(model, tmp_path, loss=losses, data=data, max_steps=2, multi_dataset_batch_sampler=sampler)
    assert [loss.criterion.bank.size for loss in losses.values()] == expected


@pytest.mark.gpu
def test_fp16_overflow_steps_leave_a_clean_bank(tiny_encoder, tmp_path) -> None:
    """The first scale is too large for this loss, so the first steps overflow and are skipped."""
    model = tiny_encoder().to("cuda")
    loss = ContAccumLoss(model, scale=1000.0, similarity_fct=dot_score, bank_size=16)
    trainer = trained(model, tmp_path, loss=loss, fp16=True, use_cpu=False, num_train_epochs=6)
    assert 0 < loss.criterion.updates < trainer.state.global_step
    assert torch.isfinite(loss.criterion.bank.queries).all()
