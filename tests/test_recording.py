"""What recordings share, by a stand-in for a recording: where gradients are added, and memory.

What is really recorded needs a GPU: tests/test_graphs_gpu.py.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import assert_close
from contaccum import CachedContAccumLoss
from contaccum.memory.halving import gradients_apart
from contaccum.towers import cuda_graphs as graphs
from contaccum.towers.cuda_graphs import graph_towers
from contaccum.towers.recording import Gradients, RecordingPool
from contaccum.towers.speed import encoders
from replayed import ReplayedByHand, graphed
from test_speed import columns, step


def test_frozen_embeddings_and_gradients_that_are_there(tiny_encoder, by_hand) -> None:
    """Layers get gradients though their input has none; what some parameters have already is added to."""
    model = tiny_encoder(dropout=0.0).train()
    for encoder in encoders(model):
        encoder.embeddings.requires_grad_(False)
    batch = columns(model)[0]

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        weight = next(encoders(model)).encoder.layer[0].output.dense.weight
        weight.grad = given = torch.ones(16, 32)
        for _ in range(2):
            model(dict(batch))["sentence_embedding"].square().sum().backward()
        assert weight.grad is given
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    graph_towers(model)
    assert_close(gradients(), plain, rtol=1e-5)
    assert len(graphed(model)[0].pools) == 1


def test_gradients_are_in_one_place_unless_somebody_holds_them(tiny_encoder, by_hand) -> None:
    model = tiny_encoder(dropout=0.0).train()
    batches = [columns(model, seed=seed)[0] for seed in range(3)]

    def gradients(batch: Any, to_none: bool = True) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=to_none)
        model(dict(batch))["sentence_embedding"].square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = [{name: gradient.clone() for name, gradient in gradients(batch).items()} for batch in batches]
    graph_towers(model)
    first = gradients(batches[0])
    weight = next(name for name in first if "output.dense.weight" in name)
    place = first[weight].data_ptr()
    second = gradients(batches[1])
    assert second[weight].data_ptr() != place
    assert_close(first, plain[0], rtol=1e-5)
    assert_close(second, plain[1], rtol=1e-5)
    del first, second
    for batch, expected in zip(batches, plain, strict=True):
        found = gradients(batch)
        assert found[weight].data_ptr() == place
        assert_close(found, expected, rtol=1e-5)
        del found
    assert_close(gradients(batches[0], to_none=False), plain[0], rtol=1e-5)


def test_gradients_put_aside_are_added_to(tiny_encoder, by_hand, monkeypatch) -> None:
    """As by `HalvingTrainer`, also when a backward pass fails after the layers'. Nothing has to be lent for that."""
    monkeypatch.delattr(Gradients, "_lent")
    model = tiny_encoder(dropout=0.0).train()
    batches = [columns(model, seed=seed)[0] for seed in range(3)]

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        for batch in batches:
            with suppress(torch.OutOfMemoryError), gradients_apart(model):
                model(dict(batch))["sentence_embedding"].square().sum().backward()
                if batch is batches[1]:
                    raise torch.OutOfMemoryError("CUDA out of memory")
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    graph_towers(model)
    for _ in range(2):
        assert_close(gradients(), plain, rtol=1e-5)


def test_memory_that_runs_out_while_recording_is_given_back(tiny_encoder, by_hand, monkeypatch) -> None:
    model = tiny_encoder(dropout=0.0)
    graph_towers(model)
    plain = step(model)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "Recording", full)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, CachedContAccumLoss)  # other shapes
    monkeypatch.setattr(graphs, "Recording", ReplayedByHand)
    assert not any(pool.recordings for pool in graphed(model)[0].pools)
    assert_close(step(model), plain, rtol=0.0)


def test_others_are_given_up_where_memory_runs_out(tiny_encoder, by_hand, monkeypatch) -> None:
    model = tiny_encoder(dropout=0.0).train()
    graph_towers(model)
    attempts: list[int] = []

    class Full(ReplayedByHand):
        def __init__(self, call: Any, inputs: Any, parameters: Any, pool: RecordingPool) -> None:
            attempts.append(len(pool.recordings))
            if pool.recordings:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(call, inputs, parameters, pool)

    monkeypatch.setattr(graphs, "Recording", Full)
    for count in (6, 4, 5):
        model(columns(model, count)[0])["sentence_embedding"].sum().backward()
    assert attempts == [0, 1, 0, 0]  # the last is larger than what is recorded then


def test_a_larger_shape_is_recorded_before_the_smaller_ones(tiny_encoder, by_hand) -> None:
    model = tiny_encoder(dropout=0.0).train()
    graph_towers(model)
    seen = []
    for count in (4, 2, 6, 4, 2, 6):
        model(columns(model, count)[0])["sentence_embedding"].sum().backward()
        seen.append(len(graphed(model)[0].pools[0].recordings))
    assert seen == [1, 2, 1, 2, 3, 3]
