"""BM25 over a collection of any size, for queries that are known: Lucene's variant, k1 = 1.5, b = 0.75.

1. The words of the queries get numbers. Of a passage only these words count, and how many words it has in all.
2. The collection streams past once. After `BLOCK` such words a block is written to a file: neither texts nor an index of all are held.
3. Now each word's weight and the mean length are known. Every block is scored against every query, and the best of each query are kept.

Words have two letters or more and are lower-cased, without stop words, not stemmed: bm25s' tokenizer makes them.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bm25s.tokenization import Tokenizer  # type: ignore[import-untyped]
from scipy.sparse import coo_array, csr_array

from contaccum.common.errors import DataError

K1, B = 1.5, 0.75
BLOCK = 8_388_608  # words of queries in a block of passages: about 300 MB while it is scored
TOGETHER = 64  # queries scored at a time

Scored = tuple[np.ndarray, np.ndarray]  # positions and scores, best first


def best_passages(
    texts: Iterable[str],
    queries: Sequence[str],
    depth: int,
    stopwords: str | None = "en",
    scratch: Path | None = None,
    shown: Callable[[Iterable[Path]], Iterable[Path]] = iter,
) -> list[np.ndarray]:
    """For each query the positions of its `depth` best passages, best first, equal scores in the collection's order.

    Passages that share no word with the query are left out, so there may be fewer. `stopwords` is a language of bm25s ("en", "de", ...),
    or None for none. Blocks go to a folder in `scratch` that is deleted in the end. `shown` wraps the loop over them.
    """
    words = _Words(queries, stopwords)
    with tempfile.TemporaryDirectory(prefix="bm25-", dir=scratch) as folder:
        collection = _Collection(len(words.numbers), Path(folder))
        for text in texts:
            collection.add(*words.of_passage(text))
        collection.end()
        best: list[Scored] = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
        for block in shown(collection.blocks):
            _merge(best, words.of_queries, *collection.scores(block), depth)
    return [positions for positions, _ in best]


def tokenizer_without(stopwords: str | None) -> Tokenizer:
    """bm25s' tokenizer that leaves out the stop words of a language."""
    try:
        return Tokenizer(stopwords=stopwords)
    except ValueError as error:
        raise ValueError(f"stopwords={stopwords!r} is no language that bm25s knows; use en, de, fr, ... or none") from error


class _Words:
    """Those of the queries by number, and each query's."""

    def __init__(self, queries: Sequence[str], stopwords: str | None) -> None:
        tokenizer = tokenizer_without(stopwords)
        found = list(tokenizer.streaming_tokenize(queries, update_vocab=True, allow_empty=False))
        self.numbers: dict[str, int] = tokenizer.word_to_id
        ends = np.cumsum([0, *map(len, found)])
        flat = np.fromiter((number for numbers in found for number in numbers), np.int32, ends[-1])
        self.of_queries = csr_array((np.ones(len(flat), np.float32), flat, ends), shape=(len(queries), len(self.numbers)))
        self._split, self._left_out = tokenizer.splitter, frozenset(tokenizer.stopwords or ())

    def of_passage(self, text: str) -> tuple[list[int], int]:
        """Numbers of those that a query has, and how many words there are."""
        words = self._split(text.lower())
        return [self.numbers[word] for word in words if word in self.numbers], sum(word not in self._left_out for word in words)


@dataclass
class _Collection:
    """Passages as the numbers of their words, in files of about `BLOCK` each; how many passages have each word, how long they are."""

    vocabulary: int
    folder: Path
    blocks: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._having = np.zeros(self.vocabulary, np.int64)
        self._passages = self._words = 0
        self._begin()

    def _begin(self) -> None:
        self._first, self._numbers, self._counts, self._lengths = self._passages, array("i"), array("i"), array("i")

    def add(self, numbers: Sequence[int], length: int) -> None:
        self._numbers.extend(numbers)
        self._counts.append(len(numbers))
        self._lengths.append(length)
        self._passages += 1
        self._words += length
        if len(self._numbers) >= BLOCK:
            self._write()

    def end(self) -> None:
        if not self._words:
            raise DataError(f"the collection of {self._passages} passages holds no word to index; check that the right file was given")
        self._write()

    def _write(self) -> None:
        numbers, counts, lengths = (np.frombuffer(kept, np.int32) for kept in (self._numbers, self._counts, self._lengths))
        passages = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        often = coo_array((np.ones(len(numbers), np.float32), (numbers, passages)), shape=(self.vocabulary, len(counts))).tocsr()
        self._having += np.diff(often.indptr)
        file = self.folder / f"{len(self.blocks)}.npz"
        np.savez(file, first=self._first, data=often.data, indices=often.indices, indptr=often.indptr, lengths=lengths)
        self.blocks.append(file)
        self._begin()

    def scores(self, block: Path) -> tuple[int, csr_array[Any]]:
        """The number of its first passage, and what each word adds to a passage's score: (words, passages)."""
        with np.load(block) as stored:
            first, data, indices, indptr, lengths = (stored[name] for name in ("first", "data", "indices", "indptr", "lengths"))
        weights = np.log1p((self._passages - self._having + 0.5) / (self._having + 0.5)).astype(np.float32)
        dampened = (K1 * (1 - B + B * lengths * (self._passages / self._words))).astype(np.float32)
        data *= np.repeat(weights, np.diff(indptr)) / (data + dampened[indices])
        return int(first), csr_array((data, indices, indptr), shape=(self.vocabulary, len(lengths)))


def _merge(best: list[Scored], queries: csr_array[Any], first: int, scores: csr_array[Any], depth: int) -> None:
    """What of a block belongs to the best of each query so far, in place. Its passages come after those."""
    for start in range(0, len(best), TOGETHER):
        found = queries[start : start + TOGETHER] @ scores
        for number, (begin, end) in enumerate(zip(found.indptr[:-1], found.indptr[1:], strict=True), start):
            best[number] = _better(*best[number], first + found.indices[begin:end].astype(np.int64), found.data[begin:end], depth)


def _better(positions: np.ndarray, scores: np.ndarray, new_positions: np.ndarray, new_scores: np.ndarray, depth: int) -> Scored:
    """The best of both. A new passage must have a higher score than the last of `depth` earlier ones."""
    if len(scores) == depth:
        above = new_scores > scores[-1]
        new_positions, new_scores = new_positions[above], new_scores[above]
    if len(new_scores) > depth:
        above = new_scores >= np.partition(new_scores, -depth)[-depth]
        new_positions, new_scores = new_positions[above], new_scores[above]
    positions, scores = np.concatenate([positions, new_positions]), np.concatenate([scores, new_scores])
    order = np.lexsort((positions, -scores))[:depth]
    return positions[order], scores[order]
