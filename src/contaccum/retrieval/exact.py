"""Exact search over vectors on disk, in memory that does not grow with them.

A score is the inner product in float64, rounded to float32; a query's result is its k highest scores, equal ones by id. That is the
definition (`brute_force`), and neither device, number of shards nor threads changes it:

1. The vectors stream past in blocks. A block's scores are computed in a fast type, and every pair is proposed (query, vector) whose
   score lies within the rounding error of the k-th best so far. That error is at most `Products.error` * |query| * |vector|. Where the
   fast type is bfloat16 and many pairs lie so close together, as a trained model's do, float32 has another look.
2. Proposed pairs, few after the first blocks, are scored in float64. Where a good part of all pairs would be proposed, as of vectors that
   are nearly alike (a collapsed model's), all are scored, and the k best of the block taken there and then.
3. They join the running k best of their queries; only there are ids compared, and only between equal scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contaccum.common.errors import DataError
from contaccum.retrieval.batches import ahead
from contaccum.retrieval.device import check_device
from contaccum.retrieval.shards import Vectors
from contaccum.retrieval.topk import TopK

BLOCK_ROWS = {"cpu": 32_768, "cuda": 262_144}
SCORES_AT_ONCE = {"cpu": 2**23, "cuda": 2**26}  # of a block of queries with a block of vectors
PORTION = 16_384  # of a block's vectors, in float64
RESCORED_AT_ONCE = 65_536
LENGTHS_AT_ONCE = 512  # on a CPU, what stays in its cache: six times as fast as all
DENSE = 1 / 32  # of all pairs proposed: scoring all of them is faster
SPARE = 16  # pairs beyond k for each query that count as few

Pairs = tuple[Tensor, Tensor]  # rows of queries, rows of the block


def brute_force(queries: NDArray[Any], vectors: NDArray[Any], ids: NDArray[Any], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The definition: (scores, rows), each (queries, min(k, vectors))."""
    scores = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    order = np.stack([np.lexsort((ids, -row))[:k] for row in scores])
    return np.take_along_axis(scores, order, 1), order


