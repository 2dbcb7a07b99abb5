"""The k best vectors of each query, as they are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

RowNumbers = NDArray[np.int64]


class TopK:
    """Running results: `scores` and `rows`, each (queries, k), best first, equal scores by id; -inf and -1 where none was found yet.

    Args:
        ids_at: rows -> ids that can be compared.
    """

    def __init__(self, queries: int, k: int, ids_at: Callable[[RowNumbers], NDArray[Any]]) -> None:
        self.k, self.ids_at = k, ids_at
        self.scores = np.full((queries, k), -np.inf, np.float32)
        self.rows = np.full((queries, k), -1, np.int64)

    def floors(self, begin: int, end: int) -> NDArray[np.float32]:
        """The score that the k-th best of these queries has; -inf where fewer than k are known. A copy."""
        return self.scores[begin:end, -1].copy()

    def add(self, queries: RowNumbers, scores: NDArray[np.float32], rows: RowNumbers) -> None:
        """Let these vectors compete for their queries' places; none of them may be there already."""
        if not len(queries):
            return
        touched = np.unique(queries)
        known = self.rows[touched] >= 0
        asking = np.concatenate([np.repeat(touched, known.sum(1)), queries])
        score = np.concatenate([self.scores[touched][known], scores])
        row = np.concatenate([self.rows[touched][known], rows])
        order = self._order(asking, score, row)
        asking, score, row = asking[order], score[order], row[order]
        place = np.arange(len(asking)) - np.searchsorted(asking, asking)  # within its query
        kept = place < self.k
        self.scores[asking[kept], place[kept]] = score[kept]
        self.rows[asking[kept], place[kept]] = row[kept]

    def _order(self, queries: RowNumbers, scores: NDArray[np.float32], rows: RowNumbers) -> RowNumbers:
        """By query, falling score, id. Ids are fetched for equal scores only."""
        order = np.lexsort((-scores, queries))
        same = (np.diff(queries[order]) == 0) & (np.diff(scores[order]) == 0)
        if not same.any():
            return order
        tied = np.zeros(len(order), bool)
        tied[:-1] |= same
        tied[1:] |= same
        group = order[tied]  # runs of equal (query, score); sorting them by id as well leaves every run in its place
        order[tied] = group[np.lexsort((self.ids_at(rows[group]), -scores[group], queries[group]))]
        return order
