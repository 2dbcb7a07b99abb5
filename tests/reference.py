"""Dual-bank InfoNCE written once more, as plainly as possible: Python lists, one row and one column at a time, gradients by autograd.

Shares no code with the package. Slow; for small cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Tuple:
    query: Tensor
    passages: list[Tensor]  # positive first
    query_key: int | None
    passage_keys: list[int] | None
    age: float = 0.0


class ReferenceInfoNCE:
    """What `DualBankInfoNCE` must equal."""

    def __init__(
        self,
        bank_size: int,
        scale: float = 1.0,
        similarity: str = "dot",
        query_bank_size: int | None = None,
        clear_after_update: bool = False,
        cache_hard_negatives: bool = True,
        mask_duplicates: bool = True,
        gradient_scale: str = "in-batch",
        start_update: int = 0,
        query_bank_stop_update: int | None = None,
        bank_dtype: torch.dtype | None = None,
        drift_correction: str | None = None,
    ) -> None:
        self.bank_size = bank_size
        self.query_bank_size = bank_size if query_bank_size is None else query_bank_size
        self.scale, self.similarity, self.gradient_scale = scale, similarity, gradient_scale
        self.clear_after_update, self.cache_hard_negatives, self.mask_duplicates = clear_after_update, cache_hard_negatives, mask_duplicates
        self.start_update, self.query_bank_stop_update = start_update, query_bank_stop_update
        self.bank_dtype = bank_dtype
        self.drift_correction = drift_correction
        self.recent: list[Tuple] = []  # all tuples seen, uncorrected
        self.window, self.largest, self.in_update = 128, 0, 0  # samples that a mean is taken over, of the largest update, since the last
        self.push: Tensor | None = None  # running mean of the gradients on passages
        self.bank: list[Tuple] = []  # oldest first
        self.updates = 0

    def __call__(
        self,
        queries: Tensor,
        positives: Tensor,
        negatives: Tensor | None = None,
        query_keys: Tensor | None = None,
        passage_keys: Tensor | None = None,
    ) -> Tensor:
        if self.similarity == "cosine":
            queries, positives = queries / queries.norm(dim=-1, keepdim=True), positives / positives.norm(dim=-1, keepdim=True)
            negatives = None if negatives is None else negatives / negatives.norm(dim=-1, keepdim=True)
        active = self.updates >= self.start_update
        if self.drift_correction == "mean+zero-sum" and active and self.bank_size:
            together = torch.cat([positives[:, None], *([] if negatives is None else [negatives])], 1)
            together = together if together.requires_grad else together.requires_grad_()
            positives, negatives = together[:, 0], None if negatives is None else together[:, 1:]
        current = []
        for i in range(len(queries)):
            passages = [positives[i], *([] if negatives is None else list(negatives[i]))]
            query_key = None if query_keys is None or not self.mask_duplicates else int(query_keys[i])
            keys = None if passage_keys is None or not self.mask_duplicates else passage_keys[i].tolist()
            current.append(Tuple(queries[i], passages, query_key, keys))

        bank = self.bank if active else []
        if self.drift_correction is not None and active and self.bank_size:
            self.recent, self.in_update = [*self.recent, *current], self.in_update + len(current)
            bank = [self._moved(t, +1) for t in bank]
        query_bank_on = self.query_bank_stop_update is None or self.updates < self.query_bank_stop_update
        bank_rows = bank[max(0, len(bank) - self.query_bank_size) :] if query_bank_on and self.query_bank_size else []
        rows = [*current, *bank_rows]
        total = sum(self._row_loss(row, [*current, *bank]) for row in rows)
        if active and self.bank_size:
            self.bank = [*self.bank, *(self._stored(self._moved(t, -1)) for t in current)][-self.bank_size :]
        with_scale = total / (len(rows) if self.gradient_scale == "paper" else len(current))
        if self.drift_correction == "mean+zero-sum" and active and self.bank_size:
            with_scale = self._without_push(with_scale, together)
        return (total / len(rows)).detach() + with_scale - with_scale.detach()

    def _without_push(self, loss: Tensor, passages: Tensor) -> Tensor:
        """With gradients on the passages (n, c, d) that lack their running mean. The current tuples are counted already."""
        (gradients,) = torch.autograd.grad(loss, passages, retain_graph=True)
        each = [gradient for of_tuple in gradients for gradient in of_tuple]
        weight = min(1.0, len(passages) / min(len(self.recent), 16))
        own = sum(each) / len(each)
        self.push = own if self.push is None else (1 - weight) * self.push + weight * own
        return loss - (passages * self.push).sum()

    def _row_loss(self, row: Tuple, tuples: list[Tuple]) -> Tensor:
        scores, positive = [], None
        for other in tuples:
            for j, passage in enumerate(other.passages):
                score = self.scale * (row.query * passage).sum()
                if other is row and j == 0:
                    positive = score
                elif row.passage_keys is not None and other.passage_keys[j] == row.passage_keys[0]:
                    continue  # the row's positive, standing elsewhere
                elif row.query_key is not None and j == 0 and other.query_key == row.query_key:
                    continue  # the positive of an identical query
                scores.append(score)
        return torch.stack(scores).logsumexp(0) - positive

    def _moved(self, t: Tuple, sign: int) -> Tuple:
        """With the present means added (and unit length again) or taken off."""
        if self.drift_correction is None:
            return t
        window = self.recent[-self.window :]
        means = [torch.stack([w.query.detach() for w in window]).mean(0), torch.stack([w.passages[0].detach() for w in window]).mean(0)]
        if len(window[0].passages) > 1 and self.cache_hard_negatives:
            means += [torch.stack([p.detach() for w in window for p in w.passages[1:]]).mean(0)] * (len(window[0].passages) - 1)

        def move(vector: Tensor, mean: Tensor) -> Tensor:
            vector = vector.detach() + sign * mean
            return vector / vector.norm() if self.similarity == "cosine" and sign > 0 else vector

        passages = [move(p, mean) for p, mean in zip(t.passages, means[1:], strict=False)]
        return Tuple(move(t.query, means[0]), passages, t.query_key, t.passage_keys, t.age)

    def _stored(self, t: Tuple) -> Tuple:
        def store(vector: Tensor) -> Tensor:
            vector = vector.detach().clone()
            return vector if self.bank_dtype is None else vector.to(self.bank_dtype).to(vector.dtype)

        passages = t.passages if self.cache_hard_negatives else t.passages[:1]
        return Tuple(store(t.query), [store(p) for p in passages], t.query_key, t.passage_keys)

    def after_update(self, lr_fraction: float = 1.0) -> None:
        self.updates += 1
        if not self.clear_after_update:
            self.largest, self.in_update = max(self.largest, self.in_update), 0
            self.window = self.largest or self.window
        for t in self.bank:
            t.age += lr_fraction
        if self.clear_after_update:
            self.bank, self.recent, self.window, self.largest, self.in_update = [], [], 128, 0, 0
            self.push = None
