"""The incremental loss equals its definition, loss and gradients, whatever the sizes and options."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contaccum import DualBankInfoNCE
from contaccum.core.corrected_bank import MOST_SCORES
from contaccum.core.infonce import (
    Columns,
    Rows,
    duplicate_mask,
    naive_dual_bank_infonce,
    rounded_to_tf32,
    row_log_sums,
    tensor_cores,
    unit_vectors,
)
from reference import ReferenceInfoNCE

D = 6


def micro_batch(n: int, h: int, seed: int, dtype: torch.dtype, keyed: bool, texts: int = 12) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def vectors(*shape: int) -> Tensor:
        return torch.randn(*shape, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    def keys(*shape: int) -> Tensor | None:
        return torch.randint(texts, shape, generator=generator) if keyed else None

    return {
        "queries": vectors(n),
        "positives": vectors(n),
        "negatives": vectors(n, h) if h else None,
        "query_keys": keys(n),
        "passage_keys": keys(n, 1 + h),
    }


def loss_and_gradients(criterion: Any, batch: dict[str, Tensor | None]) -> tuple[Tensor, list[Tensor]]:
    leaves = [batch[name] for name in ("queries", "positives", "negatives") if batch[name] is not None]
    loss = criterion(**batch)
    return loss.detach(), list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def assert_same_run(options: dict[str, Any], sizes: list[int], h: int, dtype: torch.dtype, keyed: bool, updates_every: int = 3) -> None:
    """Both versions over one run. The reference computes in float64 from the same (rounded) vectors."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    options = {"drift_correction": None, **options}
    criterion, reference = DualBankInfoNCE(**options), ReferenceInfoNCE(**options)
    for step, n in enumerate(sizes):
        batch = micro_batch(n, h, seed=step, dtype=dtype, keyed=keyed)
        exact = {k: v.detach().double().requires_grad_() if v is not None and v.is_floating_point() else v for k, v in batch.items()}
        loss, gradients = loss_and_gradients(criterion, batch)
        expected, expected_gradients = loss_and_gradients(reference, exact)
        assert loss.dtype == dtype
        assert relative_error(loss, expected) < tolerance, f"loss at micro-step {step}"
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert relative_error(gradient, expected_gradient) < tolerance, f"gradient at micro-step {step}"
        if step % updates_every == updates_every - 1:
            criterion.after_update(0.5)
            reference.after_update(0.5)
    assert len(criterion.bank) == len(reference.bank)
    if reference.bank and options["drift_correction"] is None:
        assert torch.allclose(criterion.bank.ages, torch.tensor([t.age for t in reference.bank]))
        assert torch.allclose(criterion.bank.passages.double(), torch.stack([torch.stack(t.passages) for t in reference.bank]))


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    bank_size = draw(st.integers(0, 17))
    sizes = draw(st.lists(st.integers(1, 7), min_size=3, max_size=6))
    while sum(sizes) < 3 * bank_size + max(sizes):  # at least three times around
        sizes = sizes + sizes
    options = {
        "bank_size": bank_size,
        "query_bank_size": draw(st.one_of(st.none(), st.integers(0, bank_size))),
        "similarity": draw(st.sampled_from(["dot", "cosine"])),
        "scale": draw(st.sampled_from([1.0, 0.3, 5.0])),
        "gradient_scale": draw(st.sampled_from(["in-batch", "paper"])),
        "mask_duplicates": draw(st.booleans()),
        "cache_hard_negatives": draw(st.booleans()),
        "drift_correction": draw(st.sampled_from([None, None, "mean", "mean+zero-sum"])),
        "clear_after_update": draw(st.sampled_from([False, False, False, True])),
        "start_update": draw(st.sampled_from([0, 0, 0, 2])),
        "query_bank_stop_update": draw(st.sampled_from([None, None, None, 3])),
    }
    return {"options": options, "sizes": sizes, "h": draw(st.integers(0, 3)), "keyed": draw(st.booleans())}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(run=runs(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_loss_and_gradients_equal_the_reference(run: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_run(dtype=dtype, **run)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("h", [0, 2])
@pytest.mark.parametrize("correction", ["mean", "mean+zero-sum"])
@pytest.mark.parametrize("most_scores", [0, MOST_SCORES])
def test_drift_correction_equals_the_reference(monkeypatch, similarity: str, h: int, correction: str, most_scores: int) -> None:
    """Updates of uneven size, so that the window of the mean changes; several times around the bank. Scores kept and computed."""
    monkeypatch.setattr("contaccum.core.corrected_bank.MOST_SCORES", most_scores)
    options = {"bank_size": 14, "query_bank_size": 9, "similarity": similarity, "scale": 2.0, "drift_correction": correction}
    assert_same_run(options, sizes=[3, 2, 4, 1, 5, 4, 4, 4, 2, 3, 20, 4, 4, 4, 4, 4, 4], h=h, dtype=torch.float64, keyed=True)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("query_bank_size", [None, 23])
def test_larger_bank_with_uneven_micro_batches(similarity: str, query_bank_size: int | None) -> None:
    """Groups of seven slots, micro-batches shorter, as long and longer than a group, a short last group."""
    options = {"bank_size": 45, "query_bank_size": query_bank_size, "similarity": similarity, "scale": 2.0}
    assert_same_run(options, sizes=[3, 7, 16, 1, 5, 7, 14, 2, 30, 8, 8, 8, 45, 60, 3], h=1, dtype=torch.float64, keyed=True)


@pytest.mark.parametrize("correction", [None, "mean"])
def test_bfloat16_bank_equals_the_reference_on_rounded_entries(correction: str | None) -> None:
    options = {"bank_size": 13, "bank_dtype": torch.bfloat16, "drift_correction": correction}
    assert_same_run(options, sizes=[4, 3, 5, 4, 4, 4, 4, 4, 4, 4, 4], h=1, dtype=torch.float32, keyed=True)


def test_naive_definition_equals_the_reference() -> None:
    """The package's own specification and the tests' agree, masks included."""
    batches = [micro_batch(3, 2, seed, torch.float64, keyed=True, texts=6) for seed in range(4)]
    reference = ReferenceInfoNCE(bank_size=7, query_bank_size=5, scale=0.7, gradient_scale="in-batch")
    for batch in batches:
        expected, expected_gradients = loss_and_gradients(reference, batch)
    passages = [torch.cat([b["positives"][:, None], b["negatives"]], 1) for b in batches]
    stacked = {k: torch.cat([b[k] for b in batches]).detach() for k in ("queries", "query_keys", "passage_keys")}
    ids = torch.arange(12)

    def rows(part: slice, queries: Tensor) -> Rows:
        return Rows(queries, ids[part], stacked["query_keys"][part], stacked["passage_keys"][part, 0])

    def columns(part: slice, values: Tensor) -> Columns:
        return Columns(values, ids[part], stacked["query_keys"][part], stacked["passage_keys"][part])

    bank, bank_rows, now = slice(2, 9), slice(4, 9), slice(9, 12)
    loss = naive_dual_bank_infonce(
        rows(now, batches[-1]["queries"]),
        columns(now, passages[-1]),
        rows(bank_rows, stacked["queries"][bank_rows]),
        columns(bank, torch.cat(passages).detach()[bank]),
        scale=0.7,
        gradient_scale="in-batch",
    )
    gradients = torch.autograd.grad(loss, [batches[-1][k] for k in ("queries", "positives", "negatives")])
    assert torch.allclose(loss, expected, rtol=1e-12)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


def test_masks_change_the_loss() -> None:
    """Guards the equalities above against keys that never meet."""
    losses = []
    for mask_duplicates in (True, False):
        criterion = DualBankInfoNCE(bank_size=16, mask_duplicates=mask_duplicates)
        losses.append([criterion(**micro_batch(4, 1, seed, torch.float64, keyed=True)).item() for seed in range(5)])
    assert all(masked < plain for masked, plain in zip(*losses, strict=True))


def test_bank_rows_move_the_passage_tower() -> None:
    """With a query bank the passages' gradient changes and the queries' share of it shrinks with the denominator alone."""
    gradients = {}
    for query_bank_size in (0, 8):
        criterion = DualBankInfoNCE(bank_size=8, query_bank_size=query_bank_size, gradient_scale="in-batch", drift_correction=None)
        for seed in range(3):
            gradients[query_bank_size] = loss_and_gradients(criterion, micro_batch(4, 0, seed, torch.float64, keyed=False))[1]
    assert torch.allclose(gradients[0][0], gradients[8][0], rtol=1e-12)
    assert relative_error(gradients[0][1], gradients[8][1]) > 0.05


def test_tensor_cores_are_asked_for_and_the_setting_comes_back() -> None:
    def setting() -> Any:
        matmul = torch.backends.cuda.matmul
        return matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32

    before = setting()
    assert before not in ("tf32", True)
    entered = tensor_cores()
    entered.__enter__()
    assert setting() in ("tf32", True)
    assert not entered.__exit__(KeyError, KeyError(), None), "an error inside must go on"
    assert setting() == before
    assert torch.get_float32_matmul_precision() == "highest"


def bank_of_unit_vectors(size: int, keyed: bool) -> tuple[Rows, Columns]:
    generator = torch.Generator().manual_seed(0)
    queries, passages = (torch.randn(size, *shape, generator=generator) for shape in ((384,), (2, 384)))
    passages[:, 0] += queries  # positives score high
    keys = torch.randint(size, (size, 3), generator=generator)
    ids = torch.arange(size)
    queries, passages = torch.nn.functional.normalize(queries, dim=-1), torch.nn.functional.normalize(passages, dim=-1)
    if not keyed:
        return Rows(queries, ids), Columns(passages, ids)
    return Rows(queries, ids, keys[:, 0], keys[:, 1]), Columns(passages, ids, keys[:, 0], keys[:, 1:])


def moved(part: Rows | Columns, *where: Any) -> Any:
    """Vectors, keys and ids to a device, vectors to a precision."""
    values = {name: None if value is None else value.to(*where) for name, value in vars(part).items() if name in ("queries", "passages")}
    keys = {name: None if value is None else value.to(where[0]) for name, value in vars(part).items() if name not in values}
    return type(part)(**values, **keys)


def test_tuples_that_share_a_text_are_not_each_others_negatives() -> None:
    """A question that is another row's answer, as among duplicate questions. Keys: one for each text."""
    vectors = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([[0, 1], [1, 2], [3, 0], [4, 5], [6, 4]])  # query and positive of each tuple
    ids = torch.arange(5)
    mask = duplicate_mask(Rows(vectors[0], ids, keys[:, 0], keys[:, 1]), Columns(vectors[1][:, None], ids, keys[:, 0], keys[:, 1:]))
    assert mask is not None
    assert mask[:, :, 0].nonzero().tolist() == [[0, 1], [0, 2], [1, 0], [2, 0], [3, 4], [4, 3]]


@pytest.mark.parametrize("keyed", [False, True])
def test_row_log_sums_are_those_of_the_scaled_scores(keyed: bool) -> None:
    rows, columns = (moved(part, "cpu", torch.float64) for part in bank_of_unit_vectors(300, keyed))
    scores = 20 * torch.einsum("rd,mcd->rmc", rows.queries, columns.passages)
    if keyed:
        texts = torch.stack([rows.query_keys, rows.positive_keys], 1)[:, :, None]
        same = (texts[..., None] == columns.passage_keys).any(1)
        same[:, :, 0] |= (texts == columns.query_keys).any(1)
        same[:, :, 0] &= ~torch.eye(300, dtype=torch.bool)
        assert same.any()
        scores = scores.masked_fill(same, -torch.inf)
    found = row_log_sums(rows, columns, 20.0)
    assert found.dtype == torch.float64
    assert torch.allclose(found, scores.flatten(1).logsumexp(1), rtol=1e-13)


@pytest.mark.parametrize("shape", [(5, 7), (4, 3, 7)])
def test_unit_vectors_are_those_of_normalize_gradients_too(shape: tuple[int, ...]) -> None:
    vectors = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors[0] = 0.0
    weights = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [vectors.clone().requires_grad_() for _ in range(2)]
    for leaf, function in zip(leaves, (unit_vectors, partial(torch.nn.functional.normalize, dim=-1)), strict=True):
        (function(leaf) * weights).sum().backward()
    assert torch.equal(unit_vectors(vectors), torch.nn.functional.normalize(vectors, dim=-1))
    assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-12)


@pytest.mark.parametrize("number", [1.0, -1.0, 3e-39, 1e30, 0.1, -0.7, 1 + 2**-10 - 2**-23, -1 - 2**-10 + 2**-23])
def test_rounding_to_tf32_is_to_the_nearest_of_ten_bits(number: float) -> None:
    given = torch.tensor([number])
    found = rounded_to_tf32(given)
    assert found.view(torch.int32).item() & 0x1FFF == 0
    assert abs(found.item() - given.item()) <= 2**-11 * abs(given.item()) or abs(given.item()) < 1e-38
    assert torch.equal(rounded_to_tf32(found), found)
    assert torch.equal(rounded_to_tf32(given.double()), given.double())


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000], ids=hex)
def test_rounding_to_tf32_keeps_what_is_not_finite(bits: int) -> None:
    """NaN of either sign, as CPUs and as CUDA make them, and with the lowest bit alone; infinity."""
    given = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    before = given.clone()
    assert torch.equal(rounded_to_tf32(given).isnan(), given.isnan())
    assert torch.equal(rounded_to_tf32(given).isinf(), given.isinf())
    assert torch.equal(given.view(torch.int32), before.view(torch.int32)), "the input was changed"