def exact_search(
    queries: NDArray[Any],
    vectors: Vectors,
    k: int,
    device: str | None = None,
    advance: Callable[[int], object] = lambda vectors: None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Equals `brute_force`. `advance` is called with the number of vectors that have passed. Queries and results must fit in memory."""
    check_device(device)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    asked = torch.from_numpy(np.ascontiguousarray(queries)).to(place)
    half = asked.dtype == torch.float16 and vectors.dtype == np.float16
    kinds = [Products(asked, dtype) for dtype in fast_types(place, half)]
    best = TopK(len(queries), min(k, len(vectors)), vectors.ids_at)
    with _full_precision():
        for start, raw in ahead(vectors.blocks(of_device(BLOCK_ROWS, place))):
            _search_block(kinds, torch.from_numpy(raw).to(place), start, best)
            advance(len(raw))
    return best.scores, best.rows


def fast_types(place: torch.device, half: bool) -> list[torch.dtype]:
    """In which products are fast: float16 on a GPU where all vectors are so, bfloat16 first on a CPU that has instructions for it."""
    if place.type == "cuda":
        return [torch.float16 if half else torch.float32]
    return [torch.bfloat16, torch.float32] if place.type == "cpu" and torch.cpu._is_avx512_bf16_supported() else [torch.float32]


class Products:
    """All inner products of queries with a block in a fast type, in buffers that are used again: fresh memory costs as much as the work."""

    def __init__(self, queries: Tensor, dtype: torch.dtype) -> None:
        self.queries, self.dtype = queries, dtype
        self.fast = queries.to(dtype)
        self.lengths = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float32)
        # Sums of dim single-precision products; twice the bound of rounding to nearest, since a GPU may truncate.
        self.error = 2 * (queries.shape[1] + 4) * 2.0**-24
        if dtype == torch.bfloat16:  # 2^-9 from rounding each factor, and the result
            self.error += 1.01 * 3 * 2.0**-9
        self._buffers: dict[str, Tensor] = {}

    def convert(self, block: Tensor) -> Tensor:
        """The block in the fast type; valid until the next one."""
        return block if block.dtype == self.dtype else self._buffer("block", block.shape, self.dtype).copy_(block)

    def scores(self, begin: int, end: int, block: Tensor) -> Tensor:
        """(queries, block); valid until the next call."""
        part = self.fast[begin:end]
        if self.dtype == torch.float16:
            return torch.mm(part, block.T, out_dtype=torch.float32)
        return torch.mm(part, block.T, out=self._buffer("scores", (len(part), len(block)), self.dtype))

    def passing(self, scores: Tensor, lowest: Tensor) -> Tensor:
        """Which scores reach `lowest`, which is rounded down where scores have fewer digits."""
        floor = lowest.to(scores.dtype)
        floor = torch.where(floor.float() > lowest, torch.nextafter(floor, torch.full_like(floor, -torch.inf)), floor)
        return torch.ge(scores, floor[:, None], out=self._buffer("passing", scores.shape, torch.bool))

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size, known = math.prod(shape), self._buffers.get(name)
        if known is None or known.numel() < size:
            self._buffers[name] = known = torch.empty(size, dtype=dtype, device=self.queries.device)
        return known[:size].view(shape)


def _search_block(kinds: Sequence[Products], block: Tensor, start: int, best: TopK) -> None:
    """Steps 1 to 3 for one block, queries in blocks too."""
    converted, queries = [products.convert(block) for products in kinds], kinds[0].queries
    longest, by_id = 1.01 * _longest(converted[-1]), None
    if not math.isfinite(longest):  # as that of one such vector is
        check_finite(block, start)
    size = max(1, of_device(SCORES_AT_ONCE, block.device) // len(block))
    for begin in range(0, len(queries), size):
        floors = torch.from_numpy(best.floors(begin, begin + size)).to(block.device)
        for products, fast in zip(kinds, converted, strict=True):
            errors = products.error * longest * products.lengths[begin : begin + size]
            share = DENSE if products is kinds[-1] else 0.0
            pairs = _propose(products, begin, begin + len(floors), fast, floors, errors, best.k, share)
            if pairs is not None:
                break
        if pairs is not None:
            rows, columns = pairs
            scores = _exact_scores(queries[begin : begin + size], block, rows, columns)
        else:
            by_id = _by_id(best, start, block) if by_id is None else by_id
            rows, columns, scores = _best_of_all(queries[begin : begin + size], block, by_id, best.k)
        best.add(rows.cpu().numpy() + begin, scores.cpu().numpy(), columns.cpu().numpy() + start)


def check_finite(vectors: Tensor, start: int, what: str = "passage") -> None:
    """DataError where one of these vectors, which begin with row `start`, is NaN or infinite: it has no place in any order."""
    odd = (~torch.isfinite(vectors)).any(1).nonzero()
    if len(odd):
        raise DataError(f"the vector of {what} {start + int(odd[0, 0]):,} (from 0) is not finite; encode with a model that is whole")


def _longest(block: Tensor) -> float:
    """Length of the longest vector."""
    portions = block.split(LENGTHS_AT_ONCE if block.device.type == "cpu" else RESCORED_AT_ONCE)
    return float(torch.stack([torch.linalg.vector_norm(part.float(), dim=1).max() for part in portions]).max())


def _exact_scores(queries: Tensor, block: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """float64 inner products of these pairs, rounded to float32."""
    if block.device.type == "cpu":
        return torch.from_numpy(_scores_by_query(queries.double().numpy(), block.numpy(), rows.numpy(), columns.numpy()))
    chunks = zip(rows.split(RESCORED_AT_ONCE), columns.split(RESCORED_AT_ONCE), strict=True)
    scores = [(queries[row].double() * block[column].double()).sum(1).float() for row, column in chunks]
    return torch.cat(scores) if scores else torch.empty(0)


def _scores_by_query(queries: NDArray[Any], block: NDArray[Any], rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.float32]:
    """The same for rows in rising order, a query at a time: what it takes stays in a core's cache."""
    scores = np.empty(len(rows), np.float32)
    bounds = [*np.flatnonzero(np.diff(rows, prepend=-1)), len(rows)]
    for start, end in pairwise(bounds):
        scores[start:end] = block[columns[start:end]].astype(np.float64) @ queries[rows[start]]
    return scores


def _by_id(best: TopK, start: int, block: Tensor) -> Tensor:
    """The block's rows in the order of their ids."""
    return torch.from_numpy(np.argsort(best.ids_at(np.arange(start, start + len(block))))).to(block.device)


def _best_of_all(queries: Tensor, block: Tensor, by_id: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, columns, scores) of each query's k best in the block, of equal scores those of the first ids."""
    asked, portions = queries.double(), by_id.split(PORTION)
    scores = torch.cat([torch.mm(asked, block[portion].double().T).float() for portion in portions], dim=1)
    kth = scores.topk(min(k, len(block))).values[:, -1:]
    above, level = scores > kth, scores == kth
    places = k - above.sum(1, keepdim=True)
    rows, columns = (above | (level & (level.cumsum(1) <= places))).nonzero(as_tuple=True)
    return rows, by_id[columns], scores[rows, columns]


def _propose(products: Products, begin: int, end: int, block: Tensor, floors: Tensor, errors: Tensor, k: int, share: float) -> Pairs | None:
    """Every pair of these queries and the block that can be among its query's k best, given that k others reach `floors` (-inf: none).

    None where that is more than a few for each query, and more than this share of all.
    """
    scores, lowest = products.scores(begin, end, block), floors - errors  # (queries, block)
    passing, few = products.passing(scores, lowest), len(scores) * (2 * k + SPARE)
    if _count(passing) > few:  # as of the first block, all: its own k-th best are better floors
        kth = scores.topk(k).values[:, -1].float()
        passing = products.passing(scores, torch.maximum(lowest, kth - 2 * errors))
        if _count(passing) > max(few, share * passing.numel()):
            return None
    return _pairs(passing)


def _count(passing: Tensor) -> int:
    return int(np.count_nonzero(passing.numpy()) if passing.device.type == "cpu" else torch.count_nonzero(passing))


def _pairs(passing: Tensor) -> Pairs:
    if passing.device.type != "cpu":
        rows, columns = passing.nonzero(as_tuple=True)
        return rows, columns
    # numpy skips long runs of False ten times faster than torch does.
    flat = torch.from_numpy(np.flatnonzero(passing.numpy()))
    return flat // passing.shape[1], flat % passing.shape[1]


def of_device(table: dict[str, int], device: torch.device) -> int:
    return table.get(device.type, table["cpu"])


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 products in float32, whatever the caller has allowed: the error bound rests on it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
