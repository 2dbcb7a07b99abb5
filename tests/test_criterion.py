"""`DualBankInfoNCE` in a training loop: when the bank is read and written, what a bad micro-batch does, exact resume, clear errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from contaccum import DualBank, DualBankInfoNCE

D = 8


def batch(n: int = 4, seed: int = 0, h: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, D, generator=generator).to(dtype).requires_grad_() for shape in ((n,), (n,), (n, h))]


def contents(bank: DualBank) -> list[Tensor]:
    return [bank.queries, bank.passages, bank.ages]


def assert_same_contents(bank: DualBank, expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(contents(bank), expected, strict=True))


def test_bank_of_zero_is_in_batch_infonce() -> None:
    criterion = DualBankInfoNCE(bank_size=0)
    for seed in range(3):
        queries, positives, negatives = batch(seed=seed)
        scores = queries @ torch.cat([positives, negatives[:, 0]]).T
        expected = F.cross_entropy(scores, torch.arange(4))
        loss = criterion(queries, positives, negatives)
        assert torch.allclose(loss, expected, rtol=1e-6)
        for leaf in (queries, positives, negatives):
            (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            (expected_gradient,) = torch.autograd.grad(expected, leaf, retain_graph=True)
            assert torch.allclose(gradient, expected_gradient, atol=1e-6)
    assert len(criterion.bank) == 0


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_evaluation_neither_reads_nor_writes_the_bank(mode: str) -> None:
    criterion, in_batch = DualBankInfoNCE(bank_size=8), DualBankInfoNCE(bank_size=0)
    for seed in range(3):
        criterion(*batch(seed=seed))
    before = contents(criterion.bank)
    criterion.train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"):
        assert criterion(*batch(seed=9)) == in_batch(*batch(seed=9))
    assert_same_contents(criterion.bank, before)
    criterion.train()
    assert criterion(*batch(seed=9)) != in_batch(*batch(seed=9))


def test_two_forwards_before_one_backward() -> None:
    """The second forward overwrites what the first one read."""
    apart, together = DualBankInfoNCE(bank_size=4), DualBankInfoNCE(bank_size=4)
    batches = [batch(seed=seed) for seed in range(4)]
    expected = [torch.autograd.grad(apart(*b), b) for b in batches]
    torch.stack([together(*b) for b in batches]).sum().backward()
    for b, gradients in zip(batches, expected, strict=True):
        assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(b, gradients, strict=True))


def test_gradient_never_reaches_the_bank() -> None:
    criterion = DualBankInfoNCE(bank_size=16)
    first, second = batch(seed=1), batch(seed=2)
    criterion(*first)
    criterion(*second).backward()
    assert all(leaf.grad is None for leaf in first)
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in second)
    assert not any(buffer.requires_grad for buffer in criterion.bank.buffers())


def test_bank_is_first_in_first_out_per_tuple() -> None:
    criterion = DualBankInfoNCE(bank_size=6, query_bank_size=3, drift_correction=None)
    batches = [batch(n, seed=n) for n in (4, 1, 5)]
    for b in batches:
        criterion(*b)
    queries, positives = (torch.cat([b[i] for b in batches]) for i in (0, 1))
    assert torch.equal(criterion.bank.passages[:, 0], positives[-6:])
    assert torch.equal(criterion.bank.queries, queries[-3:])


def test_micro_batch_larger_than_the_bank_leaves_its_newest_tuples() -> None:
    criterion = DualBankInfoNCE(bank_size=3, drift_correction=None)
    queries, positives, negatives = batch(7)
    criterion(queries, positives, negatives)
    assert torch.equal(criterion.bank.queries, queries[-3:])
    assert torch.equal(criterion.bank.passages, torch.cat([positives[:, None], negatives], 1)[-3:])


def test_ages_count_peak_lr_updates() -> None:
    criterion = DualBankInfoNCE(bank_size=8)
    for lr_fraction in (1.0, 0.5, 0.25):
        criterion(*batch(2))
        criterion.after_update(lr_fraction)
    assert criterion.bank.ages.tolist() == [1.75, 1.75, 0.75, 0.75, 0.25, 0.25]


def test_without_past_encoder_the_bank_is_empty_after_an_update() -> None:
    criterion = DualBankInfoNCE(bank_size=8, clear_after_update=True)
    criterion(*batch(seed=0))
    assert len(criterion.bank) == 4
    criterion.after_update()
    assert len(criterion.bank) == 0
    assert torch.equal(criterion(*batch(seed=1)), DualBankInfoNCE(bank_size=0)(*batch(seed=1)))


@pytest.mark.parametrize("correction", [None, "mean+zero-sum"])
def test_query_bank_switched_off_becomes_prebatch(correction: str | None) -> None:
    dual = DualBankInfoNCE(bank_size=8, query_bank_stop_update=1, drift_correction=correction)
    passages_only = DualBankInfoNCE(bank_size=8, query_bank_size=0, drift_correction=correction)
    losses = [[], []]
    for seed in range(4):
        for criterion, seen in ((dual, losses[0]), (passages_only, losses[1])):
            seen.append(criterion(*batch(seed=seed)).item())
            if seed == 1:
                criterion.after_update()
    assert losses[0][1] != losses[1][1]
    assert losses[0][2:] == losses[1][2:]
    assert len(dual.bank.queries) == 0
    if correction:
        assert dual.bank.kept.scores is None, "no row is left to score"


def test_reset_is_as_new() -> None:
    criterion = DualBankInfoNCE(bank_size=8, query_bank_stop_update=1)
    first = [criterion(*batch(seed=seed)).item() for seed in range(3)]
    criterion.after_update()
    criterion.reset()
    assert len(criterion.bank) == 0
    assert criterion.updates == 0
    assert [criterion(*batch(seed=seed)).item() for seed in range(3)] == first
    wide = [torch.randn(4, D + 1) for _ in range(2)]
    criterion.reset()
    criterion(*wide)  # another width is fine after a reset


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_gives_a_float32_loss(dtype: torch.dtype) -> None:
    """What arrives is rounded; what is computed from it is not."""
    half, full = DualBankInfoNCE(bank_size=8), DualBankInfoNCE(bank_size=8)
    for seed in range(4):
        rounded = batch(seed=seed, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = half(*rounded)
        expected = full(*[leaf.detach().float() for leaf in rounded])
        assert loss.dtype == torch.float32
        assert loss == expected
        loss.backward()
        assert rounded[0].grad.dtype == dtype
    assert half.bank.queries.dtype == torch.float32


def test_bfloat16_bank_takes_half_the_bytes() -> None:
    sizes = {}
    for dtype in (None, torch.bfloat16):
        criterion = DualBankInfoNCE(bank_size=64, bank_dtype=dtype)
        criterion(*batch())
        sizes[dtype] = criterion.bank.state_dict()["_queries"].element_size()
    assert sizes == {None: 4, torch.bfloat16: 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("before", [1, 5])
@pytest.mark.parametrize("drift_correction", [None, "mean", "mean+zero-sum"])
def test_micro_batch_that_is_not_finite_does_not_enter(bad: float, where: int, before: int, drift_correction: str | None) -> None:
    """Bank, means and losses go on as if it had never been, with the bank full or not."""
    criterion, undisturbed = (DualBankInfoNCE(bank_size=10, drift_correction=drift_correction) for _ in range(2))
    for seed in range(before + 6):
        if seed == before:
            poisoned = batch(seed=99)
            with torch.no_grad():
                poisoned[where].view(-1, D)[2, 3] = bad
            held = contents(criterion.bank)
            criterion(*poisoned)
            assert_same_contents(criterion.bank, held)
        loss = criterion(*batch(seed=seed))
        assert torch.isfinite(loss)
        assert loss == undisturbed(*batch(seed=seed))


RESUME = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_criterion import losses_and_gradients
from contaccum import DualBankInfoNCE
criterion = DualBankInfoNCE(bank_size=20, query_bank_size=15, bank_dtype={dtype}, drift_correction={drift!r})
criterion.load_state_dict(torch.load({state!r}, weights_only=True))
torch.save((losses_and_gradients(criterion, range(7, 20)), criterion.bank.ages), {out!r})
"""


