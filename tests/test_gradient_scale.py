"""Gradients keep the scale of in-batch training whatever the bank holds; the loss is in nats per row. On passages they sum to zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contaccum import DualBankInfoNCE
from contaccum.core.drift import MIN_WINDOW
from reference import ReferenceInfoNCE

D = 32


def steps(n: int) -> int:
    """Micro-steps of an update, which has 16 samples at least: the correction's mean is over no fewer."""
    return max(4, 16 // n)


def frozen_update(criterion: DualBankInfoNCE, n: int, h: int, seed: int) -> tuple[float, float]:
    """Gradient norm of two linear towers over one update, and its mean loss. The weights are the same each time."""
    weights = torch.randn(2, D, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).div(D**0.5).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for _ in range(steps(n)):
        texts = torch.randn(n, 2 + h, D, generator=generator, dtype=torch.float64)
        queries = texts[:, 0] @ weights[0]
        positives = (texts[:, 0] + 0.5 * texts[:, 1]) @ weights[1]
        total = total + criterion(queries, positives, texts[:, 2:] @ weights[1] if h else None) / steps(n)
    criterion.after_update()
    (gradient,) = torch.autograd.grad(total, weights)
    return float(gradient.norm()), float(total.detach())


@pytest.mark.parametrize(("n", "h"), [(1, 1), (2, 0), (8, 0), (8, 1), (32, 0)])
@pytest.mark.parametrize("options", [{"drift_correction": None}, {}])
def test_norm_of_the_first_update_and_of_the_fiftieth(n: int, h: int, options: dict[str, Any]) -> None:
    criterion = DualBankInfoNCE(bank_size=8 * steps(n) * n, scale=5.0, similarity="cosine", **options)
    norms = [frozen_update(criterion, n, h, seed)[0] for seed in range(50)]
    assert len(criterion.bank) == 8 * steps(n) * n
    assert norms[49] == pytest.approx(norms[0], rel=0.2)


def test_the_papers_gradients_shrink_as_the_bank_fills() -> None:
    """Guards the test above: without the scale the norm falls about as the rows grow."""
    criterion = DualBankInfoNCE(bank_size=256, scale=5.0, similarity="cosine", gradient_scale="paper", drift_correction=None)
    norms = [frozen_update(criterion, 8, 0, seed)[0] for seed in range(50)]
    assert norms[49] < 0.1 * norms[0]


def test_the_scales_differ_by_the_rows_and_the_loss_does_not() -> None:
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for scale in ("in-batch", "paper"):
        criterion = DualBankInfoNCE(bank_size=24, gradient_scale=scale, drift_correction=None)
        for seed in range(4):
            vectors = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
            loss = criterion(vectors[0], vectors[1])
        found[scale] = loss.detach(), torch.autograd.grad(loss, vectors)[0]
    assert found["in-batch"][0] == found["paper"][0]
    torch.testing.assert_close(found["in-batch"][1], found["paper"][1] * (8 + 24) / 8)


def test_the_scale_holds_while_banks_are_switched() -> None:
    """The bank begins at update 10; its queries leave at update 30."""
    criterion = DualBankInfoNCE(bank_size=256, scale=5.0, similarity="cosine", start_update=10, query_bank_stop_update=30)
    norms = [frozen_update(criterion, 8, 0, seed)[0] for seed in range(50)]
    assert max(norms[:30]) < 1.2 * min(norms[:30])
    assert max(norms) < 2 * min(norms)  # without banked queries the passages' gradients are fewer, not of another scale


def test_a_full_bank_gives_the_loss_of_as_large_a_batch() -> None:
    """In a frozen model a micro-batch with its bank is one large batch: nats per row, as `MultipleNegativesRankingLoss` would log."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 64, D, generator=generator, dtype=torch.float64)
    criterion = DualBankInfoNCE(bank_size=56, drift_correction=None)
    losses = [criterion(*(part.requires_grad_() for part in vectors[:, i : i + 8].clone())) for i in range(0, 64, 8)]
    scores = vectors[0] @ vectors[1].T
    torch.testing.assert_close(losses[-1].detach(), torch.nn.functional.cross_entropy(scores, torch.arange(64)))


@pytest.mark.parametrize("n_total", [128, 8])
def test_a_short_last_update_does_not_shrink_the_window(n_total: int) -> None:
    """One row left over at an epoch's end: what is stored next is centred on the mean of a whole update all the same."""
    criterion = DualBankInfoNCE(bank_size=256, scale=5.0, similarity="cosine")

    def update(rows: int, seed: int) -> None:
        for _ in range(max(1, rows // 8)):
            vectors = torch.randn(2, min(8, rows), D, generator=torch.Generator().manual_seed(seed)) + 1.0
            criterion(*(part.requires_grad_() for part in vectors))
        criterion.after_update()

    for seed in range(3):
        update(n_total, seed)
    means = criterion.bank.means
    assert means is not None
    window = max(n_total, MIN_WINDOW)
    assert means.window == window
    update(1, 3)
    assert means.window == window
    again = DualBankInfoNCE(bank_size=256, scale=5.0, similarity="cosine")
    again.load_state_dict(criterion.state_dict())
    assert again.bank.means is not None
    again.after_update()
    assert again.bank.means.window == window


def test_a_skipped_update_does_not_widen_the_window() -> None:
    """Its samples were counted with those of the next update, which then was the largest so far."""
    criterion = DualBankInfoNCE(bank_size=256, scale=5.0, similarity="cosine")
    for skipped in (True, True, False, True, False):
        for seed in range(4):
            vectors = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(seed))
            criterion(*(part.requires_grad_() for part in vectors))
        criterion.after_skipped_update() if skipped else criterion.after_update()
    means = criterion.bank.means
    assert (means.window, len(criterion.bank), criterion.updates) == (32, 160, 2)


def zero_sum_step(criterion: Any, n: int, h: int, seed: int, bad: float | None = None) -> list[Tensor]:
    """Loss of a micro-step of random vectors and its gradients on queries, positives and, all at once, hard negatives."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(n, *shape, D, generator=generator, dtype=torch.float64).add(0.3) for shape in ((), (), (h,))[: 3 if h else 2]]
    if bad is not None:
        leaves[1][0, 3] = bad
    for leaf in leaves:
        leaf.requires_grad_()
    loss = criterion(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def balanced(**options: Any) -> DualBankInfoNCE:
    return DualBankInfoNCE(**{"bank_size": 24, "scale": 0.2, "drift_correction": "mean+zero-sum", **options})


def common(criterion: DualBankInfoNCE) -> Tensor:
    return criterion.state_dict()[f"banks.0.pushes.{D}._mean"].clone()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("h", [0, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_the_smallest_micro_batches_lose_their_running_mean_as_the_reference_says(n: int, h: int, similarity: str) -> None:
    options = {"bank_size": 12, "similarity": similarity, "scale": 2.0, "drift_correction": "mean+zero-sum"}
    criterion, reference = DualBankInfoNCE(**options), ReferenceInfoNCE(**options)
    for seed in range(24):
        for found, expected in zip(zero_sum_step(criterion, n, h, seed), zero_sum_step(reference, n, h, seed), strict=True):
            torch.testing.assert_close(found, expected)
        if seed % 6 == 5:
            criterion.after_update()
            reference.after_update()
    assert reference.window == MIN_WINDOW == 16  # updates of 6 or 12 samples are too few for a mean
    torch.testing.assert_close(common(criterion), reference.push[D][0])


@pytest.mark.parametrize("h", [0, 2])
@pytest.mark.parametrize(("n", "sums_to_zero"), [(4, False), (16, True), (20, True)])
def test_gradients_of_a_micro_step_as_large_as_the_window_sum_to_zero(n: int, sums_to_zero: bool, h: int) -> None:
    criterion = balanced()
    for seed in range(8):
        zero_sum_step(criterion, 8, h, seed)
        if seed % 2:
            criterion.after_update()
    _, _, *on_passages = zero_sum_step(criterion, n, h, seed=99)
    total = sum(gradient.reshape(-1, D).sum(0) for gradient in on_passages)
    assert bool(total.norm() < 1e-12) == sums_to_zero


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_gradients_that_are_not_finite_stay_as_they_are_and_leave_the_running_mean_alone(bad: float) -> None:
    """The vectors of the last case are finite: they enter the bank, and only their gradients overflow."""
    criterion, plain = balanced(scale=1e150), DualBankInfoNCE(bank_size=24, scale=1e150, drift_correction="mean")
    for seed in range(3):
        for each in (criterion, plain):
            zero_sum_step(each, 4, 1, seed)
    before = common(criterion)
    assert before.norm() > 0
    found, expected = (zero_sum_step(each, 4, 1, seed=9, bad=bad) for each in (criterion, plain))
    assert not all(gradient.isfinite().all() for gradient in found)
    for gradient, as_it_was in zip(found, expected, strict=True):
        assert torch.equal(gradient.nan_to_num(7.0), as_it_was.nan_to_num(7.0))
    assert torch.equal(common(criterion), before)
    assert criterion.bank.count == (16 if bad == 1e200 else 12)


def test_a_micro_batch_that_is_dropped_before_it_enters_leaves_the_running_mean_alone() -> None:
    """As where memory runs out in its backward pass: its halves follow."""
    criterion, undisturbed = balanced(), balanced()
    for seed in range(6):
        if seed == 3:
            assert criterion.bank.count == 12
            zero_sum_step(criterion, 8, 1, seed=99)
            criterion.bank.arrivals = None
        found, expected = (zero_sum_step(each, 4, 1, seed) for each in (criterion, undisturbed))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_a_saved_running_mean_goes_on_bit_equal(n: int) -> None:
    criterion, again = balanced(), balanced()
    for seed in range(9):
        zero_sum_step(criterion, n, 1, seed)
        if seed % 4 == 3:
            criterion.after_update()
    again.load_state_dict(criterion.state_dict())
    assert common(again).dtype == torch.float64
    for seed in range(9, 18):
        found, expected = (zero_sum_step(each, n, 1, seed) for each in (again, criterion))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        if seed % 4 == 3:
            criterion.after_update()
            again.after_update()
    assert torch.equal(common(again), common(criterion))


def test_a_cleared_bank_forgets_the_running_mean_and_a_released_one_its_memory() -> None:
    criterion = balanced()
    first = zero_sum_step(criterion, 2, 1, 0)
    zero_sum_step(criterion, 2, 1, 1)
    assert common(criterion).norm() > 0
    criterion.bank.clear()
    assert common(criterion).norm() == 0
    assert all(torch.equal(a, b) for a, b in zip(zero_sum_step(criterion, 2, 1, 0), first, strict=True))
    criterion.reset()
    assert f"banks.0.pushes.{D}._mean" not in criterion.state_dict()
