"""The files behind an evaluation: ranking, judgements, and the texts of queries and passages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.common.errors import DataError
from contaccum.data.readers.beir import is_beir, qrels_file, read_qrels
from contaccum.data.readers.collections import read_collection_of
from contaccum.data.readers.files import bare_suffix
from contaccum.data.readers.queries import Query, read_queries
from contaccum.retrieval.runs import read_dpr_results

REMEDY = "run contaccum evaluate with --qrels of a BEIR folder, or with --queries and --collection"


@dataclass(frozen=True)
class Sources:
    run: Path
    qrels: Path | None
    queries: Path | None  # None: in the run itself, which is DPR's retriever output
    collection: Path | None  # likewise
    split: str | None
    match: str

    @staticmethod
    def of(stored: dict[str, Any]) -> Sources:
        """What `contaccum.retrieval.evaluate` wrote under "sources"; DataError where a file is gone or the texts are not known."""
        run, qrels, queries, collection = (
            Path(stored[name]) if stored.get(name) else None for name in ("run", "qrels", "queries", "collection")
        )
        if run is None:
            raise DataError("evaluation.json does not say which run file it judged; write it again with contaccum evaluate")
        folder = None if qrels is None else next((place for place in (qrels, qrels.parent.parent) if is_beir(place)), None)
        split = stored.get("split") if queries is not None else None
        queries, collection = queries or folder, collection or folder
        if bare_suffix(run) != ".json" and (queries is None or collection is None):
            raise DataError(f"where the texts of {run} are is not known; {REMEDY}")
        for file in (run, qrels, queries, collection):
            if file is not None and not file.exists():
                raise DataError(f"{file} does not exist; run the report where contaccum evaluate was run, or evaluate again")
        judged = None if qrels is None else qrels_file(qrels, stored.get("split"))
        return Sources(run, judged, queries, collection, split, str(stored.get("match") or "string"))

    def same_texts(self, other: Sources) -> bool:
        """Whether both rank the same passages for the same queries, judged alike."""
        if None in (self.queries, self.collection):  # each holds its own texts: they are as alike as their ids
            return other.queries == self.queries and other.collection == self.collection
        ours, theirs = ((one.qrels, one.queries, one.collection) for one in (self, other))
        alike = all(a == b or (a and b and a.resolve() == b.resolve()) for a, b in zip(ours, theirs, strict=True))
        return alike and (self.split, self.match) == (other.split, other.match)

    def query_texts(self) -> dict[str, Query]:
        found = read_queries(self.queries, self.split) if self.queries else (query for query, _, _ in read_dpr_results(self.run))
        return {query.id: query for query in found}

    def passages(self) -> Iterator[tuple[str, str, str]]:
        """(id, title, text), as a stream; a passage may appear more than once."""
        if self.collection is not None:
            yield from read_collection_of(self.collection)
        else:
            for _, hits, texts in read_dpr_results(self.run):
                yield from ((hit.id, "", text) for hit, text in zip(hits, texts, strict=True))

    def relevant(self) -> dict[str, set[str]] | None:
        """query -> passages judged relevant; None where answers decide."""
        if self.qrels is None:
            return None
        return {query: {key for key, grade in grades.items() if grade > 0} for query, grades in read_qrels(self.qrels).items()}