def losses_and_gradients(criterion: DualBankInfoNCE, seeds: range) -> list[Tensor]:
    """A run with masks, uneven micro-batches and updates."""
    seen = []
    for seed in seeds:
        leaves = batch(n=2 + seed % 4, seed=seed)
        keys = torch.arange(2 * len(leaves[0])).view(-1, 2) + seed % 3
        loss = criterion(*leaves, query_keys=keys[:, 0], passage_keys=keys)
        seen += [loss.detach(), *torch.autograd.grad(loss, leaves)]
        if seed % 2:
            criterion.after_update(1 / (1 + seed))
    return seen


@pytest.mark.parametrize(("dtype", "drift"), [(None, None), (torch.bfloat16, None), (None, "mean"), (torch.bfloat16, "auto")])
def test_resume_in_a_new_process_is_bit_equal(tmp_path: Path, dtype: torch.dtype | None, drift: str | None) -> None:
    criterion = DualBankInfoNCE(bank_size=20, query_bank_size=15, bank_dtype=dtype, drift_correction=drift)
    losses_and_gradients(criterion, range(7))
    state, out = tmp_path / "state.pt", tmp_path / "out.pt"
    torch.save(criterion.state_dict(), state)
    script = RESUME.format(tests=str(Path(__file__).parent), state=str(state), out=str(out), dtype=dtype, drift=drift)
    subprocess.run([sys.executable, "-c", script], check=True)
    resumed, ages = torch.load(out)
    expected = losses_and_gradients(criterion, range(7, 20))
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))
    assert torch.equal(ages, criterion.bank.ages)


