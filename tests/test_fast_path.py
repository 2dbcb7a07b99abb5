"""The grid's fast path gives the loss and gradients of the real one, and of rivals written down micro-batch by micro-batch."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmark_files import load_benchmark
from contaccum import DualBankInfoNCE

UPDATES, N, TOTAL, WIDTH = 6, 4, 16, 8
PAIRS = 40


@pytest.fixture(scope="module")
def drift() -> ModuleType:
    return load_benchmark("fast_path")


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("gradient_scale", ["in-batch", "paper"])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"bank_size": 0}),
        ({"bank": 24}, {"bank_size": 24, "drift_correction": None}),
        ({"bank": 24, "mean": True}, {"bank_size": 24, "drift_correction": "mean"}),
        ({"bank": 24, "mean": True, "zero_sum": "running"}, {"bank_size": 24, "drift_correction": "mean+zero-sum"}),
        ({"bank": 24, "past": False}, {"bank_size": 24, "clear_after_update": True}),
    ],
)
@pytest.mark.parametrize("h", [0, 1, 2])
def test_equals_micro_steps(
    drift: ModuleType, fields: dict[str, Any], options: dict[str, Any], similarity: str, gradient_scale: str, h: int
) -> None:
    setting = drift.Setting("x", n=N, n_total=TOTAL, similarity=similarity, gradient_scale=gradient_scale, hard_negatives=h, **fields)
    bank = drift.Bank(setting, WIDTH, "cpu")
    criterion = DualBankInfoNCE(scale=drift.SCALES[similarity], gradient_scale=gradient_scale, **options)
    criterion.bank.unit = similarity == "cosine"  # it gets vectors that are normalised already, as the fast path's are
    generator = torch.Generator().manual_seed(0)
    for number in range(UPDATES):
        vectors = torch.randn(TOTAL, 2 + h, WIDTH, generator=generator) + number * 0.3
        if similarity == "cosine":
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        keys = torch.randint(40, (TOTAL, 2 + h), generator=generator)  # some texts twice
        loss, grad_q, grad_p = bank.update(vectors[:, 0], vectors[:, 1:], keys[:, 0], keys[:, 1:])
        real = vectors.clone().requires_grad_()
        losses = []
        for i in range(0, TOTAL, N):
            part, of_keys = real[i : i + N], keys[i : i + N]
            losses.append(criterion(part[:, 0], part[:, 1], part[:, 2:] if h else None, of_keys[:, 0], of_keys[:, 1:]))
        mean = torch.stack(losses).mean()
        mean.backward()
        criterion.after_update()
        torch.testing.assert_close(loss, mean.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat([grad_q[:, None], grad_p], 1), real.grad, rtol=1e-4, atol=1e-6)


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


class NaiveMemory:
    """XBM and XBN: one micro-batch at a time, lists of single vectors, one row at a time."""

    def __init__(self, setting: Any, scale: float) -> None:
        self.setting, self.scale = setting, scale
        self.memory: list[tuple[Tensor, int, int]] = []  # passage, its key and its query's, oldest first
        self.last: list[Tensor] = []

    def loss(self, q: Tensor, p: Tensor, query_keys: list[int], passage_keys: list[int], _: list[int]) -> Tensor:
        s = self.setting
        self.last = [*self.last, *p.detach()][-s.n_total :]
        stored = [vector for vector, _, _ in self.memory]
        if s.rival != "xbm" and stored:
            now = torch.stack(list(p.detach()) if "batch" in s.rival else self.last)
            memory = torch.stack(stored)
            matched = (memory - memory.mean(0)) / memory.std(0, correction=0) * now.std(0, correction=0) + now.mean(0)
            stored = list(F.normalize(matched, dim=1) if s.similarity == "cosine" else matched)
        rows = []
        for i, query in enumerate(q):
            scores = [self.scale * query @ p[i]]
            scores += [
                self.scale * query @ p[j]
                for j in range(len(p))
                if j != i and not {query_keys[j], passage_keys[j]} & {query_keys[i], passage_keys[i]}
            ]
            scores += [
                self.scale * query @ vector
                for vector, (_, passage_key, query_key) in zip(stored, self.memory, strict=True)
                if not {query_key, passage_key} & {query_keys[i], passage_keys[i]}
            ]
            rows.append(torch.stack(scores).logsumexp(0) - scores[0])
        if s.rival.endswith("-kept"):
            self.memory = [(vector, *keys) for vector, (_, *keys) in zip(stored, self.memory, strict=True)]
        self.memory = [*self.memory, *zip(p.detach(), passage_keys, query_keys, strict=True)][-s.bank :]
        return torch.stack(rows).mean()


class NaiveGlobal:
    """SogCLR, by its gradient: each negative weighs exp(its score - the positive's) / (negatives * u)."""

    def __init__(self, setting: Any, scale: float) -> None:
        self.gamma, self.scale = setting.gamma, scale
        self.u: dict[int, float] = {}

    def loss(self, q: Tensor, p: Tensor, query_keys: list[int], passage_keys: list[int], samples: list[int]) -> Tensor:
        value, with_gradient = 0.0, torch.zeros((), dtype=q.dtype)
        for i, sample in enumerate(samples):
            over = [
                self.scale * (q[i] @ p[j] - q[i] @ p[i])
                for j in range(len(p))
                if j != i and not {query_keys[j], passage_keys[j]} & {query_keys[i], passage_keys[i]}
            ]
            found = sum(math.exp(x.item()) for x in over) / max(1, len(over))
            u = max((1 - self.gamma) * self.u[sample] + self.gamma * found if sample in self.u else found, 1e-20)
            self.u[sample] = u
            value += math.log(u)
            for x in over:
                with_gradient = with_gradient + math.exp(x.item()) / (len(over) * u) * x
        return (value + with_gradient - with_gradient.detach()) / len(q)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(
    "fields",
    [
        *({"rival": rival, "bank": 24} for rival in ("xbm", "xbn", "xbn-batch", "xbn-kept", "xbn-batch-kept")),
        {"rival": "xbn", "bank": 8},
        {"rival": "sogclr"},
        {"rival": "sogclr", "gamma": 0.3},
        {"rival": "sogclr", "gamma": 1.0},
    ],
    ids=str,
)
def test_rivals_equal_their_definitions(drift: ModuleType, fields: dict[str, Any], similarity: str) -> None:
    setting = drift.Setting("x", n=N, n_total=TOTAL, similarity=similarity, **fields)
    bank = drift.Bank(setting, WIDTH, "cpu", PAIRS)
    for _ in range(2):  # what is cleared is as new
        naive = (NaiveGlobal if setting.rival == "sogclr" else NaiveMemory)(setting, drift.SCALES[similarity])
        generator = torch.Generator().manual_seed(0)
        all_keys = torch.randint(30, (2, PAIRS), generator=generator)  # some texts twice
        for number in range(UPDATES):
            vectors = torch.randn(2, TOTAL, WIDTH, generator=generator) * (1 + 0.2 * number) + number * 0.3
            if similarity == "cosine":
                vectors = F.normalize(vectors, dim=-1)
            chosen = torch.randperm(PAIRS, generator=generator)[:TOTAL]
            keys = all_keys[:, chosen]
            loss, *gradients = bank.update(*vectors, *keys, chosen)
            real = vectors.double().requires_grad_()
            losses = []
            for i in range(0, TOTAL, N):
                part = slice(i, i + N)
                losses.append(naive.loss(*real[:, part], *keys[:, part].tolist(), chosen[part].tolist()))
            mean = torch.stack(losses).mean()
            mean.backward()
            torch.testing.assert_close(loss.double(), mean.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.stack(gradients).double(), real.grad, rtol=1e-4, atol=1e-5)
        bank.clear()


def test_sogclr_of_one_visit_is_a_softmax_over_negatives(drift: ModuleType) -> None:
    """u is then what it estimates: the gradient is that of log-mean-exp, and no score, however large, overflows."""
    vectors = 30 * torch.randn(2, TOTAL, WIDTH, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(2 * TOTAL).view(2, TOTAL)
    bank = drift.Bank(drift.Setting("x", n=N, n_total=TOTAL, similarity="dot", rival="sogclr"), WIDTH, "cpu", TOTAL)
    loss, *gradients = bank.update(*vectors, *keys, torch.arange(TOTAL))
    real = vectors.double().requires_grad_()
    q, p = real.view(2, -1, N, WIDTH)
    scores = q @ p.mT
    positive = scores.diagonal(dim1=1, dim2=2)
    others = scores.masked_fill(torch.eye(N, dtype=torch.bool), -torch.inf).logsumexp(2) - math.log(N - 1)
    rows = others - positive
    assert rows.max() > 1000
    held = rows.clamp(min=math.log(1e-20))  # where u is at its least, the gradient all but vanishes
    held.mean().backward()
    torch.testing.assert_close(loss.double(), held.mean().detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.stack(gradients).double(), real.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rival": "xmb", "bank": 8}, "choose one of xbm"),
        ({"rival": "xbm"}, "takes a bank"),
        ({"rival": "sogclr", "bank": 8}, "takes no bank"),
        ({"rival": "xbn", "bank": 8, "mean": True}, "without mean"),
        ({"bank": 8, "past": False, "mean": True}, "past=False goes without mean"),
    ],
)
def test_rivals_that_make_no_sense(drift: ModuleType, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        drift.Bank(drift.Setting("x", n=N, n_total=TOTAL, **fields), WIDTH, "cpu")