def test_a_nan_vector_gives_nan_log_sums_where_they_are_rounded(monkeypatch) -> None:
    ids = torch.arange(4)
    queries, passages = torch.ones(4, 2), torch.ones(4, 1, 2)
    passages[3, 0, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    monkeypatch.setattr("contaccum.core.infonce.CHUNK_SCORES", 4)
    assert row_log_sums(Rows(queries, ids), Columns(passages, ids), 1.0).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize(("size", "near"), [(1000, 1e-4), (4096, 5e-3)])
def test_row_log_sums_on_cuda_are_close_to_exact_ones(size: int, near: float, keyed: bool) -> None:
    """A large bank's have TF32's precision, without its leaning to one side."""
    rows, columns = bank_of_unit_vectors(size, keyed)
    exact = row_log_sums(moved(rows, "cpu", torch.float64), moved(columns, "cpu", torch.float64), 20.0)
    found = row_log_sums(moved(rows, "cuda"), moved(columns, "cuda"), 20.0)
    assert (found.cpu() - exact).abs().max() < near
    assert (found.cpu() - exact).mean().abs() < near / 20
    in_double = row_log_sums(moved(rows, "cuda", torch.float64), moved(columns, "cuda", torch.float64), 20.0)
    assert (in_double.cpu() - exact).abs().max() < 1e-12
    assert torch.get_float32_matmul_precision() == "highest", "the setting did not come back"
