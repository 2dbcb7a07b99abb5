"""Dual-bank InfoNCE as pure functions: the definition, and an incremental version that equals it.

A *tuple* is one query, its positive and its ``h`` hard negatives. The score matrix of one micro-step has

1. rows: the ``n`` current queries, then the ``r`` queries of the bank;
2. columns: the passages of the current tuples, then those of the ``m`` banked tuples;
3. entries ``scale * <query, passage>``, ``-inf`` where a duplicate is masked (`duplicate_mask`);
4. a target per row: the positive of the row's own tuple;
5. loss: the mean over all ``n + r`` rows of ``logsumexp(row) - target``, in nats per row;
6. gradients: those of the sum over rows divided by ``n`` ("in-batch"), or by ``n + r`` ("paper"). Divided by ``n`` they keep the scale of
   training without a bank. Divided by ``n + r`` they shrink as the bank fills, and Adam remembers the large ones for a thousand updates.

`naive_dual_bank_infonce` writes exactly this down and leaves the gradients to autograd. `dual_bank_infonce` computes only the
blocks that touch a current vector, O(n m d) instead of O(m^2 d): the block of bank rows and bank columns is constant, so it
enters as one number per row (`Past.log_sums`). Gradients are computed in closed form in the forward pass, hence nothing of the
bank is saved for backward and its buffers may be overwritten at once. Vectors are taken as they are: for cosine, normalise them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

GRADIENT_SCALES = ("in-batch", "paper")
CHUNK_SCORES = 16_777_216  # scores between bank entries held at a time
_CHUNK_ROWS = 8192  # bank rows cast to the computing precision at a time, where the bank is stored in another


@dataclass(frozen=True)
class Rows:
    """Queries that ask, each belonging to a tuple."""

    queries: Tensor  # (r, d)
    ids: Tensor  # (r,) number of the tuple
    query_keys: Tensor | None = None  # (r,)
    positive_keys: Tensor | None = None  # (r,)
    positives: Tensor | None = None  # (r, d) where the comparison asks for them
    guide: Tensor | None = None  # (r, g) a guide's vectors of the queries
    guide_positives: Tensor | None = None  # (r, g)

    def __len__(self) -> int:
        return len(self.queries)

    def part(self, start: int, stop: int) -> Rows:
        parts: dict[str, Any] = {name: None if value is None else value[start:stop] for name, value in vars(self).items()}
        return Rows(**parts)


@dataclass(frozen=True)
class Columns:
    """Passages that answer, grouped by tuple; `passages[:, 0]` are the positives."""

    passages: Tensor  # (m, c, d)
    ids: Tensor  # (m,) number of the tuple
    query_keys: Tensor | None = None  # (m,)
    passage_keys: Tensor | None = None  # (m, c)
    guide: Tensor | None = None  # (m, c, g) a guide's vectors of the passages

    def __len__(self) -> int:
        return len(self.passages)

    def positives_only(self) -> Columns:
        keys = None if self.passage_keys is None else self.passage_keys[:, :1]
        return Columns(self.passages[:, :1], self.ids, self.query_keys, keys, None if self.guide is None else self.guide[:, :1])


@dataclass(frozen=True)
class Past:
    """The bank as one micro-step sees it."""

    rows: Rows
    columns: Columns
    log_sums: Tensor  # (r,) logsumexp of each bank row over all bank columns; (r, softmaxes) of a general comparison
    positive_scores: Tensor  # (r,) score of each bank row's positive


@dataclass(frozen=True)
class Gradients:
    queries: Tensor  # (n, d)
    passages: Tensor  # (n, c, d)
    divisor: int  # of the sum over rows that they are the gradients of


@dataclass(frozen=True)
class Blocks:
    """The score blocks of one micro-step that touch a current vector: (rows, tuples, passages per tuple)."""

    current_current: Tensor  # (n, n, c)
    current_bank: Tensor | None  # (n, m, c')
    bank_current: Tensor | None  # (r, n, c)
    left_out: Tensor | None = None  # negatives of the current rows that were too similar, where they are looked for


def duplicate_mask(rows: Rows, columns: Columns, share_tuples: bool = True) -> Tensor | None:
    """True where a column must not count as a negative of a row: (r, m, c), or None where no keys are known.

    A row's texts are its query and its positive. That is a passage equal to one of them, or the positive of a query that is; never the
    row's own positive. Where rows and columns are known not to `share_tuples`, there is no such to look for.
    """
    mask = None
    for text in (rows.positive_keys, rows.query_keys):
        if text is not None and columns.passage_keys is not None:
            equal = text[:, None, None] == columns.passage_keys
            mask = equal if mask is None else mask.logical_or_(equal)
    for text in (rows.positive_keys, rows.query_keys):
        if text is not None and columns.query_keys is not None:
            if mask is None:
                mask = torch.zeros((len(rows), *columns.passages.shape[:2]), dtype=torch.bool, device=columns.passages.device)
            mask[:, :, 0].logical_or_(text[:, None] == columns.query_keys)
    if mask is not None and share_tuples:
        if rows.ids is columns.ids:
            mask[:, :, 0].fill_diagonal_(False)
        else:
            mask[:, :, 0].logical_and_(rows.ids[:, None] != columns.ids)
    return mask


def score_block(rows: Rows, columns: Columns, scale: float, share_tuples: bool = True) -> Tensor:
    """Masked scores of every row with every passage: (r, m, c)."""
    scores = _products(rows.queries, columns.passages.flatten(0, 1), scale).view(len(rows), *columns.passages.shape[:2])
    mask = duplicate_mask(rows, columns, share_tuples)
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)


def row_log_sums(rows: Rows, columns: Columns, scale: float) -> Tensor:
    """(r,) logsumexp of each row over all columns, a bounded number of scores at a time.

    Where that takes several times, float32 vectors are rounded to TF32's ten bits of mantissa: on CUDA tensor cores multiply such.
    """
    step = max(1, CHUNK_SCORES // columns.passages[..., 0].numel())
    if fast := len(rows) > step:
        rows = replace(rows, queries=rounded_to_tf32(rows.queries))
        columns = replace(columns, passages=rounded_to_tf32(columns.passages))
    with torch.autocast(columns.passages.device.type, enabled=False), tensor_cores() if fast else nullcontext():
        parts = [score_block(rows.part(i, i + step), columns, scale).flatten(1).logsumexp(1) for i in range(0, len(rows), step)]
    return torch.cat(parts) if parts else rows.queries.new_empty(0)


def rounded_to_tf32(vectors: Tensor) -> Tensor:
    """To the nearest: tensor cores would cut the digits off, which makes every score too small."""
    if vectors.dtype != torch.float32:
        return vectors
    rounded = (vectors.view(torch.int32) + 0x1000).bitwise_and_(~0x1FFF).view(torch.float32)
    return rounded.masked_fill_(vectors.isnan(), torch.nan)  # the sum turns some NaN, CUDA's own among them, into 0 or infinity


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Inside, float32 products on a CUDA device may use TF32 tensor cores; then the global setting is what it was."""
    matmul = torch.backends.cuda.matmul
    # Since PyTorch 2.9; to touch the older setting there too would make its readers raise an error.
    name, fast = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    setattr(matmul, name, fast)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def over_passages(scores: Tensor) -> Tensor:
    """logsumexp over the last dimension, which mostly has one or two entries."""
    if scores.shape[-1] == 1:
        return scores.squeeze(-1)
    if scores.shape[-1] == 2:
        return torch.logaddexp(scores[..., 0], scores[..., 1])
    return scores.logsumexp(-1)


