"""What a row is compared with, beyond queries with passages: other directions, harder negatives, and negatives that are left out.

A row is a tuple i with a query q_i and a positive p_i; a column is a tuple j with a query q_j and passages p_j0 (its positive), p_j1, ...
Both may be current or banked. A banked tuple is compared by its query as long as the query bank holds it.

| direction        | similarity | of the row's own tuple                                                        |
|------------------|------------|-------------------------------------------------------------------------------|
| `query_to_doc`   | q_i . p_jc | its positive is the target, its hard negatives are negatives                  |
| `query_to_query` | q_i . q_j  | nothing                                                                       |
| `doc_to_query`   | p_i . q_j  | its query: the target once more                                               |
| `doc_to_doc`     | p_i . p_jc | nothing                                                                       |

1. A negative is left out where it is a duplicate (`contaccum.core.infonce.duplicate_mask`), or where it is too similar to be a negative:
   more than the row's limit, q_i . p_i0 minus a margin. Where a guide's vectors are given, similarities and limits are the guide's. The own
   pair stays. Left out or not is a constant: no gradient goes through it.
2. The logit of what stays is scale * similarity. `hardness_mode` adds hardness_strength * similarity, as a constant, to some negatives of
   `query_to_doc`.
3. log Z is the logsumexp of a row's logits over all directions ("joint"), or the mean of one for each ("per_direction").
4. The loss of a row is log Z - scale * q_i . p_i0. Mean over rows, bank rows and gradients are as in `contaccum.core.infonce`.

`general_infonce` leaves the gradients to autograd, for the scores that touch a current vector. Those of bank rows over bank columns are
computed first, in chunks and without a graph, and enter as one number per softmax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contaccum.core.infonce import CHUNK_SCORES, Blocks, Columns, Gradients, Past, Rows, divisor, duplicate_mask, row_log_sums

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITIONS = ("joint", "per_direction")
HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")
MARGINS = ("absolute", "relative")


@dataclass(frozen=True)
class Comparison:
    """Options of the scores. The first four names are those of sentence-transformers' losses.

    directions, partition_mode, hardness_mode, hardness_strength: as in `MultipleNegativesRankingLoss`.
    margin: leave out negatives whose similarity is above the positive's minus this ("absolute"), or minus this part of its magnitude
        ("relative"). -0.1 is Qwen3-Embedding's filter, 0.05 and "relative" NV-Retriever's. None: no filter.
    """

    scale: float = 1.0
    directions: tuple[str, ...] = ("query_to_doc",)
    partition_mode: str = "joint"
    hardness_mode: str | None = None
    hardness_strength: float = 0.0
    margin: float | None = None
    margin_strategy: str = "absolute"

    @property
    def plain(self) -> bool:
        """Queries over passages and nothing else: what `contaccum.core.infonce` has in closed form."""
        return self.directions == ("query_to_doc",) and not self.hardens and self.margin is None

    @property
    def hardens(self) -> bool:
        return self.hardness_mode is not None and self.hardness_strength > 0

    def limits(self, rows: Rows) -> Tensor | None:
        """(r, 1, 1) similarity above which a negative of a row is left out."""
        if self.margin is None:
            return None
        guided = rows.guide is not None and rows.guide_positives is not None
        asking, answer = (rows.guide, rows.guide_positives) if guided else (rows.queries, rows.positives)
        assert asking is not None
        assert answer is not None
        similarity = (asking.detach() * answer.detach()).sum(1)[:, None, None]
        return similarity - (self.margin if self.margin_strategy == "absolute" else similarity.abs() * self.margin)

    def constants(self, rows: Rows, columns: Columns) -> Tensor:
        """log Z of bank rows over bank columns, a bounded number of scores at a time: (r,) where plain, else (r, one per softmax)."""
        if self.plain:
            return row_log_sums(rows, columns, self.scale)
        sides = [Side(columns, queries_as_columns(rows))]
        step = max(1, CHUNK_SCORES // (len(self.directions) * columns.passages[..., 0].numel()))
        with torch.no_grad(), torch.autocast(columns.passages.device.type, enabled=False):
            parts = [softmaxes(self, rows.part(i, i + step), sides) for i in range(0, len(rows), step)]
            sums = [torch.stack([logits.logsumexp(1) for logits in part], 1) for part in parts]
        return torch.cat(sums) if sums else rows.queries.new_empty(0, 1)


@dataclass(frozen=True)
class Side:
    """Tuples to be compared with, by their passages or by their queries."""

    passages: Columns
    queries: Columns


def queries_as_columns(rows: Rows) -> Columns:
    """Queries that answer. Equal keys mean then: of an identical query, or of a query with the row's positive."""
    keys = None if rows.positive_keys is None else rows.positive_keys[:, None]
    return Columns(rows.queries[:, None], rows.ids, rows.query_keys, keys, None if rows.guide is None else rows.guide[:, None])


def softmaxes(how: Comparison, rows: Rows, sides: list[Side]) -> list[Tensor]:
    """(r, k) logits of each softmax of a row: one in all, or one per direction."""
    by_direction = []
    for direction in how.directions:
        answering = [side.queries if direction.endswith("query") else side.passages for side in sides]
        by_direction.append(torch.cat([logits(how, direction, rows, columns).flatten(1) for columns in answering], 1))
    return [torch.cat(by_direction, 1)] if how.partition_mode == "joint" else by_direction