def test_kept_scores_follow_the_bank_and_are_no_part_of_its_state() -> None:
    """What is asked for the state computes them from its vectors, as whoever loads it does."""
    criterion = DualBankInfoNCE(bank_size=20, query_bank_size=15)
    losses_and_gradients(criterion, range(12))
    kept = criterion.bank.kept
    assert kept.count == criterion.bank.count - 5, "the last micro-batch has entered, and nothing has read it"
    assert kept.scores.shape == (15, 20, 2)
    assert kept.scores.nbytes <= criterion.bank.nbytes
    assert not any("scores" in name for name in criterion.state_dict())
    assert kept.scores is None
    criterion(*batch(n=2, seed=90), query_keys=torch.arange(2), passage_keys=torch.arange(4).view(2, 2))
    assert kept.scores is not None
    criterion.scale = 1.0
    assert kept.scores is not None, "a schedule that has come to its end assigns the same again and again"
    criterion.scale = 2.0
    assert kept.scores is None


@pytest.mark.parametrize(("similarity", "scale"), [("dot", 0.25), ("cosine", 5.0)])
@pytest.mark.parametrize("drift", ["mean", "mean+zero-sum"])
def test_scores_rounded_to_tf32_leave_loss_and_gradients_within_its_error(monkeypatch, drift: str, similarity: str, scale: float) -> None:
    """Between entries of a bank too large for one block of scores. These are 5 at most here, and ten bits are half a thousandth of that."""
    monkeypatch.setattr("contaccum.core.corrected_bank.MOST_SCORES", 0)

    def run() -> list[Tensor]:
        return losses_and_gradients(DualBankInfoNCE(bank_size=32, drift_correction=drift, similarity=similarity, scale=scale), range(20))

    exact = run()
    monkeypatch.setattr("contaccum.core.infonce.CHUNK_SCORES", 64)
    rounded = run()
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(rounded, exact, strict=True)]
    assert max(errors) < 5 * 2**-11
    assert max(errors) > 1e-6, "nothing was rounded"


def test_state_of_an_unused_bank_empties_a_used_one() -> None:
    unused, used = DualBankInfoNCE(bank_size=8), DualBankInfoNCE(bank_size=8)
    used(*batch())
    used.load_state_dict(unused.state_dict())
    assert len(used.bank) == 0
    assert torch.equal(used(*batch(seed=1)), unused(*batch(seed=1)))


def test_drift_correction_moves_the_bank_with_the_encoder() -> None:
    """All vectors shift by a constant after the first micro-batches: corrected entries follow, uncorrected ones do not."""
    shift = 5.0 * torch.ones(D)
    plain, corrected = (DualBankInfoNCE(bank_size=64, drift_correction=correction) for correction in (None, "mean"))
    for seed in range(12):
        queries, positives, negatives = (leaf.detach() + (shift if seed >= 8 else 0) for leaf in batch(seed=seed))
        for criterion in (plain, corrected):
            criterion(queries, positives, negatives)
            if seed % 4 == 3:
                criterion.after_update()
    oldest = slice(0, 4)  # from before the shift
    assert (plain.bank.queries[oldest].mean() - 5.0).abs() > 4.0
    assert (corrected.bank.queries[oldest].mean() - 5.0).abs() < 1.0


