"""An update of many micro-steps as one batch: the loss and gradients of `DualBankInfoNCE`, and of other people's methods, computed at once.

Weights are constant inside one update, so its N_total samples are encoded together and the K micro-losses are computed as one batch:
micro-step k sees the bank's tuples and those of the k - 1 micro-batches before it. tests/test_fast_path.py compares loss and gradients with
`DualBankInfoNCE` fed micro-batch by micro-batch. What this way cannot do is save memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

SCALES = {"cosine": 20.0, "dot": 1.0}
RIVALS = ("xbm", "xbn", "xbn-batch", "xbn-kept", "xbn-batch-kept", "sogclr")
LEAST_STD, LEAST_LOG_U = 1e-6, math.log(1e-20)  # the latter as in libauc


@dataclass(frozen=True)
class Setting:
    """One training. Without a bank, `n` = `n_total` is the large batch (and GradCache's gradient), a smaller `n` gradient accumulation."""

    name: str
    n: int = 8
    n_total: int = 128
    bank: int = 0
    hard_negatives: int = 0  # per query, the same each epoch
    past: bool = True  # False: the bank is emptied after every update
    mean: bool = False  # drift_correction="mean"
    zero_sum: str = ""  # of gradients: "running" (with the mean: "mean+zero-sum"), or within a micro-step: "passages" or "both" towers'
    push_window: int = 16  # samples that the mean of zero_sum="running" is taken over
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
        _check(setting)
        self.setting = setting
        size, total, c = setting.bank, setting.n_total, 1 + setting.hard_negatives

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.queries, self.passages = zeros(size, width), zeros(size, c, width)
        self.query_keys, self.passage_keys = zeros(size, dtype=torch.int64), zeros(size, c, dtype=torch.int64)
        self.recent = zeros(1 + min(c, 2), total, width)  # of the last update, as they were: queries, positives and mean hard negatives
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
        """Mean micro-loss of an update and its gradients on both; then its tuples enter.

        Queries (N_total, d), passages (N_total, c, d) or, where there are no hard negatives, (N_total, d); keys likewise.
        `chosen` are the samples' numbers, no two alike: only "sogclr" asks for them.
        """
        s, total = self.setting, len(queries)
        k, n = total // s.n, s.n
        if not s.past:
            self.count.zero_()
        q, p = queries.detach().contiguous().requires_grad_(), passages.detach().contiguous().requires_grad_()
        query_keys, passage_keys = query_keys.reshape(k, n), passage_keys.reshape(k, n, -1)
        own = SCALES[s.similarity] * (q.view(k, n, -1) @ p.view(k, -1, p.shape[-1]).mT)
        own = own.masked_fill(self._same_batch(query_keys, passage_keys).flatten(2), -torch.inf)
        positives = own.view(k, n, n, -1)[..., 0].diagonal(dim1=1, dim2=2)  # (k, n)
        if s.rival:
            losses, rows = self._rival(q, p, own, query_keys, passage_keys[..., 0], chosen), torch.full_like(query_keys[:, 0], n)
        elif s.bank:
            losses, rows = self._banked(q, p, own, positives, query_keys, passage_keys)
        else:
            losses, rows = (own.logsumexp(2) - positives).sum(1), torch.full_like(query_keys[:, 0], n)
        loss = (losses / rows).mean()
        grad_q, grad_p = torch.autograd.grad(loss if s.gradient_scale == "paper" else losses.mean() / n, (q, p))
        if s.zero_sum == "running":
            divisors = rows if s.gradient_scale == "paper" else torch.full_like(rows, n)
            grad_p = self._without_push(grad_p.view(k, -1, p.shape[-1]), divisors)
        elif s.zero_sum:
            grad_p = _centred(grad_p.view(k, -1, p.shape[-1]))
        if s.zero_sum == "both":
            grad_q = _centred(grad_q.view(k, n, -1))
        return loss.detach(), grad_q.view_as(q), grad_p.view_as(p)

    def _without_push(self, gradients: Tensor, divisors: Tensor) -> Tensor:
        """(k, n * c, d), each micro-step's divided by its own (k,), minus their mean over about `push_window` samples, its own included."""
        n, window = self.setting.n, self.setting.push_window
        before, found = self.count - self.setting.n_total, []  # this update is counted already
        for step, own in enumerate(gradients):
            weight = n / (before + (step + 1) * n).clamp(max=max(n, window))
            self.push.lerp_(own.mean(0) * divisors[step], weight)
            found.append(own - self.push / divisors[step])
        return torch.stack(found)

    def _same_batch(self, query_keys: Tensor, passage_keys: Tensor) -> Tensor:
        """(k, n, n, c): which passages are the row's own positive once more, or that of an equal query."""
        same = _duplicates(query_keys, passage_keys, query_keys, passage_keys)
        same[..., 0] &= ~torch.eye(query_keys.shape[1], dtype=torch.bool, device=same.device)
        return same

    def _banked(
        self, q: Tensor, p: Tensor, own: Tensor, own_positives: Tensor, query_keys: Tensor, passage_keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(k,) sums over the rows of each micro-batch and the bank before it, and their number."""
        s, scale = self.setting, SCALES[self.setting.similarity]
        k, n, m, c = *query_keys.shape, s.bank, passage_keys.shape[2]
        current_q, current_p = q.view(k, n, -1), p.view(k, n * c, -1)
        with torch.no_grad():
            tuples = p.detach().view(k * n, c, -1)
            mean_q, mean_p = self._means(q.detach(), tuples) if s.mean else (None, None)
            bank_q = self._windows("queries", q.detach(), mean_q)
            bank_p = self._windows("passages", tuples, mean_p).flatten(1, 2)  # (k, m * c, d)
            bank_qk, bank_pk = self._windows("query_keys", query_keys.flatten()), self._windows("passage_keys", passage_keys.flatten(0, 1))
            present = self._present(m, n * torch.arange(k, device=q.device))  # (k, m)
            absent = ~present.repeat_interleave(c, 1)[:, None]  # (k, 1, m * c)
            between = scale * (bank_q @ bank_p.mT)  # (k, m, m * c)
            targets = between.view(k, m, m, c)[..., 0].diagonal(dim1=1, dim2=2).clone()
            same = self._same_batch(bank_qk, bank_pk).flatten(2)
            constant = between.masked_fill_(same | absent, -torch.inf).logsumexp(2).masked_fill(~present, 0.0)  # (k, m)
            in_bank = _duplicates(query_keys, passage_keys, bank_qk, bank_pk).flatten(2)  # (k, n, m * c)
            in_batch = _duplicates(bank_qk, bank_pk, query_keys, passage_keys).flatten(2)  # (k, m, n * c)
        over_bank = (scale * (current_q @ bank_p.mT)).masked_fill(in_bank | absent, -torch.inf)
        of_bank = (scale * (bank_q @ current_p.mT)).masked_fill(in_batch, -torch.inf)
        current = (torch.cat([own, over_bank], 2).logsumexp(2) - own_positives).sum(1)
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
            bank_p = self._windows("passages", p.detach()[:, None])[:, :, 0] if s.rival == "xbm" else self._matched(p.detach(), present)
            bank_qk = self._windows("query_keys", query_keys.flatten())
            bank_pk = self._windows("passage_keys", passage_keys.flatten()[:, None])
            duplicate = _duplicates(query_keys, passage_keys[..., None], bank_qk, bank_pk)[..., 0]  # (k, n, m)
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
        stored, read = self.passages[:, 0], []
        for step, new in enumerate(p.view(k, n, -1)):
            old_mean, old_std = _moments(stored, present[step])
            found = (stored - old_mean) / old_std * std[step] + mean[step]
            read.append(F.normalize(found, dim=-1) if s.similarity == "cosine" else found)
            stored = torch.cat([read[-1] if s.rival.endswith("-kept") else stored, new])[-m:]
        self.passages.copy_(stored[:, None])
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

    def _means(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """(k, d), (k, c, d): of the last N_total samples at each micro-step, its own included; hard negatives have one of their own."""
        n, total, c = self.setting.n, len(q), p.shape[1]
        kinds = torch.stack([q, p[:, 0], *([p[:, 1:].mean(1)] if c > 1 else [])])
        line = torch.cat([self.recent, kinds], 1)
        sums = F.pad(line.cumsum(1), (0, 0, 1, 0))
        ends = torch.arange(n, total + 1, n, device=q.device)
        filled = (self.count + ends).clamp(max=total)
        self.recent.copy_(line[:, total:])
        means = (sums[:, total + ends] - sums[:, ends]) / filled[:, None]  # (2 or 3, k, d)
        return means[0], torch.stack([means[min(1 + i, 2)] for i in range(c)], 1)

    def _windows(self, name: str, new: Tensor, means: Tensor | None = None) -> Tensor:
        """(k, m, ...): the bank as each micro-step reads it; the buffer then holds the newest."""
        stored, n = getattr(self, name), self.setting.n
        unit = self.setting.similarity == "cosine"
        entering = new if means is None else (new.view(-1, n, *new.shape[1:]) - means[:, None]).view_as(new)
        line = torch.cat([stored, entering])
        windows = line.unfold(0, len(stored), n)[:-1]  # (k, ..., m)
        windows = windows.movedim(-1, 1) if line.dim() > 1 else windows
        stored.copy_(line[len(new) :])
        if means is None:
            return windows
        read = windows + means[:, None]
        return F.normalize(read, dim=-1) if unit else read


def _duplicates(row_queries: Tensor, row_passages: Tensor, column_queries: Tensor, column_passages: Tensor) -> Tensor:
    """Where a passage is the row's query or positive, or that of a query which is: (k, r), (k, r, c), (k, m), (k, m, c) -> (k, r, m, c)."""
    of_query, of_positive = row_queries[:, :, None], row_passages[:, :, :1]
    same = (of_query[..., None] == column_passages[:, None]) | (of_positive[..., None] == column_passages[:, None])
    same[..., 0] |= (of_query == column_queries[:, None]) | (of_positive == column_queries[:, None])
    return same


def _check(setting: Setting) -> None:
    rival = setting.rival
    if not setting.past and (setting.mean or setting.zero_sum):
        raise ValueError("past=False goes without mean and zero_sum: vectors of the present weights need no correction")
    if rival and rival not in RIVALS:
        raise ValueError(f"rival={rival!r} is unknown; choose one of {', '.join(RIVALS)}")
    if rival and (setting.bank > 0) != (rival != "sogclr"):
        raise ValueError(f"rival={rival!r} takes {'no bank' if rival == 'sogclr' else 'a bank'}, not bank={setting.bank}")
    if rival and (setting.mean or setting.zero_sum or setting.hard_negatives):
        raise ValueError(f"rival={rival!r} goes without mean, zero_sum and hard_negatives")


def _moments(vectors: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over those present: (..., m, d), (..., m) -> (..., d) twice."""
    there = present[..., None].to(vectors.dtype)
    number = there.sum(-2).clamp(min=1)
    mean = (vectors * there).sum(-2) / number
    variance = ((vectors - mean[..., None, :]).square() * there).sum(-2) / number
    return mean, variance.sqrt().clamp(min=LEAST_STD)


def _centred(gradients: Tensor) -> Tensor:
    return gradients - gradients.mean(1, keepdim=True)