def logits(how: Comparison, direction: str, rows: Rows, columns: Columns) -> Tensor:
    """(r, m, c), -inf where a negative is left out."""
    similarity = _similarity(rows.queries if direction.startswith("query") else rows.positives, columns.passages)
    scores = how.scale * similarity
    own = rows.ids[:, None] == columns.ids  # (r, m)
    if how.hardens and direction == "query_to_doc":
        scores = scores + how.hardness_strength * similarity.detach() * _hardened(how, own, scores.shape[2])
    duplicates, similar = duplicate_mask(rows, columns), too_similar(how, direction, rows, columns, similarity)
    for mask in (duplicates, similar):
        scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
    of_one_kind = direction in ("query_to_query", "doc_to_doc")
    return scores.masked_fill(own[:, :, None], -torch.inf) if of_one_kind else scores


def too_similar(how: Comparison, direction: str, rows: Rows, columns: Columns, similarity: Tensor) -> Tensor | None:
    """(r, m, c) where a negative is above the row's limit."""
    limits = how.limits(rows)
    if limits is None:
        return None
    if rows.guide is not None and columns.guide is not None:
        similarity = _similarity(rows.guide if direction.startswith("query") else rows.guide_positives, columns.guide)
    mask = similarity.detach() > limits
    mask[:, :, 0] &= rows.ids[:, None] != columns.ids
    return mask


def _hardened(how: Comparison, own: Tensor, passages: int) -> Tensor:
    """(r, m, c) whose logit is raised: negatives of other tuples, hard negatives of the own one, or both."""
    first = torch.arange(passages, device=own.device) == 0
    if how.hardness_mode == "in_batch_negatives":
        return ~own[:, :, None].expand(-1, -1, passages)
    if how.hardness_mode == "hard_negatives":
        return own[:, :, None] & ~first
    return ~(own[:, :, None] & first)


def _similarity(asking: Tensor | None, answering: Tensor) -> Tensor:
    """(r, d), (m, c, d) -> (r, m, c)"""
    assert asking is not None
    dtype = torch.promote_types(torch.promote_types(asking.dtype, answering.dtype), torch.float32)
    return (asking.to(dtype) @ answering.flatten(0, 1).to(dtype).T).view(len(asking), *answering.shape[:2])


def general_infonce(
    rows: Rows, columns: Columns, past: Past | None, how: Comparison, gradient_scale: str
) -> tuple[Tensor, Gradients, Blocks]:
    """Loss and gradients of any comparison, without a graph of the bank-to-bank scores. Returns detached tensors."""
    with torch.enable_grad(), torch.autocast(rows.queries.device.type, enabled=False):
        queries, passages = rows.queries.detach().requires_grad_(), columns.passages.detach().requires_grad_()
        current = replace(columns, passages=passages)
        asking = replace(rows, queries=queries, positives=passages[:, 0])
        side = Side(current, queries_as_columns(asking))
        sides = [side] if past is None else [side, Side(past.columns, queries_as_columns(past.rows))]
        log_z = torch.stack([part.logsumexp(1) for part in softmaxes(how, asking, sides)])
        loss_sum = (log_z.mean(0) - how.scale * (queries * passages[:, 0]).sum(1)).sum()
        n, r = len(rows), 0 if past is None else len(past.rows)
        if past is not None and r:  # bank rows, over current columns and what they have in the bank
            parts = zip(softmaxes(how, past.rows, [side]), past.log_sums.T, strict=True)
            log_z = torch.stack([torch.cat([constant[:, None], part], 1).logsumexp(1) for part, constant in parts])
            loss_sum = loss_sum + (log_z.mean(0) - past.positive_scores).sum()
        divided_by = divisor(n, r, gradient_scale)
        gradients = torch.autograd.grad(loss_sum / divided_by, (queries, passages))
    with torch.no_grad():
        blocks = _blocks(how, replace(rows, positives=columns.passages[:, 0]), columns, past)
    return loss_sum.detach() / (n + r), Gradients(gradients[0], gradients[1], divided_by), blocks


def _blocks(how: Comparison, rows: Rows, columns: Columns, past: Past | None) -> Blocks:
    """Of `query_to_doc`, for whoever watches."""
    similar = [] if how.margin is None else [_left_out(how, rows, each) for each in [columns, *([] if past is None else [past.columns])]]
    return Blocks(
        current_current=logits(how, "query_to_doc", rows, columns),
        current_bank=None if past is None else logits(how, "query_to_doc", rows, past.columns),
        bank_current=None if past is None or not len(past.rows) else logits(how, "query_to_doc", past.rows, columns),
        left_out=torch.stack(similar).sum() if similar else None,
    )


def _left_out(how: Comparison, rows: Rows, columns: Columns) -> Tensor:
    """How many for their similarity alone: duplicates are none."""
    mask = too_similar(how, "query_to_doc", rows, columns, _similarity(rows.queries, columns.passages))
    assert mask is not None
    duplicates = duplicate_mask(rows, columns)
    return (mask if duplicates is None else mask & ~duplicates).sum()