def test_a_bank_of_automatic_size_takes_the_size_it_is_told_and_no_other_once_it_is_in_use() -> None:
    criterion = DualBankInfoNCE(bank_size="auto")
    assert criterion.bank.size == criterion.bank.query_size == 1024
    criterion.resize_bank(6)
    criterion(*batch(4))
    with pytest.raises(ValueError, match=re.escape("the bank holds 4 tuples and cannot become one of 8; call reset()")):
        criterion.resize_bank(8)
    criterion(*batch(4))
    assert len(criterion.bank) == criterion.bank.size == criterion.bank.query_size == 6
    criterion.reset()
    criterion.resize_bank(8)
    assert criterion.bank.size == 8


def test_a_bank_of_automatic_size_holds_no_more_queries_than_passages() -> None:
    criterion = DualBankInfoNCE(bank_size="auto", query_bank_size=2048)
    criterion.resize_bank(4096)
    assert criterion.bank.query_size == 2048
    criterion.resize_bank(64)
    assert criterion.bank.query_size == 64


@pytest.mark.parametrize("nested", [False, True])
def test_a_bank_of_automatic_size_takes_that_of_a_loaded_state(nested: bool) -> None:
    saved, auto, fixed = DualBankInfoNCE(bank_size=6), DualBankInfoNCE(bank_size="auto"), DualBankInfoNCE(bank_size=1024)
    saved(*batch(5))
    saved(*batch(5, seed=1))
    if nested:  # as part of a larger module
        torch.nn.ModuleList([auto]).load_state_dict(torch.nn.ModuleList([saved]).state_dict())
    else:
        auto.load_state_dict(saved.state_dict())
    assert_same_contents(auto.bank, contents(saved.bank))
    assert torch.equal(auto(*batch(seed=2)), saved(*batch(seed=2)))
    with pytest.raises(ValueError, match="the saved bank holds 6 tuples and 6 queries, this one 1024 and 1024"):
        fixed.load_state_dict(saved.state_dict())


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DualBankInfoNCE(bank_size=-1), "bank_size=-1 is negative; use 0 for no bank"),
        (lambda: DualBankInfoNCE(bank_size=4, query_bank_size=5), "query_bank_size=5 must lie between 0 and bank_size=4"),
        (lambda: DualBankInfoNCE(bank_size=4, query_bank_size=-1), "query_bank_size=-1 must lie between 0 and bank_size=4"),
        (lambda: DualBankInfoNCE(similarity="euclid"), "similarity='euclid' is unknown; choose one of dot, cosine"),
        (lambda: DualBankInfoNCE(gradient_scale="sum"), "gradient_scale='sum' is unknown; choose one of in-batch, paper"),
        (lambda: DualBankInfoNCE(scale=0.0), "scale=0.0 must be a positive number"),
        (lambda: DualBankInfoNCE(scale=torch.tensor(1.0)), "learnable scale"),
        (
            lambda: DualBankInfoNCE(drift_correction="none"),
            "drift_correction='none' is unknown; choose one of auto, mean+zero-sum, mean, or None for the paper's way",
        ),
        (lambda: DualBankInfoNCE(bank_size="large"), "bank_size='large' is not a number of tuples; give one, or \"auto\""),
        (lambda: DualBankInfoNCE(start_update=-3), "start_update=-3 is negative"),
        (lambda: DualBankInfoNCE(start_update="3"), "start_update='3' is not a whole number; give one"),
        (lambda: DualBankInfoNCE(bank_size=True), "bank_size=True is not a whole number"),
        (lambda: DualBankInfoNCE(query_bank_size=1.5), "query_bank_size=1.5 is not a whole number"),
        (lambda: DualBankInfoNCE(scale="20"), "scale='20' must be a positive number"),
        (lambda: DualBankInfoNCE(scale=None), "scale=None must be a positive number"),
        (lambda: DualBankInfoNCE(bank_dtype="bfloat16"), "bank_dtype='bfloat16' cannot hold vectors; use torch.float32"),
        (lambda: DualBankInfoNCE(bank_dtype=torch.int8), "bank_dtype=torch.int8 cannot hold vectors"),
        (lambda: DualBankInfoNCE(bank_dtype=torch.float64), "bank_dtype=torch.float64 cannot hold vectors"),
        (lambda: DualBankInfoNCE()(zeros(4), zeros(4)), "queries must be floating-point vectors (n, d) with n > 0"),
        (lambda: DualBankInfoNCE()(zeros(0, 3), zeros(0, 3)), "(0, 3)"),
        (lambda: DualBankInfoNCE()(zeros(4, 3), zeros(5, 3)), "positives must be (n, d) = (4, 3) as the queries are, not torch.float32 of"),
        (lambda: DualBankInfoNCE()(zeros(4, 3), zeros(4, 2)), "shape (4, 2)"),
        (lambda: DualBankInfoNCE()(zeros(4, 3), zeros(4, 3), zeros(4, 3)), "negatives must be (n, h, d) = (4, h, 3)"),
        (
            lambda: DualBankInfoNCE()(zeros(4, 3), zeros(4, 3), query_keys=torch.zeros(3, dtype=torch.int64)),
            "query_keys must be int64 of shape (4,)",
        ),
        (
            lambda: DualBankInfoNCE()(zeros(4, 3), zeros(4, 3), passage_keys=zeros(4, 1)),
            "passage_keys must be int64 of shape (4, 1): one key per text, not torch.float32",
        ),
        (lambda: DualBankInfoNCE().after_update(-1), "lr_fraction=-1 must be"),
    ],
)
def test_user_mistakes_name_the_value_and_the_remedy(call, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((zeros(4, D + 1), zeros(4, D + 1), zeros(4, 1, D + 1)), "width 9 do not fit the bank, which holds width 8; call reset()"),
        ((zeros(4, D), zeros(4, D), zeros(4, 2, D)), "2 hard negatives per query do not fit the bank, which holds 1"),
        ((zeros(4, D), zeros(4, D), zeros(4, 1, D), torch.arange(4)), "query_keys were given now but not given for the tuples in the bank"),
    ],
)
def test_a_micro_batch_that_does_not_fit_the_bank_is_refused_and_leaves_it_alone(second: tuple[Tensor, ...], message: str) -> None:
    criterion = DualBankInfoNCE(bank_size=16)
    criterion(*batch())
    held = contents(criterion.bank)
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion(*[t.requires_grad_() if t.is_floating_point() else t for t in second])
    assert_same_contents(criterion.bank, held)


