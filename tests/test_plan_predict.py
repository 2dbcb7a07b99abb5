"""The planner's predictions: allocator, bank, optimizer and whole updates take what real ones take."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, PretrainedConfig

from contaccum.memory.prediction.allocator import MIB, CachingAllocator, OutOfBudget
from contaccum.memory.prediction.loss import accept_arrivals, bank_loss, record_loss
from contaccum.memory.prediction.predict import Predictor, running_of
from contaccum.memory.prediction.towers import Encoder, Running, inputs, record
from contaccum.memory.prediction.trace import Recorder
from contaccum.memory.prediction.update import Simulation
from contaccum.methods.config import TrainConfig
from contaccum.training.trial import measure
from plan_models import TOKENS, decoder, middling

ROOT = Path(__file__).parents[1]


# The allocator ---------------------------------------------------------------------------------------------------------


def test_allocator_rounds_and_reserves_as_pytorch_documents() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(513)  # from the same segment
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    allocator.allocate(3 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(15 * MIB)  # 17 MiB are free in the segment of 20
    assert allocator.reserved == 22 * MIB
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 38 * MIB


def test_allocator_takes_the_smallest_block_that_fits_and_joins_neighbours() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.release(block)
    allocator.allocate(15 * MIB)  # the three as one
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 20 * MIB)


def test_allocator_gives_free_segments_back_before_it_gives_up() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    held = allocator.allocate(40 * MIB)
    allocator.release(held)
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 50 * MIB
    assert allocator.peak_reserved == 50 * MIB
    with pytest.raises(OutOfBudget):
        allocator.allocate(20 * MIB)


# Bank and optimizer ----------------------------------------------------------------------------------------------------

BANKS = {
    "plain": {},
    "hard negatives": {"hard_negatives": 2},
    "positives only": {"hard_negatives": 2, "cache_hard_negatives": False},
    "paper": {"drift_correction": None, "hard_negatives": 1},
    "mean": {"drift_correction": "mean"},
    "bfloat16": {"bank_dtype": "bfloat16", "hard_negatives": 1},
    "fewer queries": {"query_bank": 7},
    "no queries": {"method": "prebatch"},
    "no keys": {"mask_duplicates": False},
    "cosine": {"similarity": "cosine"},
    "no bank": {"method": "gradaccum"},
}


@pytest.mark.parametrize("options", BANKS.values(), ids=BANKS.keys())
def test_bank_bytes_are_the_banks(options: dict[str, Any]) -> None:
    config = TrainConfig(bank=40, **options)
    h, d, n = config.hard_negatives or 0, 24, 6
    loss = bank_loss(config)
    for _ in range(9):  # filled, and beyond
        columns = [torch.randn(n, d, requires_grad=True) for _ in range(2 + h)]
        loss.compute_loss_from_embeddings(columns, keys=[torch.randint(99, (n,)) for _ in columns]).backward()
    bank = loss.criterion.bank
    assert len(bank) == (40 if config.method != "gradaccum" else 0)
    assert record_loss(config, n, d).bank_bytes == bank.nbytes


def test_optimizer_bytes_are_adamws() -> None:
    encoder = Encoder(middling(), Running())
    trained = [p for p in encoder.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    real = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    tower = record(middling(), TOKENS)
    assert sum(4 + 2 * size for size in tower.trainable) == real
    assert sum(tower.fixed) == sum(t.nbytes for t in [*encoder.parameters(), *encoder.buffers()])


# The whole update ------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Stands in for a SentenceTransformer with a Router."""

    def __init__(self, config: PretrainedConfig, running: Running, tied: bool) -> None:
        super().__init__()
        self.query = Encoder(config, running)
        self.document = self.query if tied else Encoder(config, running)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return (self.query if features.pop("task") == "query" else self.document)(features)


def recorded_update(config: TrainConfig, samples: int, micro_steps: int, workspace: int) -> CachingAllocator:
    """Two real updates with real towers, the real loss and AdamW, recorded as they run and played to the allocator."""
    torch.manual_seed(0)
    towers = Towers(config.model, running_of(config), config.tied)
    loss = bank_loss(config)
    loss.model = towers
    optimizer = torch.optim.AdamW([p for p in towers.parameters() if p.requires_grad], fused=True)
    recorder = Recorder([*towers.parameters(), *towers.buffers()])
    gc.disable()
    with recorder:
        for update in range(2):
            tasks = ["query", *["document"] * (1 + (config.hard_negatives or 0))]
            batches = [[{**inputs(samples, TOKENS), "task": task} for task in tasks] for _ in range(micro_steps)]
            for batch in batches:
                value = loss([dict(features) for features in batch])
                accept_arrivals(loss.criterion.bank)
                value.backward()
                del value
                if update == 0 and batch is batches[0]:
                    loss.criterion.bank.count = 2 * config.bank
            optimizer.step()
            optimizer.zero_grad()
    gc.enable()
    if loss.criterion.bank.size:
        assert loss.criterion.bank.count == 2 * config.bank_size + 2 * micro_steps * samples, "something did not enter"
    trace = recorder.trace()
    allocator = CachingAllocator()
    for size in [workspace, workspace, *(t.nbytes for t in [*towers.parameters(), *towers.buffers()])]:
        allocator.allocate(size)
    held: dict[int, Any] = {}
    for event in trace.segments[0]:
        if event >= 0:
            held[event] = allocator.allocate(trace.sizes[event])
        else:
            allocator.release(held.pop(~event))
    return allocator


