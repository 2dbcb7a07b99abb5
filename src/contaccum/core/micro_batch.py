"""A micro-batch as the loss takes it, and what is known of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contaccum.core.infonce import Blocks, Columns, Past, Rows, unit_vectors


def as_tuples(
    queries: Tensor,
    passages: Tensor,
    query_keys: Tensor | None,
    passage_keys: Tensor | None,
    guide: tuple[Tensor, Tensor] | None,
    first: int,
) -> tuple[Rows, Columns]:
    """Detached vectors (n, d) and (n, c, d) as tuples that are numbered from `first` on. A guide's are scaled to unit length."""
    ids = torch.arange(first, first + len(queries), device=queries.device)
    positive_keys = None if passage_keys is None else passage_keys[:, 0]
    rows = Rows(queries, ids, query_keys, positive_keys, passages[:, 0])
    columns = Columns(passages, ids, query_keys, passage_keys)
    if guide is None:
        return rows, columns
    with torch.no_grad():
        of_queries, of_passages = (unit_vectors(vectors.to(torch.promote_types(vectors.dtype, torch.float32))) for vectors in guide)
    return replace(rows, guide=of_queries, guide_positives=of_passages[:, 0]), replace(columns, guide=of_passages)


@dataclass
class WholeVectors:
    """A micro-batch at its full width, whose loss is taken at several: it enters the bank once, as these."""

    rows: Rows
    columns: Columns
    entered: bool = False

    def cut_to(self, queries: Tensor, passages: Tensor, first: int) -> tuple[Rows, Columns]:
        """The same tuples with these vectors, numbered from `first` on until they enter: others may have, since this was made."""
        if not self.entered:
            ids = torch.arange(first, first + len(queries), device=queries.device)
            self.rows, self.columns = replace(self.rows, ids=ids), replace(self.columns, ids=ids)
        return replace(self.rows, queries=queries, positives=passages[:, 0]), replace(self.columns, passages=passages)


@dataclass(frozen=True)
class MicroStep:
    """What a training micro-step was computed from, for whoever watches it. Views: copy what is kept."""

    rows: Rows
    columns: Columns
    past: Past | None
    blocks: Blocks
    loss: Tensor  # detached
    ages: Tensor | None = None  # (m,) of the bank's tuples, in the order of past.columns
    bank_name: str = ""  # which bank it read, where there are several

    @property
    def negatives_per_query(self) -> int:
        """Columns that a current query is compared with, its positive apart (masked duplicates included)."""
        banked = 0 if self.past is None else self.past.columns.passages.shape[0] * self.past.columns.passages.shape[1]
        return self.columns.passages.shape[0] * self.columns.passages.shape[1] + banked - 1
