"""Why a bank drifts, and what each remedy does about it."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("h", [0, 2])
def test_zero_sum_takes_their_running_mean_off_the_gradients_on_passages_and_nothing_else(h: int) -> None:
    plain, balanced = (DualBankInfoNCE(20, 0.3, drift_correction=correction) for correction in ("mean", "mean+zero-sum"))
    running = torch.zeros(D)
    for seed in range(6):
        (loss, on_queries, on_passages), found = (step(criterion, h=h, seed=seed) for criterion in (plain, balanced))
        running = running.lerp(on_passages.mean((0, 1)), 0.5 if seed else 1.0)  # of 16 samples; a micro-batch has 8
        assert torch.equal(found[0], loss)
        assert torch.equal(found[1], on_queries)
        assert torch.allclose(found[2], on_passages - running, atol=1e-7)
    assert running.norm() > 1e-3, "there was nothing to take off"


def common_push(correction: str, sizes: list[int]) -> float:
    """Length of what pushes all passages the same way, over updates of 72 samples cut into micro-batches of these sizes."""
    criterion, generator = DualBankInfoNCE(288, 0.3, drift_correction=correction), torch.Generator().manual_seed(1)
    total = torch.zeros(D)
    for update in range(24):
        for n in sizes * (72 // sum(sizes)):
            queries = torch.randn(n, D, generator=generator)
            passages = (queries + 0.5 * torch.randn(n, D, generator=generator)).requires_grad_()
            (on_passages,) = torch.autograd.grad(criterion((queries + torch.eye(D)[0]).requires_grad_(), passages), passages)
            total += on_passages.sum(0) * n * (update >= 8)  # the bank is full by then
        criterion.after_update()
    return float(total.norm())


@pytest.mark.parametrize("sizes", [[8], [8, 1], [5, 3, 1]])
def test_zero_sum_holds_where_micro_batches_differ_in_size(sizes: list[int]) -> None:
    """Each divides its gradients by its own size: their mean must not mix what was divided by 8 and by 1."""
    assert common_push("mean+zero-sum", sizes) < 0.5 * common_push("mean", sizes)


def test_a_micro_batch_of_one_passage_keeps_most_of_its_gradient() -> None:
    """Else micro-batches of one sample would never train the passage tower."""
    plain, balanced = (DualBankInfoNCE(20, 0.3, drift_correction=correction) for correction in ("mean", "mean+zero-sum"))
    for seed in range(16):
        (_, _, on_passage), (_, _, found) = (step(criterion, n=1, seed=seed) for criterion in (plain, balanced))
    assert torch.cosine_similarity(found.flatten(), on_passage.flatten(), dim=0) > 0.9


def test_gradients_of_a_micro_batch_that_was_dropped_leave_no_trace_at_any_width() -> None:
    """As one that ran out of memory, at a width that its successor does not have."""

    def gradients(dropped: bool) -> Tensor:
        torch.manual_seed(0)
        criterion = DualBankInfoNCE(bank_size=16)

        def at_width(width: int) -> Tensor:
            queries, positives = torch.randn(2, 3, 8)
            cut = positives[:, :width].clone().requires_grad_()
            criterion(queries[:, :width], cut, whole=criterion.whole(queries, positives)).backward()
            return cut.grad

        at_width(4), at_width(8)
        before, random = criterion.bank.count, torch.get_rng_state()
        if dropped:
            at_width(4)
            criterion.bank.arrivals = None
        assert criterion.bank.count == before
        torch.set_rng_state(random)
        at_width(8)
        return at_width(4)

    assert torch.equal(gradients(dropped=True), gradients(dropped=False))


@pytest.mark.parametrize("correction", ["mean", "mean+zero-sum"])
def test_updates_of_one_sample_train_the_queries(correction: str) -> None:
    """The mean of one sample is the sample: taken off it leaves nothing, and all that is read from the bank would be the present one."""
    criterion = DualBankInfoNCE(20, 0.3, drift_correction=correction)
    for seed in range(16):
        _, on_queries, _ = step(criterion, n=1, seed=seed)
        criterion.after_update()
    assert on_queries.norm() > 0.1


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
    plain = push(DualBankInfoNCE(256, 0.3, drift_correction=None), moved)
    assert torch.cosine_similarity(plain, moved, dim=0) > 0.8
    corrected = push(DualBankInfoNCE(256, 0.3, drift_correction="mean"), moved)
    assert corrected[0] < 0.3 * plain[0]
    assert push(DualBankInfoNCE(256, 0.3, drift_correction="mean+zero-sum"), moved).norm() < 0.1 * plain.norm()


def test_nothing_balances_a_bank_of_passages_alone_but_zero_sum() -> None:
    """Even without any drift all passages are pulled towards the queries."""
    stays = torch.zeros(D)
    stays[0] = 2.0

    def pull(correction: str | None, queries: int) -> float:
        criterion = DualBankInfoNCE(64, 0.3, query_bank_size=queries, drift_correction=correction, gradient_scale="in-batch")
        pulls = []
        for seed in range(120):
            pulls.append(-step(criterion, query_mean=stays, seed=seed)[2].sum((0, 1))[0])
            if seed % 4 == 3:
                criterion.after_update()
        return float(torch.stack(pulls[60:]).mean())

    assert pull(None, queries=0) > 0.3
    assert abs(pull(None, queries=64)) < 0.3 * pull(None, queries=0)
    assert abs(pull("mean+zero-sum", queries=0)) < 0.01


@pytest.mark.parametrize(
    ("options", "resolved"),
    [
        ({}, "mean+zero-sum"),
        ({"bank_size": "auto"}, "mean+zero-sum"),
        ({"query_bank_size": 3}, "mean+zero-sum"),
        ({"query_bank_stop_update": 2}, "mean+zero-sum"),
        ({"query_bank_size": 0}, "mean+zero-sum"),
        ({"clear_after_update": True}, None),
        ({"bank_size": 0}, None),
        ({"drift_correction": None}, None),
        ({"drift_correction": "mean"}, "mean"),
        ({"drift_correction": "mean", "query_bank_size": 0}, "mean"),
    ],
)
def test_auto_corrects_where_the_bank_holds_vectors_of_older_weights(tiny_encoder, options: dict[str, Any], resolved: str | None) -> None:
    from contaccum import CachedContAccumLoss, ContAccumLoss

    assert DualBankInfoNCE(**options).drift_correction == resolved
    for kind in (ContAccumLoss, CachedContAccumLoss):
        loss = kind(tiny_encoder(), **options)
        assert loss.criterion.drift_correction == resolved
        assert loss.get_config_dict()["drift_correction"] == resolved