UPDATES = {
    "plain": {},
    "hard negatives": {"hard_negatives": 2},
    "bf16": {"precision": "bf16", "hard_negatives": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "tied": {"tied": True},
    "larger bank": {"bank": 300},
    "paper": {"drift_correction": None, "bank": 300},
    "one micro-step": {"method": "dpr", "n_total": 12},
    "adapters": {"lora_rank": 4},
    "adapters, checkpointing": {"lora_rank": 4, "lora_dropout": 0.1, "gradient_checkpointing": True, "tied": True},
    "adapters on bfloat16": {"lora_rank": 4, "weights_dtype": "bfloat16", "precision": "bf16", "tied": True},
    "bfloat16": {"weights_dtype": "bfloat16", "tied": True, "hard_negatives": 1},
    "decoder": {"model": decoder(), "pooling": "lasttoken", "tied": True},
    "decoder with adapters": {"model": decoder(), "pooling": "lasttoken", "lora_rank": 4, "weights_dtype": "bfloat16", "precision": "bf16"},
}


@pytest.mark.parametrize("options", UPDATES.values(), ids=UPDATES.keys())
def test_predicted_update_is_the_recorded_one(options: dict[str, Any]) -> None:
    config = TrainConfig(**{"model": middling(num_hidden_layers=3), "n_total": 24, "bank": 64, "max_seq_length": TOKENS, **options})
    config = replace(config, n_local=12)
    update = replace(Predictor(config).update(config), workspace_bytes=0)
    predicted = Simulation(update).run().allocator
    real = recorded_update(config, 12, update.micro_steps, 0)
    # Where gradients of an adapter and of the layer beneath it meet, a recording takes a buffer more than autograd does.
    sums = 4 * 12 * TOKENS * config.model.intermediate_size if config.lora_rank and config.gradient_checkpointing else 0
    assert 0.98 * real.peak_allocated <= predicted.peak_allocated <= 1.05 * real.peak_allocated + sums
    assert 0.95 * real.peak_reserved <= predicted.peak_reserved <= 1.10 * real.peak_reserved


def test_gradients_kept_apart_cost_at_most_themselves() -> None:
    config = TrainConfig(model=middling(), n_total=4, n_local=1, bank=8, max_seq_length=TOKENS)
    predictor = Predictor(config)
    plain, apart = (predictor.predict(config, apart=apart) for apart in (False, True))
    gradients = sum(2 * size for size in predictor.update(config).queries.tower.trainable)
    assert plain.allocated_bytes <= apart.allocated_bytes <= plain.allocated_bytes + 1.3 * gradients
    assert sum(apart.parts.values()) == apart.allocated_bytes


def test_gradcache_holds_one_mini_batch() -> None:
    config = TrainConfig(model=middling(), n_total=64, n_local=8, bank=64, max_seq_length=TOKENS)
    together, cached, whole = (Predictor(config).predict(replace(config, method=m)) for m in ("contaccum", "contaccum-gradcache", "dpr"))
    assert cached.parts["activations"] < 0.6 * together.parts["activations"]
    assert whole.parts["activations"] > 7 * together.parts["activations"]


def test_own_modules_are_planned_as_mean_pooling() -> None:
    config = TrainConfig(model=middling(), n_total=8, n_local=4, bank=8, max_seq_length=TOKENS, pooling="mean")
    assert running_of(replace(config, pooling="own")) == running_of(config)
    assert Predictor(config).predict(replace(config, pooling="own")) == Predictor(config).predict(config)


# Measured on an H200, see results/train-acl-h200.json: texts of varying length up to 128 tokens, no hard negatives.
MEASURED = ("contaccum", "contaccum-gradcache", "dpr", "gradaccum", "gradcache")


@pytest.mark.parametrize("method", MEASURED)
def test_prediction_is_close_to_what_was_measured(method: str) -> None:
    measured = json.loads((ROOT / "results" / "train-acl-h200.json").read_text())[method]["summary"]
    model = BertConfig(hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536)
    config = TrainConfig(model=model, method=method, n_total=128, n_local=8, bank=1024, max_seq_length=128, drift_correction=None)
    predicted = Predictor(config).predict(config)
    assert 0.95 <= predicted.peak_bytes / measured["peak_bytes"] <= 1.10
    assert predicted.bank_bytes == pytest.approx(measured["bank_bytes"], rel=0.01)  # rows then had ids and keys of their own


@pytest.mark.gpu
def test_prediction_on_this_gpu() -> None:
    config = TrainConfig(model=BertConfig(num_hidden_layers=4), n_total=32, n_local=16, bank=256, max_seq_length=128, hard_negatives=1)
    predicted, measured = Predictor(config).predict(config), measure(config)
    assert 0.95 <= predicted.peak_bytes / measured.peak_bytes <= 1.10