def naive_dual_bank_infonce(
    rows: Rows, columns: Columns, past_rows: Rows, past_columns: Columns, scale: float = 1.0, gradient_scale: str = "in-batch"
) -> Tensor:
    """The definition: the full (n + r) x (all passages) matrix, one softmax, gradients by autograd."""
    scores, targets = [], []
    for block_rows in (rows, past_rows):
        blocks = []
        for block_columns in (columns, past_columns):
            products = torch.einsum("rd,mcd->rmc", block_rows.queries, block_columns.passages) * scale
            mask = duplicate_mask(block_rows, block_columns)
            blocks.append((products if mask is None else products.masked_fill(mask, -torch.inf)).flatten(1))
        scores.append(torch.cat(blocks, dim=1))
    c, c_past = columns.passages.shape[1], past_columns.passages.shape[1]
    targets = [torch.arange(len(rows), device=rows.ids.device) * c]
    own_tuple = (past_rows.ids[:, None] == past_columns.ids).int().argmax(dim=1) if len(past_rows) else past_rows.ids
    targets.append(len(columns) * c + own_tuple * c_past)
    loss_sum = torch.nn.functional.cross_entropy(torch.cat(scores), torch.cat(targets), reduction="sum")
    loss = loss_sum / (len(rows) + len(past_rows))
    with_scale = loss_sum / divisor(len(rows), len(past_rows), gradient_scale)
    return loss.detach() + with_scale - with_scale.detach()  # the value of one, the gradients of the other


