"""Hard negatives for a training set: passages that look right and are not.

1. Candidates come from BM25 (`mine_bm25`), from a trained model (`mine_dense`) or from the training set itself, best first.
2. `Chooser` keeps the first that are not a positive of the query and contain none of its answers, DPR's way.
3. `denoise` may drop those that a cross-encoder scores too close to the positive.
4. `mine` does this from files to a folder.

Each miner gives one list of texts per row of the training set, in its order, as an iterator: no more than a block is held.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from tqdm import tqdm

from contaccum.data.answers import AnswerMatcher, searchable

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer

BLOCK = 64  # queries searched, or rows scored, at a time
DENSE_BLOCK = 8192  # queries per call of mine_hard_negatives: their candidates are held as texts
SCORES = 2**26  # query-passage scores held at a time by the dense search: 256 MB


class Chooser:
    """The negatives among a query's candidates: the first `per_query` distinct ones that are not a positive of the query in any row,
    with or without a title in front, and contain none of its answers.

    Where no answers are known, the positives alone are excluded. Answers without a word say nothing and are left aside.
    """

    def __init__(self, dataset: Dataset, per_query: int, match: str = "string") -> None:
        self.per_query, self.match = per_query, match
        self.positives: dict[str, set[str]] = defaultdict(set)
        self.answers: dict[str, set[str]] = defaultdict(set)
        for rows in dataset.iter(batch_size=1000):
            for query, positive, answers in zip(rows["query"], rows["positive"], rows["answers"], strict=True):
                self.positives[query].add(_squeezed(positive))
                self.answers[query].update(answer for answer in answers if searchable(answer, match).strip())
        # One passage is a candidate of many questions.
        self._searchable = lru_cache(maxsize=4096)(partial(searchable, match=match))

    def __call__(self, query: str, candidates: Iterable[str]) -> list[str]:
        matcher = AnswerMatcher(self.answers[query], self.match)
        wanted = (
            text for text in _distinct(candidates) if not (self._is_positive(query, text) or matcher.found_in(self._searchable(text)))
        )
        return list(islice(wanted, self.per_query))

    def _is_positive(self, query: str, text: str) -> bool:
        text = _squeezed(text)
        return any(text == positive or text.endswith(f" {positive}") or positive.endswith(f" {text}") for positive in self.positives[query])


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    seen = {""}
    for text in texts:
        if (squeezed := _squeezed(text)) not in seen:
            seen.add(squeezed)
            yield text


def mine_bm25(
    dataset: Dataset,
    passages: Dataset,
    *,
    per_query: int = 10,
    depth: int = 100,
    match: str = "string",
    stopwords: str | None = "en",
    scratch: str | Path | None = None,
) -> Iterator[list[str]]:
    """Per row, up to `per_query` negatives among the `depth` passages with the highest BM25 scores for its query, best first.

    Args:
        dataset: a training set, as `load_training_set` gives it.
        passages: a table with a column "text".
        match: how answers are compared, "string" or "regex" (see `contaccum.data.answers`).
        stopwords: words that are not indexed, as a language of bm25s ("en"), or None.
        scratch: folder for about five bytes a word of the collection, while this runs; left out: the system's.

    Memory does not grow with the collection: half a GB for what is scored at a time, 12 bytes times `depth` for each query, and the
    training set's queries, positives and answers. `passages` is read in blocks and may lie on disk.
    """
    from contaccum.data.bm25 import best_passages

    check_numbers(per_query, depth)
    choose = Chooser(dataset, per_query, match)
    rows = [text for rows in dataset.select_columns("query").iter(batch_size=1000) for text in rows["query"]]
    queries = {text: number for number, text in enumerate(dict.fromkeys(rows))}
    bar = partial(tqdm, dynamic_ncols=True, disable=None)
    texts = (text for rows in passages.iter(batch_size=1000) for text in rows["text"])
    shown = bar(texts, desc="indexing", total=len(passages), unit="passage")
    folder = None if scratch is None else Path(scratch)
    found = best_passages(shown, list(queries), depth, stopwords, folder, partial(bar, desc="scoring", unit="block"))
    return _chosen(rows, [found[queries[text]] for text in rows], passages, choose)


def _chosen(rows: Sequence[str], found: Sequence[Any], passages: Dataset, choose: Chooser) -> Iterator[list[str]]:
    """`found`: positions of each row's candidates."""
    for block in _blocks(zip(rows, found, strict=True)):
        needed = sorted({int(position) for _, positions in block for position in positions})
        fetched = dict(zip(needed, passages[needed]["text"], strict=True))
        for query, positions in block:
            yield choose(query, (fetched[position] for position in positions.tolist()))


