"""The grid's fast path gives the loss and gradients of the real one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from contaccum import DualBankInfoNCE

UPDATES, N, TOTAL, WIDTH = 6, 4, 16, 8


@pytest.fixture(scope="module")
def drift() -> ModuleType:
    file = Path(__file__).parents[1] / "benchmarks" / "drift.py"
    spec = importlib.util.spec_from_file_location("benchmarks_drift", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("gradient_scale", ["in-batch", "paper"])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"bank_size": 0}),
        ({"bank": 24}, {"bank_size": 24, "drift_correction": None}),
        ({"bank": 24, "mean": True}, {"bank_size": 24, "drift_correction": "mean"}),
        ({"bank": 24, "mean": True, "zero_sum": "passages"}, {"bank_size": 24, "drift_correction": "mean+zero-sum"}),
    ],
)
def test_equals_micro_steps(
    drift: ModuleType, fields: dict[str, Any], options: dict[str, Any], similarity: str, gradient_scale: str
) -> None:
    setting = drift.Setting("x", n=N, n_total=TOTAL, similarity=similarity, gradient_scale=gradient_scale, **fields)
    bank = drift.Bank(setting, WIDTH, "cpu")
    criterion = DualBankInfoNCE(scale=drift.SCALES[similarity], gradient_scale=gradient_scale, **options)
    criterion.bank.unit = similarity == "cosine"  # it gets vectors that are normalised already, as the fast path's are
    generator = torch.Generator().manual_seed(0)
    for number in range(UPDATES):
        vectors = torch.randn(2, TOTAL, WIDTH, generator=generator) + number * 0.3
        if similarity == "cosine":
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        keys = torch.randint(40, (2, TOTAL), generator=generator)  # some texts twice
        loss, grad_q, grad_p = bank.update(*vectors, *keys)
        real = vectors.clone().requires_grad_()
        losses = []
        for i in range(0, TOTAL, N):
            part = slice(i, i + N)
            losses.append(criterion(real[0, part], real[1, part], None, keys[0, part], keys[1, part, None]))
        mean = torch.stack(losses).mean()
        mean.backward()
        criterion.after_update()
        torch.testing.assert_close(loss, mean.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.stack([grad_q, grad_p]), real.grad, rtol=1e-4, atol=1e-6)


def test_both_towers_gradients_are_centred_by_micro_step(drift: ModuleType) -> None:
    """An exploratory variant that the real path does not have: the plain bank's gradients, centred by hand."""
    vectors = torch.randn(2, TOTAL, WIDTH, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(2 * TOTAL).view(2, TOTAL)
    (loss, *plain), (balanced_loss, *balanced) = (
        drift.Bank(drift.Setting("x", n=N, n_total=TOTAL, bank=24, zero_sum=which), WIDTH, "cpu").update(*vectors, *keys)
        for which in ("", "both")
    )
    assert torch.equal(balanced_loss, loss)
    for gradients, found in zip(plain, balanced, strict=True):
        parts = gradients.view(-1, N, WIDTH)
        torch.testing.assert_close(found, (parts - parts.mean(1, keepdim=True)).view_as(found))
