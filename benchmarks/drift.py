"""Many trainings of one small pair of towers, fast: banks, corrections and learning rates compared on equal terms.

Weights are constant inside one update, so its N_total samples are encoded at once and the K micro-losses are computed as one batch:
micro-step k sees the bank's tuples and those of the k - 1 micro-batches before it. On a GPU the whole update is one CUDA graph. Loss and
gradients are those of `DualBankInfoNCE` fed micro-batch by micro-batch (tests/test_fast_path.py); what it cannot do is save memory.

    python benchmarks/drift.py tokens --data ACL --model MODEL --output tokens.npz
    python benchmarks/drift.py run --tokens tokens.npz --model MODEL --grid grid.jsonl --output results.jsonl [--processes 6]

A line of the grid is a `Setting`. Several processes share a grid: each takes the next line that nobody has taken. A result that is in the
output already is not computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contaccum.common.provenance import provenance

SCALES = {"cosine": 20.0, "dot": 1.0}
CLIP, EPS = 2.0, 1e-8
QUERY_TOKENS, PASSAGE_TOKENS = 32, 128
RIVALS = ("xbm", "xbn", "xbn-batch", "xbn-kept", "xbn-batch-kept", "sogclr")
LEAST_STD, LEAST_LOG_U = 1e-6, math.log(1e-20)  # the latter as in libauc


@dataclass(frozen=True)
class Setting:
    """One training. Without a bank, `n` = `n_total` is the large batch (and GradCache's gradient), a smaller `n` gradient accumulation."""

    name: str
    n: int = 8
    n_total: int = 128
    bank: int = 0
    mean: bool = False  # drift_correction="mean"
    zero_sum: str = ""  # of gradients: "running" (with the mean: "mean+zero-sum"), or within a micro-step: "passages" or "both" towers'
    gradient_scale: str = "in-batch"  # or "paper"
    rival: str = ""  # somebody else's method in place of the dual bank: one of `RIVALS`
    gamma: float = 0.9  # of "sogclr": the weight of what the micro-batch says; libauc's default
    tied: bool = False  # one tower
    pooling: str = "cls"  # or "mean"
    beta2: float = 0.999  # of Adam
    warmup: float = 0.1  # share of the run
    similarity: str = "cosine"
    lr: float = 1e-4
    epochs: float = 3
    rows: int = 40_960
    seed: int = 0
    split: str = "dev"


class Bank:
    """The last `bank` tuples, oldest first, and the last update's vectors; at first empty."""

    def __init__(self, setting: Setting, width: int, device: str, samples: int = 0) -> None:
        _check_rival(setting)
        self.setting = setting
        size, total = setting.bank, setting.n_total

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.queries, self.passages = zeros(size, width), zeros(size, width)
        self.query_keys, self.passage_keys = zeros(size, dtype=torch.int64), zeros(size, dtype=torch.int64)
        self.recent = zeros(2, total, width)  # queries and passages of the last update, as they were
        self.push = zeros(width)  # running mean of the gradients on passages
        self.count = zeros(dtype=torch.int64)
        self.log_u = torch.full((samples if setting.rival == "sogclr" else 0,), -torch.inf, device=device)  # -inf: not seen yet

    def clear(self) -> None:
        self.log_u.fill_(-torch.inf)
        for buffer in (self.queries, self.passages, self.query_keys, self.passage_keys, self.recent, self.push, self.count):
            buffer.zero_()

    def update(
        self, queries: Tensor, passages: Tensor, query_keys: Tensor, passage_keys: Tensor, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean micro-loss of an update (N_total, d) and its gradients on both; then its tuples enter.

        `chosen` are the samples' numbers, no two alike: only "sogclr" asks for them.
        """
        s, total = self.setting, len(queries)
        k, n = total // s.n, s.n
        q, p = queries.detach().requires_grad_(), passages.detach().requires_grad_()
        own = (SCALES[s.similarity] * (q.view(k, n, -1) @ p.view(k, n, -1).mT)).masked_fill(
            self._same_batch(query_keys, passage_keys), -torch.inf
        )
        if s.rival:
            losses, rows = (
                self._rival(q, p, own, query_keys.view(k, n), passage_keys.view(k, n), chosen),
                torch.full_like(query_keys[:k], n),
            )
        elif s.bank:
            losses, rows = self._banked(q, p, own, query_keys.view(k, n), passage_keys.view(k, n))
        else:
            losses, rows = (own.logsumexp(2) - own.diagonal(dim1=1, dim2=2)).sum(1), torch.full((k,), n, device=q.device)
        loss = (losses / rows).mean()
        grad_q, grad_p = torch.autograd.grad(loss if s.gradient_scale == "paper" else losses.mean() / n, (q, p))
        if s.zero_sum == "running":
            grad_p = self._without_push(grad_p.view(k, n, -1))
        elif s.zero_sum:
            grad_p = _centred(grad_p.view(k, n, -1))
        if s.zero_sum == "both":
            grad_q = _centred(grad_q.view(k, n, -1))
        return loss.detach(), grad_q.view_as(q), grad_p.view_as(p)

    def _without_push(self, gradients: Tensor) -> Tensor:
        """(k, n, d) minus their mean over about an update, each micro-step's own included."""
        n, total = self.setting.n, self.setting.n_total
        before, found = self.count - gradients[..., 0].numel(), []  # this update is counted already
        for step, own in enumerate(gradients):
            weight = n / (before + (step + 1) * n).clamp(max=total)
            self.push.lerp_(own.mean(0), weight)
            found.append(own - self.push)
        return torch.stack(found)

    def _same_batch(self, query_keys: Tensor, passage_keys: Tensor) -> Tensor:
        n = self.setting.n
        q, p = query_keys.view(-1, n), passage_keys.view(-1, n)
        same = (q[:, :, None] == q[:, None]) | (p[:, :, None] == p[:, None])
        return same & ~torch.eye(n, dtype=torch.bool, device=q.device)

    def _banked(self, q: Tensor, p: Tensor, own: Tensor, query_keys: Tensor, passage_keys: Tensor) -> tuple[Tensor, Tensor]:
        """(k,) sums over the rows of each micro-batch and the bank before it, and their number."""
        s, scale = self.setting, SCALES[self.setting.similarity]
        k, n, m = *query_keys.shape, s.bank
        current_q, current_p = q.view(k, n, -1), p.view(k, n, -1)
        with torch.no_grad():
            means = self._means(q.detach(), p.detach()) if s.mean else None
            bank_q = self._windows("queries", q.detach(), None if means is None else means[0])
            bank_p = self._windows("passages", p.detach(), None if means is None else means[1])
            bank_qk, bank_pk = self._windows("query_keys", query_keys.view(-1)), self._windows("passage_keys", passage_keys.view(-1))
            present = self._present(m, n * torch.arange(k, device=q.device))  # (k, m)
            between = scale * (bank_q @ bank_p.mT)  # (k, m, m)
            targets = between.diagonal(dim1=1, dim2=2).clone()
            same = (bank_qk[:, :, None] == bank_qk[:, None]) | (bank_pk[:, :, None] == bank_pk[:, None])
            same &= ~torch.eye(m, dtype=torch.bool, device=q.device)
            constant = between.masked_fill_(same | ~present[:, None], -torch.inf).logsumexp(2).masked_fill(~present, 0.0)  # (k, m)
            duplicate = (query_keys[:, :, None] == bank_qk[:, None]) | (passage_keys[:, :, None] == bank_pk[:, None])  # (k, n, m)
        over_bank = (scale * (current_q @ bank_p.mT)).masked_fill(duplicate | ~present[:, None], -torch.inf)
        of_bank = (scale * (bank_q @ current_p.mT)).masked_fill(duplicate.mT, -torch.inf)
        current = (torch.cat([own, over_bank], 2).logsumexp(2) - own.diagonal(dim1=1, dim2=2)).sum(1)
        past = (torch.cat([constant[:, :, None], of_bank], 2).logsumexp(2) - targets).masked_fill(~present, 0.0).sum(1)
        self.count += k * n
        return current + past, n + present.sum(1)

    def _rival(self, q: Tensor, p: Tensor, own: Tensor, query_keys: Tensor, passage_keys: Tensor, chosen: Tensor | None) -> Tensor:
        """(k,) sums over the rows of each micro-batch, which are its own queries and no others."""
        if self.setting.rival != "sogclr":
            return self._remembered(q, p, own, query_keys, passage_keys)
        if chosen is None:
            raise ValueError("sogclr keeps a number per training pair: update() needs the samples' numbers")
        return self._global(own, chosen)

    def _remembered(self, q: Tensor, p: Tensor, own: Tensor, query_keys: Tensor, passage_keys: Tensor) -> Tensor:
        """Cross-batch memory (XBM, arXiv 1912.06798): the current queries against the current and the last `bank` passages.

        As in `CrossBatchMemory` of pytorch-metric-learning 2.9.0: a first-in-first-out memory of detached vectors as they were encoded, in
        use from the first step on; every micro-batch enters; the current samples alone are anchors and the mean is over them; what is
        stored gets no gradient.

        Adapted to pairs: the library's memory has one encoder's vectors, here it has passages (its `enqueue_mask` splits a batch likewise,
        into anchors and vectors to store). There the current batch enters before the loss is computed, so that anchors are compared with
        detached copies of it: the passage tower would not learn. Here current passages are columns with gradients, beside the memory and
        not in it: `bank` counts past passages only. Equal labels are positives there; here a query's one positive is its own passage, and
        duplicates by key are masked, as for the other methods.

        "xbn" and its variants read the memory through `_matched`.
        """
        s, scale = self.setting, SCALES[self.setting.similarity]
        k, n = query_keys.shape
        with torch.no_grad():
            present = self._present(s.bank, n * torch.arange(k, device=q.device))
            bank_p = self._windows("passages", p.detach()) if s.rival == "xbm" else self._matched(p.detach(), present)
            bank_qk, bank_pk = self._windows("query_keys", query_keys.view(-1)), self._windows("passage_keys", passage_keys.view(-1))
            duplicate = (query_keys[:, :, None] == bank_qk[:, None]) | (passage_keys[:, :, None] == bank_pk[:, None])  # (k, n, m)
        over_bank = (scale * (q.view(k, n, -1) @ bank_p.mT)).masked_fill(duplicate | ~present[:, None], -torch.inf)
        self.count += k * n
        return (torch.cat([own, over_bank], 2).logsumexp(2) - own.diagonal(dim1=1, dim2=2)).sum(1)

    def _matched(self, p: Tensor, present: Tensor) -> Tensor:
        """(k, m, d): the memory as each micro-step reads it, moments matched (XBN of arXiv 2303.17127, without its Kalman filter).

        (z - mean of the memory) / its std * std of current passages + their mean, per dimension; for cosine made unit vectors again.
        Current passages are the last N_total, the micro-batch's own included ("xbn"), or the micro-batch alone ("xbn-batch", the paper's
        choice). The memory stays as it was encoded, or ("-kept") the matched vectors replace it, so that an entry is matched anew at each
        micro-step of its age and not all ages by one map; the abstract's "updating the stored embeddings" may mean either.
        """
        s, (k, m), n, total = self.setting, present.shape, self.setting.n, len(p)
        if s.rival.startswith("xbn-batch"):
            mean, std = _moments(p.view(k, n, -1), torch.ones((k, n), dtype=torch.bool, device=p.device))
        else:
            line = torch.cat([self.recent[1], p])
            last = line[n:].unfold(0, total, n).movedim(-1, 1)  # (k, N_total, d)
            mean, std = _moments(last, self._present(total, n * torch.arange(1, k + 1, device=p.device)))
            self.recent[1].copy_(p)
        stored, read = self.passages, []
        for step, new in enumerate(p.view(k, n, -1)):
            old_mean, old_std = _moments(stored, present[step])
            found = (stored - old_mean) / old_std * std[step] + mean[step]
            read.append(F.normalize(found, dim=-1) if s.similarity == "cosine" else found)
            stored = torch.cat([read[-1] if s.rival.endswith("-kept") else stored, new])[-m:]
        self.passages.copy_(stored)
        return torch.stack(read)

    def _global(self, own: Tensor, chosen: Tensor) -> Tensor:
        """Global contrastive loss (SogCLR, arXiv 2202.12387), queries to passages only: the sum over rows of log u.

        u is kept per training pair: its negatives' mean of exp(score - positive's score), first as found in its micro-batch, later
        (1 - gamma) u + gamma times what is found. A negative's score less the positive's gets the weight exp(...) / (negatives * u): a
        softmax over the micro-batch's negatives, times what they now sum to over what they usually do.

        As in libauc 2.0.1's `GCLoss(mode="bimodal")`, that is `GCLoss_v2`, made for two encoders (v1 adds scores inside one tower): the
        positive is not a summand, u is updated before it is used and at least 1e-20. Unlike there: only one of its two directions, as in
        all methods here; weights are divided by the number of negatives, as in v1 (v2 leaves that out, which makes gradients n - 1 times as
        large), and gradients are not multiplied by the temperature; duplicates are no negatives; whether it is a first visit is known per
        sample and not per batch; logarithms instead of v2's running maxima, so 1e-20 is not relative to these.
        """
        s, n = self.setting, self.setting.n
        over = own - own.diagonal(dim1=1, dim2=2)[:, :, None]
        negative = ~(torch.eye(n, dtype=torch.bool, device=own.device) | own.detach().isneginf())
        with torch.no_grad():
            exponents = over.masked_fill(~negative, -torch.inf) - negative.sum(2, keepdim=True).clamp(min=1).log()
            found, before = exponents.logsumexp(2), self.log_u[chosen].view(-1, n)
            mixed = torch.logaddexp(before + (math.log1p(-s.gamma) if s.gamma < 1 else -math.inf), found + math.log(s.gamma))
            log_u = torch.where(before.isneginf(), found, mixed).clamp(min=LEAST_LOG_U)
            self.log_u.index_copy_(0, chosen, log_u.view(-1))
            weights = (exponents - log_u[:, :, None]).exp()
        surrogate = (weights * over.masked_fill(~negative, 0.0)).sum((1, 2))
        return log_u.sum(1) + surrogate - surrogate.detach()  # the value of one, the gradients of the other

    def _present(self, size: int, ahead: Tensor) -> Tensor:
        """(k, size): which of the last `size` samples there are, after so many of this update."""
        return torch.arange(size, device=ahead.device) >= size - (self.count + ahead)[:, None]

    def _means(self, q: Tensor, p: Tensor) -> Tensor:
        """(2, k, d): of the last N_total samples at each micro-step, its own included."""
        n, total = self.setting.n, len(q)
        both = torch.cat([self.recent, torch.stack([q, p])], 1)
        sums = F.pad(both.cumsum(1), (0, 0, 1, 0))
        ends = torch.arange(n, total + 1, n, device=q.device)
        filled = (self.count + ends).clamp(max=total)
        self.recent.copy_(both[:, total:])
        return (sums[:, total + ends] - sums[:, ends]) / filled[:, None]

    def _windows(self, name: str, new: Tensor, means: Tensor | None = None) -> Tensor:
        """(k, m, ...): the bank as each micro-step reads it; the buffer then holds the newest."""
        stored, n = getattr(self, name), self.setting.n
        unit = self.setting.similarity == "cosine"
        entering = new if means is None else (new.view(-1, n, new.shape[1]) - means[:, None]).view_as(new)
        line = torch.cat([stored, entering])
        windows = line.unfold(0, len(stored), n)[:-1]  # (k, ..., m)
        windows = windows.movedim(-1, 1) if line.dim() > 1 else windows
        stored.copy_(line[len(new) :])
        if means is None:
            return windows
        read = windows + means[:, None]
        return F.normalize(read, dim=-1) if unit else read


def _check_rival(setting: Setting) -> None:
    rival = setting.rival
    if rival and rival not in RIVALS:
        raise ValueError(f"rival={rival!r} is unknown; choose one of {', '.join(RIVALS)}")
    if rival and (setting.bank > 0) != (rival != "sogclr"):
        raise ValueError(f"rival={rival!r} takes {'no bank' if rival == 'sogclr' else 'a bank'}, not bank={setting.bank}")
    if rival and (setting.mean or setting.zero_sum):
        raise ValueError(f"rival={rival!r} goes without mean and zero_sum")


def _moments(vectors: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over those present: (..., m, d), (..., m) -> (..., d) twice."""
    there = present[..., None].to(vectors.dtype)
    number = there.sum(-2).clamp(min=1)
    mean = (vectors * there).sum(-2) / number
    variance = ((vectors - mean[..., None, :]).square() * there).sum(-2) / number
    return mean, variance.sqrt().clamp(min=LEAST_STD)


def _centred(gradients: Tensor) -> Tensor:
    return gradients - gradients.mean(1, keepdim=True)


class Tower(nn.Module):
    """A BERT that reads padded rows of token ids, 0 being padding, and gives its first token's vector or the mean of all."""

    def __init__(self, folder: str, pooling: str) -> None:
        from transformers import AutoModel

        super().__init__()
        self.pooling = pooling
        self.bert = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", add_pooling_layer=False)

    def forward(self, ids: Tensor) -> Tensor:
        padding = torch.zeros(ids.shape, device=ids.device, dtype=torch.bfloat16).masked_fill_(ids == 0, -3e4)
        mask = padding[:, None, None].expand(-1, 1, ids.shape[1], -1)  # made here: transformers would wait for the device to look at it
        found: Tensor = self.bert.encoder(self.bert.embeddings(input_ids=ids.long()), attention_mask=mask)[0]
        if self.pooling == "cls":
            return found[:, 0].float()
        real = (ids != 0)[:, :, None]
        return (found.float() * real).sum(1) / real.sum(1)


class Tokens:
    """Token ids of all texts, a key per text, and the pairs of each split, on the device."""

    def __init__(self, file: str, device: str) -> None:
        arrays = np.load(file)
        self.queries, self.passages = (torch.from_numpy(arrays[name].astype(np.int32)).to(device) for name in ("q", "p"))
        self.query_keys, self.passage_keys = (torch.from_numpy(arrays[name]).to(device) for name in ("qk", "pk"))
        self.pairs = {split: torch.from_numpy(arrays[split]).to(device) for split in ("train", "dev", "test")}


def train(setting: Setting, tokens: Tokens, model: str, device: str, compiled: bool = False) -> dict[str, Any]:
    torch.manual_seed(setting.seed)
    first = Tower(model, setting.pooling)
    width: int = first.bert.config.hidden_size
    towers = nn.ModuleList([first, first if setting.tied else Tower(model, setting.pooling)]).to(device).train()
    encoders = [torch.compile(tower, dynamic=False) if compiled else tower for tower in towers]
    parameters = list(towers.parameters())
    lr = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, setting.beta2), weight_decay=0.0, eps=EPS, fused=True, capturable=device == "cuda"
    )
    pairs = tokens.pairs["train"][: setting.rows]
    bank = Bank(setting, width, device, len(pairs))
    chosen = torch.zeros(setting.n_total, dtype=torch.int64, device=device)
    last_loss = torch.zeros((), device=device)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        queries, passages = pairs[chosen].unbind(1)
        with torch.autocast(device, torch.bfloat16):
            q, p = encoders[0](tokens.queries[queries]), encoders[1](tokens.passages[passages])
        if setting.similarity == "cosine":
            q, p = F.normalize(q, dim=1), F.normalize(p, dim=1)
        loss, grad_q, grad_p = bank.update(q, p, tokens.query_keys[queries], tokens.passage_keys[passages], chosen)
        torch.autograd.backward([q, p], [grad_q, grad_p])
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])
        last_loss.copy_(loss)

    step = update
    if device == "cuda":
        step = _graph(update)
        for state in optimizer.state.values():  # the graph was made with a learning rate of 0: weights are as they were
            for value in state.values():
                value.zero_()
        bank.clear()
    per_epoch = len(pairs) // setting.n_total
    updates = math.ceil(setting.epochs * per_epoch)
    order, generator = torch.empty(0), torch.Generator().manual_seed(setting.seed)
    started, losses = time.perf_counter(), []
    for number in range(updates):
        place = number % per_epoch
        if place == 0:
            order = torch.randperm(len(pairs), generator=generator).to(device)
        chosen.copy_(order[place * setting.n_total : (place + 1) * setting.n_total])
        lr.fill_(setting.lr * lr_share(number, updates, setting.warmup))
        step()
        if number % max(1, updates // 10) == 0:
            losses.append(round(last_loss.item(), 4))
    seconds = time.perf_counter() - started
    return {"updates": updates, "seconds": seconds, "loss": losses, **evaluate(towers, tokens, setting)}


def lr_share(number: int, updates: int, warmup: float = 0.1) -> float:
    """Linear warm-up over a tenth of the run, then linear decay: as `contaccum train` does."""
    warm = int(updates * warmup)
    return number / warm if number < warm else (updates - number) / (updates - warm)


def _graph(update: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return graph.replay


@torch.no_grad()
def evaluate(towers: nn.ModuleList, tokens: Tokens, setting: Setting) -> dict[str, Any]:
    """Rank of each query's passage among all passages, and the mean reciprocal rank in percent."""
    towers.eval()
    pairs = tokens.pairs[setting.split]
    passages, queries = _encode(towers[1], tokens.passages, setting), _encode(towers[0], tokens.queries[pairs[:, 0]], setting)
    ranks = []
    for begin in range(0, len(queries), 500):
        scores = queries[begin : begin + 500] @ passages.T
        ranks.append((scores >= scores.gather(1, pairs[begin : begin + 500, 1:])).sum(1))  # ties count against it: a collapse is no success
    found = torch.cat(ranks)
    return {"MRR": 100 * float((1 / found.double()).mean()), "ranks": found.tolist()}


def _encode(tower: nn.Module, ids: Tensor, setting: Setting) -> Tensor:
    parts = []
    for part in ids.split(2048):
        with torch.autocast(ids.device.type, torch.bfloat16):
            parts.append(tower(part))
    vectors = torch.cat(parts)
    return F.normalize(vectors, dim=1) if setting.similarity == "cosine" else vectors


def write_tokens(data: str, model: str, output: str) -> None:
    """A BEIR folder with splits train, dev and test as the arrays that `Tokens` reads."""
    from transformers import AutoTokenizer

    from contaccum.data.readers.beir import qrels_file, read_qrels
    from contaccum.data.readers.collections import encoded_texts
    from contaccum.data.readers.queries import read_queries

    tokenizer = AutoTokenizer.from_pretrained(model)
    splits = {split: read_qrels(qrels_file(Path(data), split)) for split in ("train", "dev", "test")}
    queries = {query.id: query.text for split in splits for query in read_queries(data, split)}
    passages = dict(encoded_texts(data))
    arrays: dict[str, Any] = {}
    places = []
    for name, texts, limit in (("q", queries, QUERY_TOKENS), ("p", passages, PASSAGE_TOKENS)):
        ids = tokenizer(list(texts.values()), truncation=True, max_length=limit)["input_ids"]
        arrays[name] = np.zeros((len(ids), limit), np.uint16)
        for row, found in zip(arrays[name], ids, strict=True):
            row[: len(found)] = found
        known: dict[str, int] = {}
        arrays[name + "k"] = np.array([known.setdefault(text, len(known)) for text in texts.values()])
        places.append({key: place for place, key in enumerate(texts)})
    for split, qrels in splits.items():
        arrays[split] = np.array([(places[0][query], places[1][doc]) for query, grades in qrels.items() for doc in grades])
    np.savez_compressed(output, **arrays)


def work(tokens: str, model: str, grid: str, output: str, until: float, compiled: bool) -> None:
    """Take settings that nobody has taken until there are none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    loaded = Tokens(tokens, device)
    finished = computed(Path(output))
    for line in Path(grid).read_text().splitlines():
        setting = Setting(**json.loads(line))
        if setting in finished or time.time() > until or not _claim(Path(f"{output}.claims"), setting):
            continue
        started = time.perf_counter()
        try:
            found = train(setting, loaded, model, device, compiled)
        except Exception:
            found = {"error": traceback.format_exc()}
        with open(output, "a", encoding="utf-8") as results:
            told = {"setting": asdict(setting), **found, "total_seconds": time.perf_counter() - started}
            results.write(json.dumps({**told, "provenance": provenance(setting.seed)}) + "\n")
        end = found.get("error", f"MRR {found.get('MRR', 0):.2f}, {found.get('seconds', 0):.0f} s")
        print(f"{setting.name}, {setting.similarity}, lr {setting.lr:g}, {setting.epochs:g} epochs, seed {setting.seed}: {end}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def computed(output: Path) -> set[Setting]:
    """Settings with a result in the output."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    return {Setting(**found["setting"]) for found in map(json.loads, lines) if "error" not in found}


def _claim(folder: Path, setting: Setting) -> bool:
    """Whether no other process has taken it."""
    folder.mkdir(exist_ok=True)
    name = hashlib.sha256(repr(setting).encode()).hexdigest()[:16]
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    make, run = commands.add_parser("tokens"), commands.add_parser("run")
    make.add_argument("--data", required=True)
    run.add_argument("--tokens", required=True)
    run.add_argument("--grid", required=True)
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--compile", action="store_true", help="towers by torch.compile: half a minute first, then faster")
    run.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so many")
    run.add_argument("--until", type=float, help=argparse.SUPPRESS)
    for command in (make, run):
        command.add_argument("--model", required=True)
        command.add_argument("--output", required=True)
    a = parser.parse_args()
    if a.command == "tokens":
        write_tokens(a.data, a.model, a.output)
        return
    if a.until is None:  # not one of the processes that share a grid: claims that lie there are of a run that ended
        shutil.rmtree(f"{a.output}.claims", ignore_errors=True)
    until = a.until or time.time() + a.seconds
    others = [subprocess.Popen([sys.executable, *sys.argv, "--processes", "1", "--until", str(until)]) for _ in range(a.processes - 1)]
    work(a.tokens, a.model, a.grid, a.output, until, a.compile)
    for other in others:
        other.wait()


if __name__ == "__main__":
    main()
