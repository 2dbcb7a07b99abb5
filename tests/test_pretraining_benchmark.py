"""`benchmarks/pretraining.py` trains alike by its three ways: micro-losses by `DualBankInfoNCE`, all at once, and a batch in pieces."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmark_files import load_benchmark

N_TOTAL, UPDATES = 16, 4


@pytest.fixture(scope="module")
def pretraining() -> ModuleType:
    for name in ("shared_grid", "fast_path", "drift"):
        sys.modules.setdefault(name, load_benchmark(name))
    return load_benchmark("pretraining")


class Tower(nn.Module):
    """Mean of word vectors, in float32 under autocast too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(60, 16)
        self.bert = SimpleNamespace(config=SimpleNamespace(hidden_size=16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(ids).mean(1)
        return found


def trained(module: ModuleType, kind: str, **fields: Any) -> tuple[list[float], torch.Tensor]:
    """Losses, and all weights."""
    tower = Tower()
    trainer = getattr(module, kind)(tower, module.Setting("x", n_total=N_TOTAL, lr=1e-2, **fields), "cpu")
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(UPDATES):
        queries, passages = (torch.randint(60, (N_TOTAL, 6), generator=generator) for _ in range(2))
        losses.append(trainer.update(queries, passages, torch.randint(12, (N_TOTAL,), generator=generator), 1.0).item())
    return losses, tower.words.weight.detach()


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 4}, {"n": 4, "bank": 24}, {"n": 4, "bank": 24, "correction": "mean"}, {"n": 4, "bank": 24, "correction": "mean+zero-sum"}],
)
def test_ways_are_equal(pretraining: ModuleType, fields: dict[str, Any]) -> None:
    losses, weights = trained(pretraining, "Trainer", **fields)
    at_once, other_weights = trained(pretraining, "FastTrainer", **fields)
    assert at_once == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(other_weights, weights, rtol=1e-4, atol=1e-5)


def test_a_batch_in_pieces_is_the_batch(pretraining: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights = trained(pretraining, "Trainer")
    monkeypatch.setattr(pretraining, "PIECE", 5)
    in_pieces, other_weights = trained(pretraining, "Trainer")
    assert in_pieces == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(other_weights, weights, rtol=1e-4, atol=1e-6)
