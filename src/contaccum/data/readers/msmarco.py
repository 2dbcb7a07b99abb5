"""MS MARCO: BEIR's folder with sentence-transformers' hard negatives, denoised by cross-encoder scores.

1. `read_candidates`: per query, its positives and the negatives that the chosen systems found.
2. `keep_by_margin`: of these, the negatives that a cross-encoder scores at least `margin` below the lowest-scored positive.
3. `training_rows`: the texts, looked up.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tqdm import tqdm

from contaccum.common.errors import DataError
from contaccum.data.readers.beir import TextLookup, is_beir
from contaccum.data.readers.files import SUFFIXES, find, listed, read_jsonl, shown
from contaccum.data.readers.rows import Tally, TrainingRow
from contaccum.data.readers.scores import msmarco_id, read_scores

NEGATIVES_FILE = "msmarco-hard-negatives.jsonl"
SCORES_FILE = "cross-encoder-ms-marco-MiniLM-L-6-v2-scores.pkl"
NEGATIVES_PER_QUERY = 5


class Candidates:
    """A query's positives and negatives, as identifiers; `scored` once the margin has been applied."""

    __slots__ = ("negatives", "positives", "scored")  # half a million of these are held

    def __init__(self, positives: list[int], negatives: list[int]) -> None:
        self.positives, self.negatives, self.scored = array("q", positives), array("q", negatives), False


def is_msmarco(folder: Path) -> bool:
    return is_beir(folder) and any((folder / (NEGATIVES_FILE + suffix)).exists() for suffix in SUFFIXES)


def read_candidates(path: Path, systems: Sequence[str], tally: Tally) -> dict[int, Candidates]:
    """query id -> candidates: the systems' negatives in turn, best first, each once, without the positives."""
    candidates: dict[int, Candidates] = {}
    unseen, names = set(systems), set[str]()
    for line, record in tqdm(read_jsonl(path), desc="reading hard negatives", unit=" queries", disable=None):
        query, positives, found = _candidates_record(record, path, line)
        unseen -= found.keys()
        names |= found.keys()
        if query in candidates:
            raise DataError(f"{path}, line {line}: the query {query} appears a second time")
        if not positives:
            tally.dropped["without a positive"] += 1
            continue
        in_turn = chain.from_iterable(zip_longest(*(found.get(system, []) for system in systems)))
        negatives = dict.fromkeys(passage for passage in in_turn if passage is not None)
        candidates[query] = Candidates(positives, [passage for passage in negatives if passage not in positives])
    if unseen:
        raise DataError(f"{path} has no negatives of {listed(sorted(unseen))}; it has those of {listed(sorted(names))}")
    return candidates


def _candidates_record(record: dict[str, Any], path: Path, line: int) -> tuple[int, list[int], dict[str, list[int]]]:
    try:
        negatives = {system: [msmarco_id(key) for key in keys] for system, keys in record["neg"].items()}
        return msmarco_id(record["qid"]), [msmarco_id(key) for key in record["pos"]], negatives
    except KeyError as error:
        raise DataError(f"{path}, line {line}: no {error}; fields there: {listed(record)}") from error
    except (AttributeError, TypeError) as error:
        form = '{"qid": 1, "pos": [2], "neg": {"bm25": [3]}}'
        raise DataError(f"{path}, line {line}: of the form {form} is needed, not {shown(record)}") from error
    except ValueError as error:
        raise DataError(f"{path}, line {line}: {error}") from error


def keep_by_margin(candidates: dict[int, Candidates], scores: Path, margin: float, limit: int, tally: Tally) -> None:
    """Of each query, leave the first `limit` negatives that score at least `margin` below its lowest-scored positive.

    A negative without a score is not kept; a query with an unscored positive stays unscored.
    """
    before = sum(len(entry.negatives) for entry in candidates.values())
    passing = 0

    def apply(query: int, by_passage: dict[Any, Any]) -> None:
        nonlocal passing
        bar.update()
        entry = candidates.get(query)
        if entry is None:
            return
        known = _score_table(by_passage, query, scores)
        if all(passage in known for passage in entry.positives):
            threshold = min(known[passage] for passage in entry.positives) - margin
            kept = [passage for passage in entry.negatives if passage in known and known[passage] <= threshold]
            entry.negatives, entry.scored = array("q", kept[:limit]), True
            passing += len(kept)

    with tqdm(desc="reading scores", unit=" queries", disable=None) as bar:
        read_scores(scores, apply)
    tally.notes.append(f"{passing:,} of {before:,} hard negatives score at least {margin:g} below their positive")


def _score_table(by_passage: dict[Any, Any], query: int, path: Path) -> dict[int, float]:
    try:
        return {msmarco_id(key): float(score) for key, score in by_passage.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: the scores of query {query} are no numbers by passage ({error})") from error


def training_rows(
    folder: Path,
    queries: TextLookup,
    corpus: TextLookup,
    tally: Tally,
    systems: Sequence[str],
    margin: float,
    negatives_per_query: int,
) -> Iterator[TrainingRow]:
    """A row per query and positive, in the order of the hard-negative file; queries that keep no negative are dropped and counted."""
    source = find(folder, NEGATIVES_FILE)
    candidates = read_candidates(source, systems, tally)
    keep_by_margin(candidates, find(folder, SCORES_FILE), margin, negatives_per_query, tally)
    for key, entry in candidates.items():
        if not entry.scored:
            tally.dropped["without a cross-encoder score"] += 1
        elif not entry.negatives:
            tally.dropped[f"without a negative {margin:g} below the positive"] += 1
        else:
            query = _text(queries, key, "query", "queries.jsonl", source)
            negatives = [_text(corpus, passage, "document", "corpus.jsonl", source) for passage in entry.negatives]
            for passage in entry.positives:
                positive = _text(corpus, passage, "document", "corpus.jsonl", source)
                yield TrainingRow(query=query, positive=positive, negatives=negatives, answers=[])


def _text(texts: TextLookup, key: int, kind: str, file: str, source: Path) -> str:
    text = texts.get(str(key))
    if text is None:
        raise DataError(f"{source} names the {kind} {key}, which {file} does not hold; do the files belong together?")
    return text
