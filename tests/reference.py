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
    guide_query: Tensor | None = None
    guide_passages: list[Tensor] | None = None


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
        directions: tuple[str, ...] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        margin: float | None = None,
        margin_strategy: str = "absolute",
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
        self.push: dict[int, tuple[Tensor, int]] = {}  # by width: running mean of the gradients on passages, and of how many samples
        self.directions, self.partition_mode, self.margin, self.margin_strategy = directions, partition_mode, margin, margin_strategy
        self.hardness_mode, self.hardness_strength = hardness_mode, hardness_strength
        self.left_out = 0  # of the last call: too similar to be negatives of the current rows by their queries
        self.bank: list[Tuple] = []  # oldest first
        self.updates = 0

    def __call__(
        self,
        queries: Tensor,
        positives: Tensor,
        negatives: Tensor | None = None,
        query_keys: Tensor | None = None,
        passage_keys: Tensor | None = None,
        guide: tuple[Tensor, Tensor] | None = None,
        whole: list[Tensor | None] | None = None,
        first: bool = True,
        last: bool = True,
    ) -> Tensor:
        """With `whole` the vectors are a cut of those, at the `first` or `last` of several widths: means and bank are of the whole ones."""
        if self.similarity == "cosine":
            queries, positives = queries / queries.norm(dim=-1, keepdim=True), positives / positives.norm(dim=-1, keepdim=True)
            negatives = None if negatives is None else negatives / negatives.norm(dim=-1, keepdim=True)
        active = self.updates >= self.start_update
        if self.drift_correction == "mean+zero-sum" and active and self.bank_size:
            together = torch.cat([positives[:, None], *([] if negatives is None else [negatives])], 1)
            together = together if together.requires_grad else together.requires_grad_()
            positives, negatives = together[:, 0], None if negatives is None else together[:, 1:]
        current = self._tuples(queries, positives, negatives, query_keys, passage_keys, guide)
        entering = current if whole is None else self._tuples(*whole, query_keys, passage_keys, guide)
        width = None if whole is None else queries.shape[1]

        bank = self.bank if active else []
        if self.drift_correction is not None and active and self.bank_size:
            if first:
                self.recent, self.in_update = [*self.recent, *entering], self.in_update + len(current)
            bank = [self._moved(t, +1) for t in bank]
        bank = bank if width is None else [self._cut(t, width) for t in bank]
        self.left_out, self.current = 0, current
        query_bank_on = self.query_bank_stop_update is None or self.updates < self.query_bank_stop_update
        bank_rows = bank[max(0, len(bank) - self.query_bank_size) :] if query_bank_on and self.query_bank_size else []
        rows = [*current, *bank_rows]
        total = sum(self._row_loss(row, [*current, *bank], rows) for row in rows)
        if active and self.bank_size and last:
            self.bank = [*self.bank, *(self._stored(self._moved(t, -1)) for t in entering)][-self.bank_size :]
        divisor = len(rows) if self.gradient_scale == "paper" else len(current)
        with_scale = total / divisor
        if self.drift_correction == "mean+zero-sum" and active and self.bank_size:
            with_scale = self._without_push(with_scale, together, divisor)
        return (total / len(rows)).detach() + with_scale - with_scale.detach()

    def _without_push(self, loss: Tensor, passages: Tensor, divisor: int) -> Tensor:
        """With gradients on the passages (n, c, d) that lack the running mean of what the sum over rows gives. The current tuples are
        counted already."""
        (gradients,) = torch.autograd.grad(loss, passages, retain_graph=True)
        each = [gradient * divisor for of_tuple in gradients for gradient in of_tuple]
        push, count = self.push.get(passages.shape[-1], (torch.zeros(()), 0))
        weight = min(1.0, len(passages) / min(count + len(passages), 16))
        push = (1 - weight) * push + weight * (sum(each) / len(each))
        self.push[passages.shape[-1]] = push, count + len(passages)
        return loss - (passages * push).sum() / divisor

    def _tuples(self, queries, positives, negatives, query_keys, passage_keys, guide) -> list[Tuple]:
        found = []
        for i in range(len(queries)):
            passages = [positives[i], *([] if negatives is None else list(negatives[i]))]
            query_key = None if query_keys is None or not self.mask_duplicates else int(query_keys[i])
            keys = None if passage_keys is None or not self.mask_duplicates else passage_keys[i].tolist()
            of_guide = (None, None) if guide is None else (guide[0][i], list(guide[1][i]))
            found.append(Tuple(queries[i], passages, query_key, keys, 0.0, *of_guide))
        return found

    def _cut(self, t: Tuple, width: int) -> Tuple:
        cut = [vector[:width] / vector[:width].norm() for vector in (t.query, *t.passages)]
        return Tuple(cut[0], cut[1:], t.query_key, t.passage_keys, t.age, t.guide_query, t.guide_passages)

    def _row_loss(self, row: Tuple, tuples: list[Tuple], with_queries: list[Tuple]) -> Tensor:
        """`tuples` answer by their passages, those `with_queries` by their queries too."""
        answering = {"query": with_queries, "doc": tuples}
        by_direction = [self._logits(row, *direction.split("_to_"), answering) for direction in self.directions]
        if self.partition_mode == "joint":
            by_direction = [[score for scores in by_direction for score in scores]]
        log_z = sum(torch.stack(scores).logsumexp(0) for scores in by_direction) / len(by_direction)
        return log_z - self.scale * (row.query * row.passages[0]).sum()

    def _logits(self, row: Tuple, asks: str, answers: str, answering: dict[str, list[Tuple]]) -> list[Tensor]:
        asking = row.query if asks == "query" else row.passages[0]
        found = []
        for other in answering[answers]:
            if other is row and asks == answers:
                continue
            for j, answer in enumerate([other.query] if answers == "query" else other.passages):
                similarity = (asking * answer).sum()
                if not (other is row and j == 0):
                    too_similar = self.margin is not None and bool(
                        self._guided(row, other, asks, answers, j, similarity) > self._limit(row)
                    )
                    if self._duplicate(row, other, j):
                        continue
                    self.left_out += too_similar and (asks, answers) == ("query", "doc") and any(row is t for t in self.current)
                    if too_similar:
                        continue
                hard = (asks, answers) == ("query", "doc") and self._hard(other is row, j)
                found.append(self.scale * similarity + (self.hardness_strength * similarity.detach() if hard else 0.0))
        return found

    def _duplicate(self, row: Tuple, other: Tuple, j: int) -> bool:
        """The row's query or positive, standing elsewhere; the positive of a query that is one of them; a query of one of these."""
        texts = {row.query_key, None if row.passage_keys is None else row.passage_keys[0]} - {None}
        if other.passage_keys is not None and other.passage_keys[j] in texts:
            return True
        return j == 0 and other.query_key in texts

    def _hard(self, own: bool, j: int) -> bool:
        hard = {"in_batch_negatives": not own, "hard_negatives": own and j > 0, "all_negatives": not (own and j == 0), None: False}
        return hard[self.hardness_mode]

    def _guided(self, row: Tuple, other: Tuple, asks: str, answers: str, j: int, similarity: Tensor) -> Tensor:
        if row.guide_query is None:
            return similarity.detach()
        asking = row.guide_query if asks == "query" else row.guide_passages[0]
        answer = other.guide_query if answers == "query" else other.guide_passages[j]
        return torch.cosine_similarity(asking, answer, dim=0)

    def _limit(self, row: Tuple) -> Tensor:
        positive = self._guided(row, row, "query", "doc", 0, (row.query * row.passages[0]).sum())
        return positive - (self.margin if self.margin_strategy == "absolute" else self.margin * positive.abs())

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
        return Tuple(move(t.query, means[0]), passages, t.query_key, t.passage_keys, t.age, t.guide_query, t.guide_passages)

    def _stored(self, t: Tuple) -> Tuple:
        def store(vector: Tensor) -> Tensor:
            vector = vector.detach().clone()
            return vector if self.bank_dtype is None else vector.to(self.bank_dtype).to(vector.dtype)

        passages = t.passages if self.cache_hard_negatives else t.passages[:1]
        return Tuple(store(t.query), [store(p) for p in passages], t.query_key, t.passage_keys, 0.0, t.guide_query, t.guide_passages)

    def after_skipped_update(self) -> None:
        self.in_update = 0

    def after_update(self, lr_fraction: float = 1.0) -> None:
        self.updates += 1
        if not self.clear_after_update:
            self.largest, self.in_update = max(self.largest, self.in_update), 0
            self.window = max(self.largest, 16) if self.largest else self.window
        for t in self.bank:
            t.age += lr_fraction
        if self.clear_after_update:
            self.bank, self.recent, self.window, self.largest, self.in_update = [], [], 128, 0, 0
            self.push = {}
