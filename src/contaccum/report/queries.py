"""The query browser's data: a few hundred queries with each run's ranking, the relevant passages and their ranks.

1. The queries on which runs differ most by the headline metric are chosen, and some at random.
2. Each run file is read, one at a time; of the chosen queries the ranking stays.
3. One pass over the collection finds the texts and, where answers decide, which passages contain one.
4. Queries are taken, in the order of 1, until the texts are as many bytes as the page bears.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contaccum.common.errors import DataError
from contaccum.data.readers.files import shown
from contaccum.data.readers.queries import Query
from contaccum.report.folders import Evaluation
from contaccum.report.rows import ConfigRow
from contaccum.report.sources import Sources
from contaccum.retrieval.runs import read_run

BY_DIFFERENCE, AT_RANDOM = 240, 60  # queries at most
DEPTH = 10  # passages of a ranking
RELEVANT = 5  # relevant passages below that, at most
CHARACTERS = 500  # of a text
BUDGET_BYTES = 3_500_000

Ranking = dict[str, list[str]]  # query -> passages, best first
Texts = dict[str, tuple[str, str]]  # passage -> title, text


@dataclass(frozen=True)
class Browser:
    metric: str
    runs: list[str]  # as the page calls them
    rows: list[str]  # the row that each belongs to
    judged: int  # queries that all of them were judged on
    queries: list[dict[str, Any]]
    texts: Texts

    def as_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "runs": self.runs, "queries": self.queries, "texts": self.texts}

    def description(self) -> str:
        """How many queries there are, and why these."""
        random_ones = sum(query["random"] for query in self.queries)
        differing = len(self.queries) - random_ones
        parts = [f"{differing:,} on which runs differ most by {self.metric}"] if differing else []
        parts += [f"{random_ones:,} drawn at random"] if random_ones else []
        return f"{len(self.queries):,} of {self.judged:,} queries: {' and '.join(parts)}. Texts are cut at {CHARACTERS} characters."


def query_browser(rows: Sequence[ConfigRow], metric: str) -> Browser:
    """DataError that says why where there can be none."""
    members = _members(rows, metric)
    sources = [Sources.of(evaluation.sources) for _, _, evaluation in members]
    if odd := next((one for one in sources if not sources[0].same_texts(one)), None):
        raise DataError(f"{sources[0].run} and {odd.run} were judged with different files; evaluate all runs with the same")
    values = [evaluation.per_query[metric] for _, _, evaluation in members]
    judged, chosen = choose(values)
    queries = _queries(sources, chosen)
    rankings = [_ranking(one, chosen) for one in sources]
    relevant = sources[0].relevant()
    if relevant is None:
        relevant, texts = _by_answers(sources, queries, rankings)
    else:
        texts = _texts(sources, queries, rankings, relevant)
    entries = [_entry(queries[key], drawn, [v[key] for v in values], rankings, relevant.get(key, set())) for key, drawn in chosen.items()]
    kept, used = _within(entries, texts, BUDGET_BYTES)
    return Browser(metric, [label for label, _, _ in members], [row for _, row, _ in members], judged, kept, used)


def _members(rows: Sequence[ConfigRow], metric: str) -> list[tuple[str, str, Evaluation]]:
    """(what the page calls it, its row, evaluation) of every run with values per query."""
    found = []
    for row in rows:
        for run in row.runs:
            if run.evaluation is not None and run.evaluation.per_query.get(metric):
                label = row.name if len(row.runs) == 1 else f"{row.name}, seed {run.seed}"
                found.append((label, row.name, run.evaluation))
    if not found:
        raise DataError(f"no evaluation.json holds values of {metric} per query; write it with contaccum evaluate")
    return found


def choose(
    values: Sequence[Mapping[str, float]], by_difference: int = BY_DIFFERENCE, at_random: int = AT_RANDOM
) -> tuple[int, dict[str, bool]]:
    """The number of queries that all runs share, and those chosen -> whether by chance, the same ones each time.

    First those whose highest and lowest value differ most, then chance among the rest; a random one follows every four of the others.
    """
    shared = sorted(key for key in values[0] if all(key in other for other in values))
    if not shared:
        raise DataError("the runs were judged on different queries; evaluate all on the same")
    spread = {key: max(v[key] for v in values) - min(v[key] for v in values) for key in shared}
    differing = sorted((key for key in shared if spread[key] > 0), key=lambda key: (-spread[key], key))[:by_difference]
    rest = sorted(set(shared) - set(differing))
    drawn = random.Random(0).sample(rest, min(len(rest), at_random if differing else by_difference + at_random))
    chosen: dict[str, bool] = {}
    while differing or drawn:
        chosen |= dict.fromkeys(differing[:4], False) | dict.fromkeys(drawn[:1], True)
        differing, drawn = differing[4:], drawn[1:]
    return len(shared), chosen


def _queries(sources: Sequence[Sources], chosen: Iterable[str]) -> dict[str, Query]:
    known = sources[0].query_texts()
    if missing := next((key for key in chosen if key not in known), None):
        raise DataError(f"{sources[0].queries} does not hold the query {shown(missing)}; do queries and evaluation belong together?")
    return {key: known[key] for key in chosen}


def _ranking(source: Sources, chosen: Iterable[str]) -> Ranking:
    """In the order that the metric saw: where passages were judged, equal scores by falling id, as trec_eval has them."""
    run = read_run(source.run)
    if source.qrels is None:
        return {key: [hit.id for hit in run.get(key, [])] for key in chosen}
    return {key: [hit.id for hit in sorted(run.get(key, []), key=lambda hit: (hit.score, hit.id), reverse=True)] for key in chosen}


def _passages(sources: Sequence[Sources]) -> Iterator[tuple[str, str, str]]:
    """All passages that the rankings may name, with a sign of life."""
    from tqdm import tqdm

    files = sources[:1] if sources[0].collection is not None else sources
    yield from tqdm((entry for source in files for entry in source.passages()), desc="reading passages", unit=" passages", disable=None)


def _texts(
    sources: Sequence[Sources], queries: Mapping[str, Query], rankings: Sequence[Ranking], relevant: Mapping[str, set[str]]
) -> Texts:
    """The texts of each ranking's first passages and of the relevant ones."""
    wanted = {key for ranking in rankings for hits in ranking.values() for key in hits[:DEPTH]}
    wanted |= {key for query in queries for key in relevant.get(query, ())}
    return {key: (_cut(title), _cut(text)) for key, title, text in _passages(sources) if key in wanted}


