"""A run in, metrics out, per query and as means; two runs compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.common.console import note
from contaccum.common.errors import DataError
from contaccum.common.outputs import check_file, sole_path, write_json
from contaccum.data.readers.beir import qrels_file, read_qrels
from contaccum.data.readers.collections import read_collection_of
from contaccum.data.readers.files import bare_suffix, shown
from contaccum.data.readers.queries import Query, read_queries
from contaccum.retrieval.compare import paired_comparison
from contaccum.retrieval.metrics import DEFAULT, PerQuery, check_metrics, judged_metrics
from contaccum.retrieval.runs import Run, read_dpr_results, read_run, tokens_of

TOP = (1, 5, 20, 100)

Flags = dict[str, list[bool]]  # query -> whether each of its passages, best first, contains an answer


def evaluate_run(
    run: str | Path,
    *,
    qrels: str | Path | None = None,
    queries: str | Path | None = None,
    collection: str | Path | None = None,
    split: str | None = None,
    match: str = "string",
    metrics: Sequence[str] = DEFAULT,
    top: Sequence[int] = TOP,
    compare: str | Path | None = None,
    output: str | Path | None = None,
) -> dict[str, Any]:
    """Judge a run by relevance judgements (NDCG, Recall, MRR, MAP) or by answers (Top@k as DPR computes it).

    Returns {"queries", "metrics": name -> mean, "per_query": name -> query -> value}, "comparison" with `compare`, and under "sources"
    the files and options: `contaccum report` finds the ranking and the texts by them. Top@k is the share of queries with an answer
    among their first k passages. With `qrels`, queries without answers are no mistake.
    The options are those of `evaluate`.
    """
    check_judging(metrics, top, match)
    check_file(output, (run, qrels, queries, collection, compare))

    def judge(path: str | Path) -> PerQuery:
        return _judge(Path(path), qrels, queries, collection, split, match, metrics, top)

    found = judge(run)
    files = {"run": run, "qrels": qrels, "queries": queries, "collection": collection}
    result: dict[str, Any] = {
        "run": str(run),
        "queries": len(next(iter(found.values()))),
        "metrics": {name: sum(values.values()) / len(values) for name, values in found.items()},
        "sources": {**{name: None if file is None else str(file) for name, file in files.items()}, "split": split, "match": match},
    }
    if compare is not None:
        other, lengths = judge(compare), (tokens_of(run), tokens_of(compare))
        if None not in lengths and lengths[0] != lengths[1]:
            note(f"{run} read {lengths[0]} tokens of a passage, {compare} {lengths[1]}: a part of the difference may come from that")
        result["comparison"] = {"run": str(compare), **{name: paired_comparison(found[name], other[name]) for name in found}}
    result["per_query"] = found
    if output is not None:
        with sole_path(output) as part:
            write_json(part, result)
    return result


def check_judging(metrics: Sequence[str], top: Sequence[int], match: str) -> None:
    """ValueError for options that cannot be, before anything is read or encoded."""
    from contaccum.data.answers import check_match

    if not top or min(top) < 1:
        raise ValueError(f"top={list(top)} must be numbers of passages, 1 or more")
    check_metrics(metrics)
    check_match(match)


def _judge(
    run: Path,
    qrels: str | Path | None,
    queries: str | Path | None,
    collection: str | Path | None,
    split: str | None,
    match: str,
    metrics: Sequence[str],
    top: Sequence[int],
) -> PerQuery:
    found: PerQuery = {}
    if qrels is not None:
        found |= _by_judgements(read_run(run), qrels_file(Path(qrels), split), metrics)
    flags = _answer_flags(run, queries, collection, split, match, needed=qrels is None)
    if flags is not None:
        found |= {f"Top@{k}": {query: float(any(hits[:k])) for query, hits in flags.items()} for k in top}
    if not found:
        raise ValueError(f"{run} can be judged by nothing; give --qrels, or --queries with answers and --collection")
    return found


def _by_judgements(run: Run, file: Path, metrics: Sequence[str]) -> PerQuery:
    qrels = read_qrels(file)
    if not any(grade > 0 for grades in qrels.values() for grade in grades.values()):
        raise DataError(f"{file} judges no passage as relevant, so there is nothing to find; give other judgements")
    if lost := [query for query in qrels if query not in run]:
        note(f"{len(lost):,} of {len(qrels):,} judged queries have no results and count as 0, as {shown(lost[0])}")
    return judged_metrics(run, qrels, metrics)


def _answer_flags(
    run: Path, queries: str | Path | None, collection: str | Path | None, split: str | None, match: str, needed: bool
) -> Flags | None:
    """By the given queries and collection, else by what the run itself holds; None where neither knows answers."""
    if queries is not None:
        asked = read_queries(queries, split)
        known = [query for query in asked if query.answers]
        if not known and not needed:
            return None
        if not known:
            raise DataError(f"{queries} holds no answers; give queries with answers, or --qrels")
        if collection is None:
            raise ValueError("answers are looked up in the passages' texts; give --collection")
        _tell_odd_answers(asked, match)
        return answer_flags(read_run(run), known, collection, match)
    return _own_flags(run, match) if bare_suffix(run) == ".json" else None


def answer_flags(run: Run, queries: Sequence[Query], collection: str | Path, match: str = "string") -> Flags:
    """Whether each passage contains an answer; the collection is read once, as a stream. A query without results has no flags."""
    from contaccum.data.answers import AnswerMatcher, searchable

    if not any(query.id in run for query in queries):
        raise DataError(f"the run has none of the queries, such as {shown(queries[0].id)}; do they belong together?")
    matchers = {query.id: AnswerMatcher(query.answers, match) for query in queries}
    asked: dict[str, list[tuple[str, int]]] = {}  # passage -> (query, rank) of all who found it
    for query in matchers:
        for rank, hit in enumerate(run.get(query, [])):
            asked.setdefault(hit.id, []).append((query, rank))
    flags = {query: [False] * len(run.get(query, [])) for query in matchers}
    for key, _, text in read_collection_of(collection):
        places = asked.pop(key, None)
        form = searchable(text, match) if places else ""
        for query, rank in places or []:
            flags[query][rank] = matchers[query].found_in(form)
    if asked:
        raise DataError(f"{collection} does not hold the passage {shown(next(iter(asked)))} of the run; do they belong together?")
    return flags


def _own_flags(run: Path, match: str) -> Flags | None:
    from contaccum.data.answers import AnswerMatcher, searchable

    flags: Flags = {}
    asked: list[Query] = []
    for query, _, texts in read_dpr_results(run):
        asked.append(query)
        if query.answers:
            matcher = AnswerMatcher(query.answers, match)
            flags[query.id] = [matcher.found_in(searchable(text, match)) for text in texts]
    if flags:
        _tell_odd_answers(asked, match)
    return flags or None


def _tell_odd_answers(queries: Sequence[Query], match: str) -> None:
    """As DPR counts them, which is seldom what is meant."""
    from contaccum.data.answers import found_anywhere, found_nowhere

    if unknown := [query.id for query in queries if not query.answers]:
        note(f"{len(unknown):,} of {len(queries):,} queries have no answers and are left out of Top@k, as {shown(unknown[0])}")
    answers = [answer for query in queries for answer in query.answers]
    if odd := found_anywhere(answers, match):
        why = "match nothing at all too" if match == "regex" else "are without a word"
        note(f"{len(odd):,} answers {why}, and every passage holds them, as {shown(odd[0])}")
    if odd := found_nowhere(answers, match):
        note(f"{len(odd):,} answers are no regular expressions, and no passage holds them, as {shown(odd[0])}")
