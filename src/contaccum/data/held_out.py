"""Rows kept back for testing, where a source has no test split, and a BEIR folder to judge a model by them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from contaccum.data.readers.rows import Tally, TrainingRow

RowReader = Callable[[Tally], Iterator[TrainingRow]]


def hold_out(rows: Iterable[TrainingRow], share: float) -> dict[str, RowReader]:
    """About `share` of the rows, chosen by a hash of their query, as "test", the others as "train". All rows of a query stay together."""

    def part(held: bool) -> RowReader:
        return lambda tally: (row for row in rows if _is_held(row["query"], share) == held)

    return {"train": part(held=False), "test": part(held=True)}


def check_hold_out(share: float | None, splits: Iterable[str]) -> None:
    if share is not None and not 0 < share < 1:
        raise ValueError(f"hold_out={share} must be a share between 0 and 1, as 0.1")
    if share is not None and "test" in splits:
        raise ValueError("hold_out makes a test split, but the source has one; leave it out")


def _is_held(query: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(query.encode()).digest()[:8], "big") < share * 2**64


def write_judged(tables: dict[str, Any], folder: Path) -> None:
    """A BEIR folder: every passage of every split once as the collection, the test queries, and their positives as judgements."""
    (folder / "qrels").mkdir(parents=True)
    number: dict[bytes, str] = {}  # of a passage, by its hash: the texts themselves are not held
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as corpus:
        for text in (text for table in tables.values() for row in table for text in (row["positive"], *row["negatives"])):
            if (key := _digest(text)) not in number:
                number[key] = f"p{len(number)}"
                corpus.write(json.dumps({"_id": number[key], "title": "", "text": text}, ensure_ascii=False) + "\n")
    queries: dict[str, str] = {}
    with open(folder / "qrels" / "test.tsv", "w", encoding="utf-8") as qrels:
        qrels.write("query-id\tcorpus-id\tscore\n")
        pairs = {(row["query"], number[_digest(row["positive"])]): None for row in tables["test"]}
        for query, passage in pairs:
            qrels.write(f"{queries.setdefault(query, f'q{len(queries)}')}\t{passage}\t1\n")
    lines = (json.dumps({"_id": key, "text": query}, ensure_ascii=False) + "\n" for query, key in queries.items())
    (folder / "queries.jsonl").write_text("".join(lines), encoding="utf-8")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
