"""Layers recorded as CUDA graphs on a real GPU: loss and gradients, dropout, resuming, memory."""

from __future__ import annotations

import gc

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import BertConfig

from conftest import assert_close, tiny_config
from contaccum import CachedContAccumLoss, ContAccumLoss, dual_encoder
from contaccum.methods.config import TrainConfig
from contaccum.towers import cuda_graphs as graphs
from contaccum.towers.cuda_graphs import MULTIPLE, graph_towers
from contaccum.towers.speed import compile_towers
from replayed import graphed
from test_speed import PRECISIONS, columns, does_not_wait, error_of, needs_compiler, step
from test_speed_training import resumes_bit_equal
from test_train import options

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_recorded_layers_on_a_gpu(precision, compiled, tiny_encoder) -> None:
    """Within the precision's own error, at the first pass and when replayed."""
    model = tiny_encoder(dropout=0.0).to("cuda")
    exact, autocast = step(model), PRECISIONS[precision]

    def run() -> dict[str, Tensor]:
        return step(model, autocast=torch.autocast(**autocast) if autocast else None)

    plain = run()
    if compiled:
        needs_compiler(cuda=True)
        compile_towers(model)
    graph_towers(model)
    allowed = max(1e-5, 3 * error_of(plain, exact), torch.finfo(autocast.get("dtype", torch.float32)).eps / 2)
    for _ in range(3):
        assert error_of(run(), exact) <= allowed
    assert all(any(pool.recordings for pool in stack.pools) for stack in graphed(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
def test_recorded_layers_drop_what_plain_ones_drop(kind, tied, tokenizer_folder, monkeypatch) -> None:
    model = dual_encoder(tiny_config("bert", 0.2), tokenizer=tokenizer_folder, tied=tied, max_seq_length=MULTIPLE).to("cuda")
    graph_towers(model)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "can_record", lambda inputs: False)
        plain = step(model, kind)  # with the same padding
    for _ in range(2):
        assert_close(step(model, kind), plain, rtol=1e-4)
    assert any(pool.recordings for stack in graphed(model) for pool in stack.pools)


def test_a_replayed_micro_step_does_not_wait_for_the_device(tiny_encoder) -> None:
    model = tiny_encoder().to("cuda").train()
    graph_towers(model)
    does_not_wait(model)
    assert all(any(pool.recordings for pool in stack.pools) for stack in graphed(model))


def test_training_with_recorded_layers_resumes_as_it_would_have_gone_on(jsonl, model_folder, tmp_path) -> None:
    def config(name: str) -> TrainConfig:
        changes = {"epochs": 2, "cuda_graphs": True, "keep_checkpoints": 9, "precision": "bf16"}
        return TrainConfig(**options(jsonl(64, negatives=3), model_folder, tmp_path / name, **changes))

    resumes_bit_equal(config, tmp_path)


def middling(tokenizer_folder: str) -> SentenceTransformer:
    """Large enough for its memory to be told from everything else's."""
    config = BertConfig(vocab_size=70, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024)
    model = dual_encoder(config, tokenizer=tokenizer_folder, max_seq_length=256).to("cuda").train()
    graph_towers(model)
    return model


def one_pass(model: SentenceTransformer, texts: int, tokens: int) -> None:
    ids = torch.full((texts, tokens), 9, device="cuda")
    model({"input_ids": ids, "attention_mask": torch.ones_like(ids), "task": "query"})["sentence_embedding"].sum().backward()


def test_memory_that_runs_out_on_a_gpu_while_recording(tokenizer_folder) -> None:
    """A smaller batch is recorded after that, in this process."""
    model = middling(tokenizer_folder)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2e9) / total)
        for texts in (512, 64, 16):
            try:
                one_pass(model, texts, 256)
            except torch.OutOfMemoryError:
                assert texts > 16
            else:
                assert texts < 512
        torch.cuda.synchronize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(pool.recordings for pool in graphed(model)[0].pools)


def test_a_model_that_is_dropped_gives_its_memory_back(tokenizer_folder) -> None:
    held = []
    for _ in range(3):
        model = middling(tokenizer_folder)
        one_pass(model, 64, 256)
        del model
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[0] == held[2]


def test_recordings_of_many_shapes_share_their_memory(tokenizer_folder) -> None:
    """The largest alone holds about what all of them hold."""
    model = middling(tokenizer_folder)
    held = []
    for tokens in (32, 96, 64, 256, 192, 128, 96, 64, 32):
        one_pass(model, 64, tokens)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] < 1.25 * held[3]
    assert len(graphed(model)[0].pools[0].recordings) == 6


def test_micro_batches_add_to_gradients_in_place(tiny_encoder) -> None:
    model = tiny_encoder(dropout=0.0).to("cuda").train()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        for seed in range(3):
            model(columns(model, seed=seed)[0])["sentence_embedding"].square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    graph_towers(model)
    for _ in range(2):
        assert error_of(gradients(), plain) < 1e-5
    shared = graphed(model)[0].pools[0].gradients
    assert all(p.grad.data_ptr() == part.data_ptr() for p, part in zip(shared.parameters, shared.parts, strict=True))
