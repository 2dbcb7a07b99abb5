"""Results of a search: TREC run files, and DPR's retriever output with texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from contaccum.common.errors import DataError
from contaccum.common.outputs import sole_path, whole_file
from contaccum.data.readers.collections import read_collection_of
from contaccum.data.readers.files import ID_FIELDS, bare_suffix, first_text, read_lines, shown, text_field, text_list
from contaccum.data.readers.ids import SeenIds
from contaccum.data.readers.json_array import read_array
from contaccum.data.readers.queries import Query
from contaccum.data.readers.store import TextStore

TAG = "contaccum-tokens-"  # of our runs, before the tokens that were read of a passage


class Hit(NamedTuple):
    id: str
    score: float


Run = dict[str, list[Hit]]  # query id -> passages, best first


def write_run(file: TextIO, run: Mapping[str, Sequence[Hit]], tag: str = "contaccum") -> None:
    """`query Q0 passage rank score tag`, ranks from 1; scores keep all digits of a float32."""
    for query, hits in run.items():
        for rank, (key, score) in enumerate(hits, 1):
            file.write(f"{_word(query)} Q0 {_word(key)} {rank} {score:.9g} {tag}\n")


def _word(key: str) -> str:
    if len(key.split()) != 1 or key != key.strip():
        raise DataError(f"the id {shown(key)} is no single word, which a TREC run file needs; rename it")
    return key


def tokens_of(path: str | Path) -> int | None:
    """Tokens that were read of a passage, where the run's tag says so."""
    if bare_suffix(Path(path)) == ".json":
        return None
    tag = next((line.split()[-1] for _, line in read_lines(Path(path)) if line.strip()), "")
    number = tag.removeprefix(TAG)
    return int(number) if tag.startswith(TAG) and number.isdigit() else None


def read_run(path: str | Path) -> Run:
    """A TREC run file, passages by rank; or DPR's retriever output (.json), as it is ordered."""
    path = Path(path)
    run = _dpr_run(path) if bare_suffix(path) == ".json" else _trec_run(path)
    if not run:
        raise DataError(f"{path} holds no results")
    return run


def _dpr_run(path: Path) -> Run:
    return {query.id: hits for query, hits, _ in read_dpr_results(path)}


def _trec_run(path: Path) -> Run:
    ranked: dict[str, dict[str, tuple[int, float]]] = {}
    for number, line in read_lines(path):
        fields = line.split()
        if not fields:
            continue
        place = f"{path}, line {number}"
        if len(fields) != 6 or not fields[3].isascii() or not fields[3].removeprefix("-").isdigit() or len(fields[3]) > 18:
            raise DataError(f"{place}: 'query Q0 passage rank score tag' is needed, not {shown(line.strip())}")
        query, _, key, rank, score, _ = fields
        known = ranked.setdefault(query, {})
        if key in known:
            raise DataError(f"{place}: the passage {shown(key)} appears a second time under query {shown(query)}")
        known[key] = int(rank), _score(score, place)
    return {
        query: [Hit(key, score) for key, (_, score) in sorted(hits.items(), key=lambda hit: hit[1][0])] for query, hits in ranked.items()
    }


def _score(score: Any, place: str) -> float:
    """A number as other programs read it too: Python also takes 1_0."""
    try:
        number = math.nan if isinstance(score, bool) or "_" in str(score) else float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{place}: {shown(score)} is no score; give a finite number")
    return number


def read_dpr_results(path: Path) -> Iterator[tuple[Query, list[Hit], list[str]]]:
    """(query with its answers, hits, the hits' texts) for every record of DPR's retriever output."""
    seen = SeenIds()
    for number, (place, record) in enumerate(read_array(path)):
        key = first_text(record, ID_FIELDS, place) if "id" in record else str(number)
        if not seen.add(key):
            raise DataError(f"{place}: the query id {shown(key)} appears a second time")
        query = Query(key, text_field(record, "question", place), text_list(record, "answers", place))
        passages = record.get("ctxs")
        if not isinstance(passages, list) or not all(isinstance(passage, dict) for passage in passages):
            raise DataError(f"{place}: no record of DPR's retriever output; give 'question', 'answers' and a list of 'ctxs'")
        hits = [Hit(first_text(passage, ID_FIELDS, place), _score(passage.get("score"), place)) for passage in passages]
        if len({hit.id for hit in hits}) < len(hits):
            raise DataError(f"{place}: a passage appears a second time")
        yield query, hits, [text_field(passage, "text", place) for passage in passages]


def write_dpr_results(path: str | Path, run: Run, queries: Iterable[Query], collection: str | Path, match: str = "string") -> None:
    """DPR's retriever output: per query `question, answers, ctxs`, each of these `id, title, text, score, has_answer`.

    `has_answer` is there where answers are known. Texts pass through a scratch file: memory does not grow with their number.
    """
    known = {query.id: query for query in queries}
    if (missing := next((key for key in run if key not in known), None)) is not None:
        raise DataError(f"the query {shown(missing)} of the run is not among the queries that were given; do they belong together?")
    wanted = {hit.id for hits in run.values() for hit in hits}
    path = Path(path)
    entries = ((key, json.dumps([title, text])) for key, title, text in read_collection_of(collection) if key in wanted)
    with (
        sole_path(path) as part,
        TextStore(part.with_name("texts.sqlite"), entries) as texts,
        whole_file(part) as file,
    ):
        for number, (key, hits) in enumerate(run.items()):
            record = _record(known[key], [(hit, _entry(texts, hit, collection)) for hit in hits], match)
            file.write(("[\n" if number == 0 else ",\n") + json.dumps(record, ensure_ascii=False))
        file.write("\n]\n")


def _entry(texts: TextStore, hit: Hit, collection: str | Path) -> tuple[str, str]:
    entry = texts.get(hit.id)
    if entry is None:
        raise DataError(f"{collection} does not hold the passage {shown(hit.id)} of the run; do they belong together?")
    title, text = json.loads(entry)
    return title, text


def _record(query: Query, passages: Sequence[tuple[Hit, tuple[str, str]]], match: str) -> dict[str, Any]:
    from contaccum.data.answers import AnswerMatcher, searchable

    matcher = AnswerMatcher(query.answers, match)
    found = [{"id": hit.id, "title": title, "text": text, "score": f"{hit.score:.9g}"} for hit, (title, text) in passages]
    flags = [{"has_answer": matcher.found_in(searchable(p["text"], match))} if query.answers else {} for p in found]
    contexts = [{**passage, **flag} for passage, flag in zip(found, flags, strict=True)]
    return {"id": query.id, "question": query.text, "answers": query.answers, "ctxs": contexts}