def _by_answers(sources: Sequence[Sources], queries: Mapping[str, Query], rankings: Sequence[Ranking]) -> tuple[dict[str, set[str]], Texts]:
    """query -> passages among all rankings that contain an answer; and the texts of these and of each ranking's first passages."""
    from contaccum.data.answers import AnswerMatcher, searchable

    match = sources[0].match
    matchers = {query.id: AnswerMatcher(query.answers, match) for query in queries.values()}
    asked: dict[str, set[str]] = {}  # passage -> the queries that found it
    for ranking in rankings:
        for query, hits in ranking.items():
            for key in hits:
                asked.setdefault(key, set()).add(query)
    top = {key for ranking in rankings for hits in ranking.values() for key in hits[:DEPTH]}
    relevant: dict[str, set[str]] = {}
    texts: Texts = {}
    for key, title, text in _passages(sources):
        form = searchable(text, match) if key in asked else ""
        answered = [query for query in asked.get(key, ()) if queries[query].answers and matchers[query].found_in(form)]
        for query in answered:
            relevant.setdefault(query, set()).add(key)
        if answered or key in top:
            texts[key] = (_cut(title), _cut(text))
    return relevant, texts


def as_embedded(value: Any) -> str:
    """JSON as it can stand in a page: without `<` it cannot end its element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1].rstrip() + "…"


def _entry(query: Query, drawn: bool, values: list[float], rankings: Sequence[Ranking], relevant: set[str]) -> dict[str, Any]:
    """One query as the page reads it. `wanted`: relevant passages that it shows even below the first ten; `ranks`: theirs in each run."""
    hits = [ranking[query.id] for ranking in rankings]
    places = [{key: rank for rank, key in enumerate(keys, 1) if key in relevant} for keys in hits]
    firsts = [min(found, key=lambda key: found[key]) for found in places if found]
    wanted = list(dict.fromkeys([*firsts, *sorted(relevant, key=lambda key: (min(f.get(key, 10**9) for f in places), key))]))[:RELEVANT]
    top = [keys[:DEPTH] for keys in hits]
    return {
        "id": query.id,
        "text": _cut(query.text),
        "answers": [_cut(answer) for answer in query.answers[:DEPTH]],
        "random": drawn,
        "values": values,
        "first": [min(found.values(), default=None) for found in places],
        "depth": [len(keys) for keys in hits],
        "top": top,
        "relevant": sorted(relevant & {key for keys in [*top, wanted] for key in keys}),
        "wanted": wanted,
        "ranks": [[found.get(key) for key in wanted] for found in places],
    }


def _within(entries: Iterable[dict[str, Any]], texts: Texts, budget: int) -> tuple[list[dict[str, Any]], Texts]:
    """As many entries, from the first, as fit with their texts."""
    kept: list[dict[str, Any]] = []
    used: Texts = {}
    spent = 0
    for entry in entries:
        new = {key for keys in [*entry["top"], entry["wanted"]] for key in keys} - used.keys()
        if missing := next((key for key in sorted(new) if key not in texts), None):
            raise DataError(f"the collection does not hold the passage {shown(missing)}; do collection and run belong together?")
        added = {key: texts[key] for key in sorted(new)}
        spent += sum(len(as_embedded(part).encode()) for part in (entry, added))
        if kept and spent > budget:
            break
        kept.append(entry)
        used |= added
    return kept, used
