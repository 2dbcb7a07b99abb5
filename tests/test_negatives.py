"""Mined negatives: never a positive, never with an answer, best first by BM25."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import texts
from contaccum.common.errors import DataError
from contaccum.data import bm25
from contaccum.data.answers import has_answer
from contaccum.data.negatives import Chooser, mine_bm25
from contaccum.data.negatives import existing as existing_negatives
from mining import CAPITALS, passages, training_set

# BM25


def naive_bm25(query: list[str], documents: list[list[str]], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's BM25, from its formula."""
    mean = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(documents)
    for word in query:
        having = sum(word in document for document in documents)
        idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        for i, document in enumerate(documents):
            tf = Counter(document)[word]
            scores[i] += idf * tf / (tf + k1 * (1 - b + b * len(document) / mean))
    return scores


def best(documents: list[str], query: str, depth: int = 10, stopwords: str | None = "en") -> list[int]:
    (found,) = bm25.best_passages(documents, [query], depth, stopwords)
    return [int(position) for position in found]


@pytest.mark.parametrize("block", [1, 40, 8_388_608])
@pytest.mark.parametrize("depth", [1, 3, 10, 500])
def test_search_ranks_by_bm25_and_breaks_ties_by_position(depth: int, block: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bm25, "BLOCK", block)
    monkeypatch.setattr(bm25, "TOGETHER", 7)
    documents, queries = [*texts(150, seed=1), *texts(50, seed=1), "", "w1"], [*texts(30, seed=2), "w1 w1 w2"]
    blocks: list[Path] = []

    def shown(files: Iterable[Path]) -> Iterable[Path]:
        blocks.extend(files)
        return files

    found = bm25.best_passages(iter(documents), queries, depth, None, tmp_path, shown)
    assert len(blocks) > 5 if block < 100 else len(blocks) == 1
    assert list(tmp_path.iterdir()) == []
    for query, positions in zip(queries, found, strict=True):
        scores = naive_bm25(query.split(), [document.split() for document in documents])
        ranked = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: (-round(scores[i], 4), i))
        assert positions.tolist() == ranked[:depth]


def test_scores_are_those_of_bm25s() -> None:
    documents, queries = texts(200, seed=3), texts(20, seed=4)
    index = bm25s.BM25(method="lucene", k1=bm25.K1, b=bm25.B)
    index.index([document.split() for document in documents], show_progress=False)
    for query, positions in zip(queries, bm25.best_passages(documents, queries, 5, None), strict=True):
        scores = index.get_scores(query.split())
        assert np.allclose(scores[positions], np.sort(scores)[::-1][: len(positions)], rtol=1e-5)


def test_search_finds_nothing_for_unknown_words_and_stop_words() -> None:
    documents = ["the cat", "a dog"]
    assert best(documents, "") == best(documents, "the of and") == best(documents, "unknown") == []
    assert best(documents, "The CAT") == [0]
    assert best(documents, "the", stopwords=None) == [0]


def test_a_collection_without_words_is_refused() -> None:
    with pytest.raises(DataError, match="holds no word to index"):
        best(["", "...", "the"], "cat")


# What may be a negative


def test_negatives_contain_no_answer_and_are_no_positive_in_rank_order() -> None:
    rows = training_set(("What is the capital of France?", CAPITALS[0], ["Paris"]))
    (mined,) = mine_bm25(rows, passages(*CAPITALS), per_query=10)
    ranked = [CAPITALS[i] for i in best(CAPITALS, "What is the capital of France?")]
    assert CAPITALS[0] in ranked  # the positive is found, so leaving it out is not vacuous
    assert mined == [text for text in ranked if "Paris" not in text]
    assert len(mined) == 4
    assert CAPITALS[5] not in mined  # it shares no word


def test_without_answers_only_positives_are_excluded() -> None:
    rows = training_set(("capital of France", CAPITALS[0], []), ("capital of France", CAPITALS[2], []))
    first, second = mine_bm25(rows, passages(*CAPITALS), per_query=10)
    assert first == second == [CAPITALS[i] for i in best(CAPITALS, "capital of France") if i not in (0, 2)]


def test_answers_of_all_rows_of_a_query_count() -> None:
    rows = training_set(("capital of France", CAPITALS[0], ["Paris"]), ("capital of France", CAPITALS[2], ["Versailles", "Lyon"]))
    for mined in mine_bm25(rows, passages(*CAPITALS)):
        assert mined == [CAPITALS[3], CAPITALS[4]]


def test_a_positive_with_another_title_or_spacing_is_excluded() -> None:
    rows = training_set(
        ("capital of France", "Paris  is the capital of\nFrance", []), ("capital of Italy", "Italy Rome is the capital", [])
    )
    first, second = mine_bm25(rows, passages(*CAPITALS, "Rome is the capital"))
    assert CAPITALS[0] not in first
    assert "Rome is the capital" not in second
    assert CAPITALS[3] in first


def test_nothing_left_gives_an_empty_list() -> None:
    rows = training_set(("capital", CAPITALS[0], ["is", "was", "a", "makes"]), ("unknownword", CAPITALS[0], []), ("", CAPITALS[0], []))
    assert list(mine_bm25(rows, passages(*CAPITALS))) == [[], [], []]


def test_answers_without_words_say_nothing() -> None:
    rows = training_set(("capital of France", CAPITALS[0], ["", " "]))
    assert len(next(mine_bm25(rows, passages(*CAPITALS)))) == 4
    assert len(next(mine_bm25(rows, passages(*CAPITALS), match="regex"))) == 4


def test_regex_answers_exclude_by_search() -> None:
    rows = training_set(("capital of France", CAPITALS[0], ["Lyo?n|(", "ver.ailles"]))
    (mined,) = mine_bm25(rows, passages(*CAPITALS), match="regex")
    assert CAPITALS[2] not in mined  # by the valid pattern
    assert CAPITALS[1] in mined  # the other is invalid and matches nothing


def test_the_same_text_is_given_once_and_per_query_bounds_the_number() -> None:
    rows = training_set(("capital of France", "elsewhere", []))
    collection = passages(*CAPITALS, *CAPITALS, CAPITALS[0].replace(" ", "  "))
    (mined,) = mine_bm25(rows, collection, depth=100)
    assert len(mined) == len(set(mined)) == 5
    assert list(mine_bm25(rows, collection, per_query=2)) == [mined[:2]]
    assert list(mine_bm25(rows, collection, per_query=2, depth=2)) == [mined[:1]]  # the two best are one text


@given(st.data())
def test_no_chosen_negative_breaks_a_rule(data: st.DataObject) -> None:
    word = st.sampled_from(["a", "b", "é", "e\u0301", "C.", "1,5"])
    text = st.lists(word, max_size=4).map(" ".join)
    answers, positive = data.draw(st.lists(text, max_size=3)), data.draw(text)
    candidates = data.draw(st.lists(text, max_size=12))
    chosen = Chooser(training_set(("q", positive, answers)), per_query=5)("q", candidates)
    known = [answer for answer in answers if answer]
    assert not any(has_answer(known, negative) or negative == positive for negative in chosen)
    wanted = [c for c in dict.fromkeys(candidates) if c and not has_answer(known, c) and not same_but_for_title(c, positive)]
    assert chosen == wanted[:5]


def same_but_for_title(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return one == other or (bool(short) and long.endswith(" " + short))


def test_given_negatives_are_checked_again() -> None:
    rows = training_set(("q", "p", ["x"]), negatives=[["has x", "p", "fine", "fine", "good"]])
    assert list(existing_negatives(rows)) == [["fine", "good"]]
