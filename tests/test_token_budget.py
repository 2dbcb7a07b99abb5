"""Micro-batches by tokens: each within the budget, the update that of the mean over its samples, nothing else than before to resume."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from conftest import assert_close, texts
from contaccum import ContAccumLoss
from contaccum.memory.halving import part_of, rows_of
from contaccum.memory.token_budget import TokenBudgetTrainer, budgeted, micro_batches
from contaccum.methods.config import TrainConfig
from contaccum.training.logfile import read_log
from contaccum.training.run import train
from reference import ReferenceInfoNCE
from test_checkpoints import assert_bit_equal
from test_trainer import ROUTES, arguments, state_of, trained

ROUTED = ROUTES | {"negative": "document"}


def needed(lengths: list[list[int]], padded: bool) -> int:
    """Tokens of a micro-batch, as the module says."""
    if not padded:
        return sum(map(sum, lengths))
    query, passage = max(row[0] for row in lengths), max(max(row[1:]) for row in lengths)
    return sum(query + passage * len(row[1:]) for row in lengths)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("passages", [1, 3])
def test_micro_batches_are_as_large_as_the_budget_allows(padded: bool, passages: int) -> None:
    draw = random.Random(0)
    for budget in (1, 60, 200, 10_000):
        lengths = [[draw.randint(1, 9), *(draw.randint(2, 60) for _ in range(passages))] for _ in range(40)]
        cuts = budgeted(lengths, budget, padded)
        assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == len(lengths)
        for start, stop in cuts:
            assert needed(lengths[start:stop], padded) <= budget or stop == start + 1
            assert stop == len(lengths) or needed(lengths[start : stop + 1], padded) > budget


def varied(count: int = 32) -> Dataset:
    queries = texts(count, seed=3, words=4)
    passages = [text for i in range(count) for text in texts(1, seed=50 + i, words=28 if i % 5 == 0 else 5)]
    return Dataset.from_dict({"query": queries, "positive": passages, "negative": texts(count, seed=4, words=12)})


def budget_trainer(model: Any, folder: Path, tokens: int, padded: bool = True, **options: Any) -> TokenBudgetTrainer:
    loss = ContAccumLoss(model, bank_size=12, scale=5.0)
    sizes = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 0,
        "router_mapping": ROUTES | {"negative": "document"},
    }
    return TokenBudgetTrainer(
        model=model, args=arguments(folder, **sizes, **options), train_dataset=varied(), loss=loss, tokens=tokens, padded=padded
    )


@pytest.mark.parametrize("padded", [True, False])
def test_updates_equal_the_definition(tiny_encoder, tmp_path, padded: bool) -> None:
    """In float64, three updates: each micro-batch's loss is the reference's and weighs by its samples; each text embedded alone."""
    budget, models = 120, [tiny_encoder(dropout=0.0).double() for _ in range(2)]
    trainer, by_hand = (budget_trainer(model, tmp_path, budget, padded, max_steps=3) for model in models)
    batches = [dict(batch) for _, batch in zip(range(3), by_hand.get_train_dataloader(), strict=False)]
    trainer.optimizer, optimizer = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in models)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)
    trainer.train()

    reference, sizes = ReferenceInfoNCE(12, 5.0, "cosine", drift_correction="mean+zero-sum"), []
    for batch in batches:
        rows = [part_of(batch, 8, i, i + 1) for i in range(8)]
        lengths = [[int(value.sum()) for name, value in row.items() if name.endswith("attention_mask")] for row in rows]
        while rows:
            size = max([1, *(k for k in range(1, len(rows) + 1) if needed(lengths[:k], padded) <= budget)])
            (loss_of(by_hand, rows[:size], reference) * size / 8).backward()
            sizes.append(size)
            rows, lengths = rows[size:], lengths[size:]
        optimizer.step(), optimizer.zero_grad()
        reference.after_update()
    assert len(set(sizes)) > 2, "micro-batches of one size show nothing"
    states = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
    assert_close(*states, rtol=1e-9)
    assert trainer.loss.criterion.bank.count == 24


def loss_of(trainer: TokenBudgetTrainer, rows: list[dict[str, Any]], reference: ReferenceInfoNCE) -> Tensor:
    columns = [[], [], []]
    keys: list[list[int]] = [[], [], []]
    for row in rows:
        for place, features in enumerate(trainer.collect_features(dict(row))[0]):
            keys[place].append(hash(tuple(features["input_ids"][features["attention_mask"].bool()].tolist())))
            columns[place].append(trainer.model(features)["sentence_embedding"][0])
    queries, positives, negatives = (torch.stack(column) for column in columns)
    return reference(queries, positives, negatives[:, None], torch.tensor(keys[0]), torch.tensor(keys[1:]).T)


@pytest.mark.parametrize("family", ["bert", "qwen"])
def test_a_micro_batch_is_as_if_tokenised_by_itself(tiny_encoder, tmp_path, family: str) -> None:
    """Padding on the right, and on the left."""
    trainer = budget_trainer(tiny_encoder(family), tmp_path, tokens=80)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    parts, start = micro_batches(batch, 80, padded=True), 0
    assert any(part["positive_input_ids"].shape[1] < batch["positive_input_ids"].shape[1] for part in parts)
    for part in parts:
        stop = start + rows_of(part)
        for column in ("query", "positive", "negative"):
            ids, mask = (part[f"{column}_{name}"] for name in ("input_ids", "attention_mask"))
            assert mask.shape == ids.shape == (stop - start, int(mask.sum(1).max()))
            whole_ids, whole_mask = (batch[f"{column}_{name}"][start:stop] for name in ("input_ids", "attention_mask"))
            assert torch.equal(ids[mask.bool()], whole_ids[whole_mask.bool()])
        start = stop
    assert start == 8


def test_resume_is_bit_equal(tiny_encoder, tmp_path) -> None:
    def run(folder: str, resume: str | None = None) -> Any:
        model = tiny_encoder()
        kind = partial(TokenBudgetTrainer, tokens=100)
        loss = ContAccumLoss(model, bank_size=12)
        options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 3}
        options["router_mapping"] = ROUTED
        return trained(model, tmp_path / folder, kind, loss, varied(), num_train_epochs=2, resume=resume, **options)

    whole = run("whole")
    assert_bit_equal(state_of(run("resumed", str(tmp_path / "whole" / "checkpoint-3"))), state_of(whole))


@pytest.mark.parametrize("method", ["contaccum", "gradcache"])
def test_train_takes_a_budget_of_tokens(model_folder, tmp_path, method: str) -> None:
    rows = varied(48)
    data = tmp_path / "varied.jsonl"
    data.write_text("".join(json.dumps({"query": r["query"], "positive": r["positive"]}) + "\n" for r in rows))
    config = TrainConfig(
        data=str(data),
        model=model_folder,
        output=str(tmp_path / "run"),
        method=method,
        max_seq_length=64,
        n_total=12,
        n_local=5,
        local_tokens=64,
        epochs=1,
    )
    train(config)
    micro_batches = [line["micro_batches"] for line in read_log(tmp_path / "run" / "log.jsonl")]
    assert len(micro_batches) == 4
    assert micro_batches == [1] * 4 if method == "gradcache" else min(micro_batches) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_tokens": 0}, "local_tokens=0 must be above 0"),
        ({"local_tokens": 512, "method": "dpr"}, "local_tokens=512 cuts an update, but dpr has one batch; leave it out"),
        ({"local_tokens": 512, "n_local": 0}, "local_tokens=512 and n_local=auto each say what is in memory at once; use one"),
        ({"local_tokens": 512, "whole_updates": True}, "local_tokens=512 and whole_updates each say what is in memory at once"),
        ({"local_tokens": 512, "cuda_graphs": True}, "cuda_graphs records every shape of a micro-batch"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(data="x", output="y", **options).check_values()


def test_several_processes_are_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="cuts micro-batches by the texts of one process, and 2 would cut differently; use n_local"):
        train(TrainConfig(data="x", output=str(tmp_path / "run"), local_tokens=512))
    assert not (tmp_path / "run").exists()