def dual_bank_infonce(
    rows: Rows, columns: Columns, past: Past | None, scale: float = 1.0, gradient_scale: str = "in-batch"
) -> tuple[Tensor, Gradients, Blocks]:
    """Loss and gradients of `naive_dual_bank_infonce`, without the bank-to-bank block.

    Returns detached tensors; `with_gradients` attaches them to the autograd graph.
    """
    with torch.no_grad(), torch.autocast(rows.queries.device.type, enabled=False):
        blocks = _score_blocks(rows, columns, past, scale)
        n, r = len(rows), 0 if past is None else len(past.rows)
        divided_by = divisor(n, r, gradient_scale)
        weight = scale / divided_by

        # Current rows: softmax over current, then banked columns.
        own = blocks.current_current.flatten(1)  # (n, n * c)
        log_softmax = (own if blocks.current_bank is None else torch.cat([own, blocks.current_bank.flatten(1)], 1)).log_softmax(1)
        weights = log_softmax[:, : own.shape[1]]
        of_positives = weights.view_as(blocks.current_current)[:, :, 0].diagonal()  # (n,)
        loss_sum = -of_positives.sum()
        # Softmax minus one at the positive. That one is minus the sum of all others: no digits are lost where it is close to zero.
        log_softmax.exp_()
        of_positives.zero_().sub_(log_softmax.sum(1))
        grad_queries = weights @ columns.passages.flatten(0, 1)
        grad_passages = (weights.T @ rows.queries).view_as(columns.passages)
        if past is not None and blocks.current_bank is not None:
            grad_queries += _weighted_sums(log_softmax[:, own.shape[1] :], past.columns.passages.flatten(0, 1))

        # Bank rows: constant but for the current columns. This is what keeps the two towers balanced.
        if past is not None and blocks.bank_current is not None:
            log_softmax = torch.cat([past.log_sums[:, None], blocks.bank_current.flatten(1)], 1).log_softmax(1)  # (r, 1 + n * c)
            loss_sum = loss_sum + (past.log_sums - log_softmax[:, 0] - past.positive_scores).sum()
            grad_passages += _weighted_sums(log_softmax[:, 1:].exp().T, past.rows.queries).view_as(columns.passages)

        gradients = Gradients(grad_queries.mul_(weight), grad_passages.mul_(weight), divided_by)
        return loss_sum / (n + r), gradients, blocks


def with_gradients(loss: Tensor, gradients: Gradients, queries: Tensor, passages: Tensor) -> Tensor:
    """`loss` as a function of `queries` and `passages` whose gradients are the given ones."""
    result: Tensor = _KnownGradients.apply(loss, gradients.queries, gradients.passages, queries, passages)
    return result


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, grad_queries: Tensor, grad_passages: Tensor, queries: Tensor, passages: Tensor) -> Tensor:
        ctx.save_for_backward(grad_queries, grad_passages)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_queries, grad_passages = ctx.saved_tensors
        return None, None, None, grad_output * grad_queries, grad_output * grad_passages


def unit_vectors(vectors: Tensor) -> Tensor:
    """`torch.nn.functional.normalize` of the last dimension, with a backward pass of four operations instead of thirteen."""
    result: Tensor = _UnitVectors.apply(vectors)
    return result


class _UnitVectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min_(1e-12)
        units: Tensor = vectors / lengths
        ctx.save_for_backward(units, lengths)
        return units

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        units, lengths = ctx.saved_tensors
        along = (units * grad_output).sum(-1, keepdim=True)
        across: Tensor = torch.addcmul(grad_output, units, along, value=-1).div_(lengths)
        return across


def _score_blocks(rows: Rows, columns: Columns, past: Past | None, scale: float) -> Blocks:
    return Blocks(
        current_current=score_block(rows, columns, scale),
        current_bank=score_block(rows, past.columns, scale, False) if past is not None and len(past.columns) else None,
        bank_current=score_block(past.rows, columns, scale, False) if past is not None and len(past.rows) else None,
    )


def divisor(n: int, r: int, gradient_scale: str) -> int:
    if gradient_scale not in GRADIENT_SCALES:
        raise ValueError(f"gradient_scale={gradient_scale!r} is unknown; choose one of {', '.join(GRADIENT_SCALES)}")
    return n + r if gradient_scale == "paper" else n


def _products(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right.T in at least single precision: (a, d), (b, d) -> (a, b)."""
    dtype = _computing_dtype(left, right)
    if left.dtype == right.dtype == dtype:
        return _scaled_product(left, right, scale)
    parts = [
        torch.cat([_scaled_product(a.to(dtype), b.to(dtype), scale) for b in right.split(_CHUNK_ROWS)], 1) for a in left.split(_CHUNK_ROWS)
    ]
    return torch.cat(parts)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.addmm(left.new_empty(()), left, right.T, beta=0, alpha=scale)  # one pass: the first argument is not read


def _weighted_sums(weights: Tensor, vectors: Tensor) -> Tensor:
    """weights @ vectors in at least single precision: (a, b), (b, d) -> (a, d)."""
    dtype = _computing_dtype(weights, vectors)
    if weights.dtype == vectors.dtype == dtype:
        return weights @ vectors
    total = weights.new_zeros((len(weights), vectors.shape[1]), dtype=dtype)
    for w, v in zip(weights.split(_CHUNK_ROWS, dim=1), vectors.split(_CHUNK_ROWS), strict=True):
        total.addmm_(w.to(dtype), v.to(dtype))
    return total


def _computing_dtype(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
