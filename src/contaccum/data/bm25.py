"""BM25 over a collection that need not fit in memory as text: word numbers in, positions of the best passages out.

bm25s computes the scores. Around it: words are numbered while the collection streams past, four bytes each, so that neither texts
nor Python's lists of words are held.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import bm25s  # type: ignore[import-untyped]
import numpy as np
from bm25s.tokenization import Tokenized, Tokenizer  # type: ignore[import-untyped]

from contaccum.common.errors import DataError


class Bm25:
    """A BM25 index (Lucene's variant, k1 = 1.5, b = 0.75) over words of two letters or more, lower-cased, without `stopwords`.

    `stopwords` is a language of bm25s ("en", "de", ...), or None for none. Words are not stemmed.
    """

    def __init__(self, texts: Iterable[str], stopwords: str | None = "en", show_progress: bool = False) -> None:
        self.tokenizer = tokenizer_without(stopwords)
        ids = _WordNumbers()
        for document in self.tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False):
            ids.append(document)
        if not ids.flat:
            raise DataError(f"the collection of {len(ids)} passages holds no word to index; check that the right file was given")
        # scipy's conversion needs a third less memory at its peak than bm25s' own; the scores are the same.
        self.index = bm25s.BM25(csc_backend="auto")
        self.index.index(Tokenized(ids=ids, vocab=self.tokenizer.word_to_id), create_empty_token=False, show_progress=show_progress)

    def __len__(self) -> int:
        return int(self.index.scores["num_docs"])

    def search(self, query: str, depth: int) -> list[int]:
        """Positions of the `depth` best passages, best first, equal scores in the collection's order.

        Passages that share no word with the query are left out, so there may be fewer.
        """
        (words,) = self.tokenizer.streaming_tokenize([query], update_vocab=False, allow_empty=False)
        if not words:
            return []
        scores = self.index.get_scores_from_ids(words)  # (passages,)
        matched = np.flatnonzero(scores > 0)
        # Most passages score 0, and selecting among thousands of equal values is what bm25s' own retrieval spends its time on.
        found = scores[matched]
        if len(found) > depth:
            floor = np.partition(found, -depth)[-depth]
            matched, found = matched[found >= floor], found[found >= floor]
        order = np.lexsort((matched, -found))[:depth]
        return [int(position) for position in matched[order]]


def tokenizer_without(stopwords: str | None) -> Tokenizer:
    """bm25s' tokenizer that leaves out the stop words of a language."""
    try:
        return Tokenizer(stopwords=stopwords)
    except ValueError as error:
        raise ValueError(f"stopwords={stopwords!r} is no language that bm25s knows; use en, de, fr, ... or none") from error


class _WordNumbers:
    """A list of lists of whole numbers, as far as bm25s reads one, in four bytes a number."""

    def __init__(self) -> None:
        self.flat: array[int] = array("i")
        self.ends: array[int] = array("q", [0])

    def append(self, numbers: Iterable[Any]) -> None:
        self.flat.extend(numbers)
        self.ends.append(len(self.flat))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[list[int]]:
        for start, end in pairwise(self.ends):
            yield self.flat[start:end].tolist()