def mine_dense(
    dataset: Dataset,
    passages: Dataset,
    model: SentenceTransformer,
    *,
    per_query: int = 10,
    depth: int = 100,
    match: str = "string",
    range_min: int = 0,
    scratch: str | Path | None = None,
    **filters: Any,
) -> Iterator[list[str]]:
    """Per row, up to `per_query` negatives among the `depth` passages nearest to its query, nearest first.

    The search is sentence-transformers' `mine_hard_negatives`: vectors are normalised, whatever the model's similarity, and the
    training set's positives join the collection. `range_min` and `filters` (`absolute_margin`, `relative_margin`, `max_score`,
    `min_score`, `sampling_strategy`, ...) are its own and come before the answers are looked for.

    Memory: the texts, a float32 vector for each (1M of 768 numbers: 3 GB), 256 MB of scores, and the candidates of 8,192 queries.
    `scratch` is the folder in which vectors are kept between blocks where there are more queries than that.
    """
    check_numbers(per_query, depth)
    choose = Chooser(dataset, per_query, match)
    pairs = dataset.select_columns(["query", "positive"])
    # Every block must see the same texts, or its vectors could not be used again.
    corpus = list(dict.fromkeys([*passages["text"], *pairs["positive"]]))
    options = {"range_min": range_min, "range_max": range_min + depth, "num_negatives": depth} | filters
    chosen: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        blocks = list(_rows_by_query(pairs["query"], DENSE_BLOCK))
        for rows in blocks:
            nearest = _nearest(pairs.select(rows), corpus, model, options, cache if len(blocks) > 1 else None)
            chosen |= {query: choose(query, texts) for query, texts in nearest.items()}
    return (chosen.get(query, []) for query in pairs["query"])


def _rows_by_query(queries: Iterable[str], block: int) -> Iterable[list[int]]:
    """Row numbers in blocks of `block` distinct queries, all rows of a query in one block."""
    numbers: dict[str, int] = {}
    rows: dict[int, list[int]] = defaultdict(list)
    for row, query in enumerate(queries):
        rows[numbers.setdefault(query, len(numbers)) // block].append(row)
    return rows.values()


def _nearest(
    pairs: Dataset, corpus: list[str], model: SentenceTransformer, options: dict[str, Any], cache: str | None
) -> dict[str, list[str]]:
    """query -> its candidates, nearest first."""
    from sentence_transformers.util import mine_hard_negatives

    triplets = mine_hard_negatives(
        pairs,
        model,
        anchor_column_name="query",
        positive_column_name="positive",
        corpus=corpus,
        output_format="triplet",
        faiss_batch_size=max(1, SCORES // len(corpus)),
        cache_folder=cache,
        verbose=False,  # it would print to standard output
        **options,
    )
    candidates: dict[str, list[str]] = defaultdict(list)
    for rows in triplets.iter(batch_size=1000):
        for query, negative in zip(rows["query"], rows["negative"], strict=True):
            candidates[query].append(negative)
    return candidates


def existing(dataset: Dataset, *, per_query: int = 10, match: str = "string") -> Iterator[list[str]]:
    """Per row, the first `per_query` of the negatives that it already has and that are none of its positives nor contain an answer."""
    check_numbers(per_query, per_query)
    choose = Chooser(dataset, per_query, match)
    return (choose(row["query"], row["negatives"]) for row in dataset)


def denoise(dataset: Dataset, negatives: Iterable[list[str]], scorer: CrossEncoder, margin: float = 3.0) -> Iterator[list[str]]:
    """Per row, those of its `negatives` that the cross-encoder scores at least `margin` below the row's positive, in their order.

    Scores are the cross-encoder's logits, without the sigmoid that it may end in: MS MARCO's usual margin of 3 is meant for these.
    """
    rows = ((row["query"], row["positive"]) for row in dataset.select_columns(["query", "positive"]))
    for block in _blocks(zip(rows, negatives, strict=True)):
        texts = [(query, text) for (query, positive), candidates in block for text in (positive, *candidates)]
        scores = iter(_logits(scorer, texts))
        for _, candidates in block:
            ceiling = next(scores) - margin
            yield [text for text in candidates if next(scores) <= ceiling]


def _logits(scorer: CrossEncoder, texts: list[tuple[str, str]]) -> list[float]:
    import torch

    scores = scorer.predict(texts, activation_fn=torch.nn.Identity(), show_progress_bar=False, convert_to_tensor=True)
    if scores.ndim != 1:
        raise ValueError(f"the cross-encoder gives {scores.shape[-1]} scores a pair; denoising needs one with num_labels=1")
    return [float(score) for score in scores]


def load_cross_encoder(name: str | Path) -> CrossEncoder:
    from sentence_transformers import CrossEncoder

    from contaccum.towers.loading import load_model

    loaded: CrossEncoder = load_model(name, CrossEncoder)
    return loaded


def check_floats(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} is not a finite number; give one, or leave it out")


def check_numbers(per_query: int, depth: int) -> None:
    if per_query < 1:
        raise ValueError(f"per_query={per_query} asks for no negatives; use 1 or more")
    if depth < per_query:
        raise ValueError(f"depth={depth} passages cannot give per_query={per_query} negatives; use a larger depth")


def _blocks(items: Iterable[Any]) -> Iterator[Sequence[Any]]:
    iterator = iter(items)
    while block := list(islice(iterator, BLOCK)):
        yield block
