"""Directions, harder negatives, negatives left out and several widths equal the reference, loss and gradients, with a bank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from contaccum import DualBankInfoNCE
from reference import ReferenceInfoNCE
from test_infonce import D, loss_and_gradients, micro_batch, relative_error

FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
COMPARISONS: list[dict[str, Any]] = [
    SYMMETRIC,
    {"directions": FOUR},
    {"directions": ("query_to_doc", "query_to_query")},
    {"directions": ("query_to_doc", "doc_to_doc")},
    {"directions": ("doc_to_query", "query_to_doc")},
    *({"hardness_mode": mode, "hardness_strength": 3.0} for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")),
    {"margin": 0.1},
    {"margin": -0.1, "directions": FOUR},
    {"margin": 0.3, "margin_strategy": "relative", "hardness_mode": "all_negatives", "hardness_strength": 2.0, **SYMMETRIC},
]
SIZES = [3, 2, 4, 1, 5, 4, 4, 2, 3, 9, 4]


def compare(options: dict[str, Any], h: int = 1, keyed: bool = True, guided: bool = False, sizes: list[int] = SIZES) -> int:
    """Both versions over one run; how many negatives were left out as too similar."""
    criterion, reference = DualBankInfoNCE(**options), ReferenceInfoNCE(**options)
    counts: list[int] = []
    criterion.observers.append(lambda step: counts.append(0 if step.blocks.left_out is None else int(step.blocks.left_out)))
    total = 0
    for step, n in enumerate(sizes):
        batch: dict[str, Any] = micro_batch(n, h, seed=step, dtype=torch.float64, keyed=keyed)
        if guided and options.get("margin") is not None:
            generator = torch.Generator().manual_seed(step)
            batch["guide"] = tuple(torch.randn(*shape, 4, generator=generator, dtype=torch.float64) for shape in ((n,), (n, 1 + h)))
        loss, gradients = loss_and_gradients(criterion, batch)
        expected, expected_gradients = loss_and_gradients(reference, batch)
        assert relative_error(loss, expected) < 1e-10, f"loss at micro-step {step}"
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert relative_error(gradient, expected_gradient) < 1e-10, f"gradient at micro-step {step}"
        assert counts[-1] == reference.left_out
        total += counts[-1]
        if step % 3 == 2:
            criterion.after_update(0.5), reference.after_update(0.5)
    assert len(criterion.bank) == len(reference.bank)
    return total


@pytest.mark.parametrize("correction", [None, "mean", "mean+zero-sum"])
@pytest.mark.parametrize("comparison", COMPARISONS, ids=str)
def test_loss_and_gradients_equal_the_reference(comparison: dict[str, Any], correction: str | None) -> None:
    similarity = "dot" if correction == "mean" else "cosine"
    left_out = compare({"bank_size": 10, "scale": 2.0, "similarity": similarity, "drift_correction": correction, **comparison})
    assert (left_out > 0) == ("margin" in comparison)


@pytest.mark.parametrize("correction", [None, "mean"])
@pytest.mark.parametrize("comparison", COMPARISONS[-3:], ids=str)
def test_a_guide_says_which_negatives_are_left_out(comparison: dict[str, Any], correction: str | None) -> None:
    options = {"bank_size": 10, "query_bank_size": 7, "similarity": "cosine", "drift_correction": correction, **comparison}
    assert compare(options, guided=True) > 0


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    bank_size = draw(st.integers(0, 12))
    options = {
        "bank_size": bank_size,
        "query_bank_size": draw(st.one_of(st.none(), st.integers(0, bank_size))),
        "similarity": draw(st.sampled_from(["dot", "cosine"])),
        "scale": draw(st.sampled_from([1.0, 5.0])),
        "gradient_scale": draw(st.sampled_from(["in-batch", "paper"])),
        "mask_duplicates": draw(st.booleans()),
        "cache_hard_negatives": draw(st.booleans()),
        "drift_correction": draw(st.sampled_from([None, "mean", "mean+zero-sum"])),
        "clear_after_update": draw(st.sampled_from([False, False, True])),
        "query_bank_stop_update": draw(st.sampled_from([None, None, 2])),
        **draw(st.sampled_from(COMPARISONS)),
    }
    return {"options": options, "h": draw(st.integers(0, 2)), "keyed": draw(st.booleans()), "guided": draw(st.booleans())}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(run=runs())
def test_any_combination_equals_the_reference(run: dict[str, Any]) -> None:
    compare(**run)


def test_scores_in_chunks_are_the_same(monkeypatch) -> None:
    monkeypatch.setattr("contaccum.core.comparison.CHUNK_SCORES", 50)
    compare({"bank_size": 12, "similarity": "cosine", "drift_correction": "mean", "directions": FOUR})


@pytest.mark.parametrize("options", [{"query_bank_size": 8, "drift_correction": None}, {"directions": FOUR}])
def test_micro_batches_made_whole_ahead_equal_those_made_in_turn(options: dict[str, Any]) -> None:
    """As for two losses in one update."""

    def losses(ahead: int) -> list[float]:
        criterion, found = DualBankInfoNCE(bank_size=16, similarity="cosine", **options), []
        vectors = [torch.randn(2, 3, D, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(6)]
        for start in range(0, 6, ahead):
            made = [criterion.whole(*each) for each in vectors[start : start + ahead]]
            found += [float(criterion(*each, whole=whole).detach()) for each, whole in zip(vectors[start:], made, strict=False)]
        return found

    assert losses(ahead=2) == losses(ahead=1)


def bank_of_scale(correction: str | None, changes: dict[int, float], queries: int = 21) -> list[Tensor]:
    options: dict[str, Any] = {"bank_size": 21, "query_bank_size": queries, "similarity": "cosine", "scale": 3.0}
    criterion, found = DualBankInfoNCE(**options, drift_correction=correction), []
    reference = ReferenceInfoNCE(**options, drift_correction=correction)
    for step in range(20):
        if step in changes:
            criterion.scale = reference.scale = changes[step]
        batch = micro_batch(1 + step % 5, 1, seed=step, dtype=torch.float64, keyed=True)
        (loss, gradients), (expected, wanted) = loss_and_gradients(criterion, batch), loss_and_gradients(reference, batch)
        assert relative_error(loss, expected) < 1e-10, f"loss at micro-step {step}"
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(gradients, wanted, strict=True))
        found.append(loss)
    return found


@pytest.mark.parametrize("correction", [None, "mean"])
@pytest.mark.parametrize("step", [1, 6, 11])
@pytest.mark.parametrize("queries", [21, 10, 0])
def test_another_scale_in_the_middle_equals_the_reference(correction: str | None, step: int, queries: int) -> None:
    """Before the bank is full, and when it has gone round; with a group of the table open; and without queries in the bank."""
    changed = bank_of_scale(correction, {step: 9.0, step + 2: 1.5}, queries)
    assert changed[step] != bank_of_scale(correction, {}, queries)[step]


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("correction", [None, "mean", "mean+zero-sum"])
@pytest.mark.parametrize("comparison", [{}, {"directions": FOUR, "margin": 0.1}, {"start_update": 2}], ids=str)
def test_several_widths_equal_the_reference(comparison: dict[str, Any], correction: str | None, similarity: str) -> None:
    """Each reads the bank cut to its width, none meets its own micro-batch there, and what enters is whole. Widths change on the way."""
    options = {"bank_size": 10, "query_bank_size": 8, "similarity": similarity, "drift_correction": correction, "scale": 2.0, **comparison}
    criterion, reference = DualBankInfoNCE(**options), ReferenceInfoNCE(**options)
    seen: list[int] = []
    criterion.observers.append(lambda step: seen.append(len(step.rows)))
    sizes = [3, 2, 4, 1, 5, 4, 4, 2, 3, 4]
    for step, n in enumerate(sizes):
        batch = micro_batch(n, 1, seed=step, dtype=torch.float64, keyed=True)
        keys = {name: batch[name] for name in ("query_keys", "passage_keys")}
        leaves = [batch[name] for name in ("queries", "positives", "negatives")]
        whole = criterion.whole(*leaves, **keys)
        unit = [normalize(leaf.detach(), dim=-1) for leaf in leaves]
        widths = [D, 4, 2] if step % 3 else [4, 3]
        for width in widths:
            cut = [normalize(leaf[..., :width], dim=-1) for leaf in leaves]
            loss = criterion(*cut, **keys, whole=whole)
            gradients = torch.autograd.grad(loss, leaves)
            cut = [normalize(leaf[..., :width], dim=-1) for leaf in leaves]
            expected = reference(*cut, **keys, whole=unit, first=width == widths[0], last=width == widths[-1])
            assert relative_error(loss.detach(), expected.detach()) < 1e-10, f"width {width} at micro-step {step}"
            for gradient, wanted in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
                assert relative_error(gradient, wanted) < 1e-10, f"gradient at width {width}, micro-step {step}"
        if step % 3 == 2:
            criterion.after_update(0.5), reference.after_update(0.5)
    assert seen == sizes, "observers are called once a micro-batch"
    assert criterion.bank.passages.shape == (10, 2, D)


def run_with_widths(criterion: DualBankInfoNCE, steps: range) -> list[Tensor]:
    found = []
    for step in steps:
        batch = micro_batch(3, 1, seed=step, dtype=torch.float32, keyed=False)
        leaves = [batch[name] for name in ("queries", "positives", "negatives")]
        generator = torch.Generator().manual_seed(step)
        guide = tuple(torch.randn(*shape, 4, generator=generator) for shape in ((3,), (3, 2))) if criterion.how.margin is not None else None
        whole = criterion.whole(*leaves, guide=guide)
        for width in (D, 3):
            cut = [normalize(leaf[..., :width], dim=-1) for leaf in leaves]
            loss = criterion(*cut, whole=whole)
            found += [loss.detach(), *torch.autograd.grad(loss, leaves)]
        criterion.after_update()
    return found


@pytest.mark.parametrize("options", [{}, {"drift_correction": None}, {"directions": FOUR, "margin": 0.0}], ids=str)
def test_a_saved_state_goes_on_bit_by_bit(options: dict[str, Any]) -> None:
    first, again = (DualBankInfoNCE(bank_size=8, **options) for _ in range(2))
    run_with_widths(first, range(5))
    again.load_state_dict(first.state_dict())
    for a, b in zip(run_with_widths(first, range(5, 9)), run_with_widths(again, range(5, 9)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": ("doc_to_query",)}, "directions=('doc_to_query',) must be a tuple, each once, with 'query_to_doc' among them"),
        ({"directions": "query_to_doc"}, "directions='query_to_doc' must be a tuple"),
        ({"directions": ("query_to_doc", "sideways")}, "directions='sideways' is unknown; choose one of query_to_doc"),
        ({"partition_mode": "none"}, "partition_mode='none' is unknown; choose one of joint, per_direction"),
        (
            {"partition_mode": "per_direction", "directions": FOUR},
            "needs the positive in each direction; 'query_to_query'",
        ),
        ({"hardness_mode": "hard"}, "hardness_mode='hard' is unknown; choose one of in_batch_negatives"),
        ({"hardness_strength": -1.0}, "hardness_strength=-1.0 must be a number of at least 0"),
        ({"margin": "0.1"}, "margin='0.1' must be a number, or None for no filter"),
        ({"margin_strategy": "relative"}, "margin_strategy='relative' has no effect without a margin"),
        ({"margin_strategy": "both"}, "margin_strategy='both' is unknown; choose one of absolute, relative"),
    ],
)
def test_user_mistakes_name_the_value_and_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DualBankInfoNCE(**options)


def test_other_mistakes() -> None:
    criterion, vectors = DualBankInfoNCE(margin=0.0), torch.zeros(3, 4)
    with pytest.warns(UserWarning, match="hardness_mode='all_negatives' has no effect with hardness_strength=0"):
        DualBankInfoNCE(hardness_mode="all_negatives")
    with pytest.raises(ValueError, match=re.escape("guide vectors have no effect with margin=None; give margin=0.0")):
        DualBankInfoNCE()(vectors, vectors, guide=(torch.zeros(3, 2), torch.zeros(3, 1, 2)))
    with pytest.raises(ValueError, match=re.escape("guide must be vectors (3, g) of the queries and (3, 1, g) of the passages")):
        criterion(vectors, vectors, guide=(torch.zeros(3, 2), torch.zeros(3, 2, 2)))
    with pytest.raises(ValueError, match=re.escape("scale=0 must be a positive number")):
        criterion.scale = 0
    criterion(vectors.requires_grad_(), vectors)
    with pytest.raises(ValueError, match="guide vectors were given now but not given for the tuples in the bank"):
        criterion(vectors, vectors, guide=(torch.ones(3, 2), torch.ones(3, 1, 2)))
