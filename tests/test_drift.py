"""Why a bank drifts, and what each remedy does about it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contaccum import DualBankInfoNCE

D = 24


def step(
    criterion: DualBankInfoNCE, n: int = 8, h: int = 0, query_mean: Tensor | float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients on queries (n, d) and passages (n, 1 + h, d) of one micro-step of random vectors."""
    generator = torch.Generator().manual_seed(seed)
    queries = (torch.randn(n, D, generator=generator) + query_mean).requires_grad_()
    passages = torch.randn(n, 1 + h, D, generator=generator).requires_grad_()
    loss = criterion(queries, passages[:, 0], passages[:, 1:] if h else None)
    grad_queries, grad_passages = torch.autograd.grad(loss, (queries, passages))
    return loss, grad_queries, grad_passages


@pytest.mark.parametrize("correction", [None, "mean"])
@pytest.mark.parametrize("h", [0, 2])
def test_zero_sum_takes_their_means_off_the_gradients_and_nothing_else(h: int, correction: str | None) -> None:
    plain, balanced = (DualBankInfoNCE(20, 0.3, drift_correction=correction, zero_sum=z) for z in (False, True))
    for seed in range(6):
        (loss, on_queries, on_passages), found = (step(criterion, h=h, seed=seed) for criterion in (plain, balanced))
        assert torch.equal(found[0], loss)
        assert torch.allclose(found[1], on_queries - on_queries.mean(0), atol=1e-7)
        assert torch.allclose(found[2], on_passages - on_passages.mean((0, 1)), atol=1e-7)
    assert on_passages.sum((0, 1)).norm() > 100 * found[2].sum((0, 1)).norm(), "there was nothing to take off"


@pytest.mark.parametrize("h", [0, 2])
def test_without_a_bank_gradients_on_passages_sum_to_zero_anyway(h: int) -> None:
    _, _, on_passages = step(DualBankInfoNCE(0), h=h)
    assert on_passages.abs().max() > 1e-2
    assert on_passages.sum((0, 1)).abs().max() < 1e-6


def push(criterion: DualBankInfoNCE, moved: Tensor) -> Tensor:
    """Where gradient descent pushes all passages together, mean over a long run, once the queries' mean has moved."""
    total = torch.zeros(D)
    for seed in range(400):  # the bank is full of queries around 0, then they stand around `moved`
        _, _, on_passages = step(criterion, query_mean=moved if seed >= 200 else 0.0, seed=seed)
        criterion.after_update()
        if 200 <= seed < 204:  # the bank holds 32 micro-batches: nearly all from before
            total -= on_passages.sum((0, 1)) / 4
    return total


def test_passages_follow_the_queries_mean_unless_the_bank_is_read_with_the_present_one() -> None:
    """The loop that makes a plain bank run away, and what breaks it."""
    moved = torch.zeros(D)
    moved[0] = 2.0
    plain = push(DualBankInfoNCE(256, 0.3), moved)
    assert torch.cosine_similarity(plain, moved, dim=0) > 0.8
    corrected = push(DualBankInfoNCE(256, 0.3, drift_correction="mean"), moved)
    assert corrected[0] < 0.3 * plain[0]
    assert push(DualBankInfoNCE(256, 0.3, zero_sum=True), moved).norm() < 1e-4 * plain.norm()


def test_zero_sum_is_part_of_the_losses_configuration(tiny_encoder) -> None:
    from contaccum import ContAccumLoss

    loss = ContAccumLoss(tiny_encoder(), zero_sum=True)
    assert loss.criterion.zero_sum
    assert loss.get_config_dict()["zero_sum"] is True