def test_saved_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the saved bank holds 4 tuples and 4 queries, this one 8 and 2"):
        DualBankInfoNCE(bank_size=8, query_bank_size=2).load_state_dict(DualBankInfoNCE(bank_size=4).state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("correction", [None, "auto"])
def test_cuda_equals_cpu_and_never_waits_for_the_device(correction: str | None) -> None:
    """`set_sync_debug_mode` makes any blocking call of PyTorch an error."""
    cpu, cuda = (DualBankInfoNCE(bank_size=50, drift_correction=correction) for _ in range(2))
    batches = [batch(n=8, seed=seed) for seed in range(30)]
    moved = [[leaf.detach().cuda().requires_grad_() for leaf in b] for b in batches]
    keys = [torch.randint(100, (8, 2)) for _ in batches]
    moved_keys = [k.cuda() for k in keys]
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = []
        for b, k in zip(moved, moved_keys, strict=True):
            losses.append(cuda(*b, query_keys=k[:, 0], passage_keys=k))
            losses[-1].backward()
            cuda.after_update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for b, b_cuda, k, loss in zip(batches, moved, keys, losses, strict=True):
        expected = cpu(*b, query_keys=k[:, 0], passage_keys=k)
        expected.backward()
        cpu.after_update()
        assert torch.allclose(loss.cpu(), expected, rtol=1e-5)
        for leaf, leaf_cuda in zip(b, b_cuda, strict=True):
            assert torch.allclose(leaf_cuda.grad.cpu(), leaf.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("correction", [None, "auto"])
def test_state_loaded_on_the_cpu_goes_on_on_the_gpu(correction: str | None) -> None:
    cpu, cuda = (DualBankInfoNCE(bank_size=10, drift_correction=correction) for _ in range(2))
    for seed in range(5):
        cpu(*batch(seed=seed))
    cuda.load_state_dict(cpu.state_dict())
    loss = cuda(*[leaf.detach().cuda().requires_grad_() for leaf in batch(seed=7)])
    assert torch.allclose(loss.cpu(), cpu(*batch(seed=7)), rtol=1e-5)
