"""Towers with recorded layers compute what plain ones do: padding, pools and what changes between passes, by a stand-in for a recording.

What is really recorded needs a GPU: tests/test_graphs_gpu.py.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import assert_close, tiny_config
from contaccum import CachedContAccumLoss, ContAccumLoss, dual_encoder
from contaccum.methods.config import TrainConfig
from contaccum.towers.cuda_graphs import (
    MULTIPLE,
    POOLS,
    check_graphs,
    forget_recordings,
    graph_towers,
    ungraph_towers,
)
from contaccum.towers.speed import encoders
from contaccum.training.run import train
from replayed import graphed
from test_speed import CONFIGS, columns, step
from test_train import options


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_longer_padding_and_the_mask_change_nothing(family, kind, pooling, tokenizer_folder) -> None:
    torch.manual_seed(0)
    model = dual_encoder(CONFIGS[family](), tokenizer=tokenizer_folder, pooling=pooling, max_seq_length=40).to("cpu").double()
    plain = step(model, kind)
    graph_towers(model)
    assert_close(step(model, kind), plain, rtol=1e-10)
    ungraph_towers(model)
    assert "forward" not in {name for module in model.modules() for name in vars(module)}
    assert_close(step(model, kind), plain, rtol=0.0)


def test_layers_see_few_lengths_and_no_mask_where_texts_are_full(tiny_encoder) -> None:
    model = tiny_encoder().train()
    graph_towers(model)
    seen: list[tuple[int, bool]] = []
    encoder = next(encoders(model))
    encoder.encoder.layer[0].register_forward_pre_hook(lambda module, arguments: seen.append((arguments[0].shape[1], arguments[1] is None)))
    room = encoder.config.max_position_embeddings
    for tokens, counts in (
        (5, [5, 3]),
        (MULTIPLE, [MULTIPLE] * 2),
        (MULTIPLE, [MULTIPLE, 9]),
        (MULTIPLE, None),
        (room - 1, [room - 1] * 2),
    ):
        ids = torch.full((2, tokens), 9)
        real = torch.tensor(counts or [tokens] * 2)
        batch = {"input_ids": ids, "attention_mask": (torch.arange(tokens) < real[:, None]).long(), "task": "query"}
        vectors = model({**batch, "token_counts": counts} if counts else batch)["token_embeddings"]
        assert vectors.shape[1] == tokens
    last = (room, False) if (room - 1) % MULTIPLE and room % MULTIPLE == 0 else (room - 1, True)
    assert seen == [(MULTIPLE, False), (MULTIPLE, True), (MULTIPLE, False), (MULTIPLE, False), last]
    model.eval()(batch | {"input_ids": ids[:, :5], "attention_mask": torch.ones(2, 5).long()})
    assert seen[-1][0] == 5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
def test_replayed_passes_give_the_same_loss_and_gradients(kind, tied, tokenizer_folder, by_hand) -> None:
    torch.manual_seed(0)
    model = dual_encoder(tiny_config("bert", 0.0), tokenizer=tokenizer_folder, tied=tied).to("cpu").double()
    plain = step(model, kind)
    graph_towers(model)
    for _ in range(2):  # the second finds everything recorded
        assert_close(step(model, kind), plain, rtol=1e-10)
    pools = [pool for stack in graphed(model) for pool in stack.pools]
    assert len(pools) == (
        1 if tied and kind is CachedContAccumLoss else 2
    )  # of one tower, or one of each; GradCache has one pass at a time
    assert all(len(pool.recordings) > 0 for pool in pools)
    assert gc.isenabled()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    changed = step(model, kind)
    ungraph_towers(model)
    assert_close(changed, step(model, kind), rtol=1e-10)


def test_more_passes_than_lanes_run_as_always(tiny_encoder, by_hand) -> None:
    model = tiny_encoder(dropout=0.0)
    batches = [columns(model, seed=seed)[0] for seed in range(POOLS + 2)]

    def gradients() -> dict[str, Tensor]:
        model.train().zero_grad()
        values = [model(dict(batch))["sentence_embedding"].square().sum() for batch in batches]
        sum(values).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    graph_towers(model)
    for _ in range(2):
        assert_close(gradients(), plain, rtol=1e-5)
    assert [len(stack.pools) for stack in graphed(model)] == [POOLS, 0]


def test_a_pass_that_is_dropped_gives_its_lane_back(tiny_encoder, by_hand) -> None:
    model = tiny_encoder().train()
    graph_towers(model)
    stack, batch = graphed(model)[0], columns(model)[0]
    for _ in range(4):
        model(dict(batch))
        gc.collect()
    assert [pool.free for pool in stack.pools] == [True]
    kept = [model(dict(batch))["sentence_embedding"].sum() for _ in range(2)]
    for value in kept:
        value.backward()  # and `kept` lives on
    assert [pool.free for pool in stack.pools] == [True, True]


def test_a_second_backward_pass_is_refused(tiny_encoder, by_hand) -> None:
    model = tiny_encoder().train()
    graph_towers(model)
    value = model(columns(model)[0])["sentence_embedding"].sum()
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through towers with CUDA graphs; leave cuda_graphs out"):
        value.backward()


def test_without_gradients_or_in_evaluation_nothing_is_recorded(tiny_encoder, by_hand) -> None:
    model = tiny_encoder()
    graph_towers(model)
    batch = columns(model)[0]
    model.eval()(dict(batch))
    with torch.no_grad():
        model.train()(dict(batch))
    assert graphed(model)[0].pools == []


def test_hooks_on_parameters_are_called(tiny_encoder, by_hand) -> None:
    model = tiny_encoder(dropout=0.0)
    graph_towers(model)
    called: list[int] = []
    weight = next(encoders(model)).encoder.layer[0].output.dense.weight
    weight.register_post_accumulate_grad_hook(lambda p: called.append(1))
    step(model)
    assert called == [1, 1]
    assert [len(stack.pools) for stack in graphed(model)] == [0, 1]


@pytest.mark.parametrize("hook", ["forward", "checkpointing"])
def test_layers_that_are_looked_into_are_not_replayed(hook, tiny_encoder, by_hand) -> None:
    model = tiny_encoder(dropout=0.0)
    graph_towers(model)
    called: list[int] = []
    encoder = next(encoders(model))
    if hook == "forward":
        encoder.encoder.layer[0].register_forward_hook(lambda *_: called.append(1))
    else:
        encoder.gradient_checkpointing_enable({"use_reentrant": False})
    step(model)
    assert [len(stack.pools) for stack in graphed(model)] == [0, 1]
    assert called == [1, 1] * (hook == "forward")


def test_what_is_trained_may_change(tiny_encoder, by_hand) -> None:
    """Frozen, released, replaced and partly evaluated: gradients are those of plain towers each time."""
    model, plain = tiny_encoder(dropout=0.0), tiny_encoder(dropout=0.0)
    graph_towers(model)

    def weight(of: nn.Module) -> nn.Module:
        return next(encoders(of)).encoder.layer[0].output.dense

    def replaced(of: nn.Module) -> None:
        weight(of).weight = nn.Parameter(2 * weight(of).weight.detach())

    changes = [
        lambda of: None,
        lambda of: weight(of).weight.requires_grad_(False),
        lambda of: weight(of).weight.requires_grad_(True),
        replaced,
        lambda of: next(encoders(of)).encoder.layer[0].requires_grad_(False),
        lambda of: next(encoders(of)).encoder.layer[0].requires_grad_(True),
    ]
    for change in changes:
        change(model)
        change(plain)
        assert_close(step(model), step(plain), rtol=1e-5)
    assert all(stack.pools for stack in graphed(model))


def test_several_processes_are_refused_and_not_replayed(tiny_encoder, by_hand, monkeypatch) -> None:
    with pytest.raises(ValueError, match="cuda_graphs is for one process, not 2; leave it out"):
        check_graphs(False, False, cuda=True, processes=2)
    model = tiny_encoder()
    graph_towers(model)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    model.train()(columns(model)[0])
    assert graphed(model)[0].pools == []


def test_moved_weights_are_recorded_again(tiny_encoder, by_hand) -> None:
    model = tiny_encoder(dropout=0.0)
    graph_towers(model)
    step(model)
    before = graphed(model)[0].pools
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    step(model)
    assert graphed(model)[0].pools[0] is not before[0]


def test_recordings_are_forgotten_when_micro_batches_are_halved(jsonl, model_folder, tmp_path, by_hand, monkeypatch) -> None:
    forgotten: list[int] = []
    model_of: list[Any] = []

    def graphed_and_kept(model: Any) -> None:
        model_of.append(model)
        graph_towers(model)

    def forget(model: Any) -> None:
        forgotten.append(sum(len(pool.recordings) for stack in graphed(model) for pool in stack.pools))
        forget_recordings(model)
        assert not any(stack.pools for stack in graphed(model))

    criterion, calls = ContAccumLoss.compute_loss_from_embeddings, []

    def fails_once(self: Any, *arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return criterion(self, *arguments, **options)

    monkeypatch.setattr("contaccum.training.run.check_graphs", lambda *_: None)
    monkeypatch.setattr("contaccum.training.run.planned", lambda config, *_: replace(config, n_local=8))
    monkeypatch.setattr("contaccum.training.run.graph_towers", graphed_and_kept)
    monkeypatch.setattr("contaccum.memory.halving.forget_recordings", forget)
    monkeypatch.setattr(ContAccumLoss, "compute_loss_from_embeddings", fails_once)
    changes = {"epochs": 1, "cuda_graphs": True, "n_local": 0, "n_total": 16, "bank": 16, "memory": "100MB"}
    summary = train(TrainConfig(**options(jsonl(64), model_folder, tmp_path / "run", **changes)))
    assert summary["halvings"] == 1
    assert len(forgotten) == 2  # for the optimizer's first step, and by halving
    assert all(forgotten)
    assert any(pool.recordings for stack in graphed(model_of[0]) for pool in stack.pools)


def test_what_does_not_go_together_is_one_clear_line(tiny_encoder, monkeypatch) -> None:
    with pytest.raises(ValueError, match="cuda_graphs needs an NVIDIA GPU; leave it out"):
        check_graphs(False, False, cuda=False)
    for name, (checkpointing, unpad) in {"gradient_checkpointing": (True, False), "unpad": (False, True)}.items():
        with pytest.raises(ValueError, match=f"cuda_graphs and {name} do not go together"):
            check_graphs(checkpointing, unpad, cuda=True)
    with pytest.raises(ValueError, match="cuda_graphs=true is not possible for modernbert; it is for bert"):
        graph_towers(tiny_encoder("modernbert"))
    model = tiny_encoder()
    for encoder in encoders(model):
        encoder.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="not possible with eager attention; it is with sdpa"):
        graph_towers(model)
    model = tiny_encoder()
    next(encoders(model)).config.output_hidden_states = True
    with pytest.raises(ValueError, match="not possible for an encoder that also gives what is inside its layers"):
        graph_towers(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_graphs_without_a_gpu_are_refused_before_anything_is_written(jsonl, model_folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="cuda_graphs needs an NVIDIA GPU"):
        train(TrainConfig(**options(jsonl(64), model_folder, tmp_path / "run", cuda_graphs=True)))
    assert not (tmp_path / "run").exists()
