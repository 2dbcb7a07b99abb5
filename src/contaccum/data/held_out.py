"""Rows kept back for choosing and for testing, where a source has no such splits, and a BEIR folder to judge a model by them.

Rows that share a query or a positive, but for case and blanks, are one group, and so are rows linked by others. A group is held out
whole or not at all: no text of a held-out pair is trained on as a query or a positive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contaccum.common.errors import DataError
from contaccum.data.readers.rows import Tally, TrainingRow

RowReader = Callable[[Tally], Iterator[TrainingRow]]
Numbers = NDArray[np.int64]
BATCH = 1000  # rows read at once


def hold_out(table: Any, wanted: Mapping[str, int], keep_order: bool = True) -> dict[str, RowReader]:
    """The rows of "train" and of every split that is `wanted`, with about so many rows; in the table's order or shuffled."""
    parts = split_rows(table, wanted)
    chance = np.random.default_rng(0)
    return {split: _reader(table, rows if keep_order else chance.permutation(rows)) for split, rows in parts.items()}


def _reader(table: Any, rows: Numbers) -> RowReader:
    def read(tally: Tally) -> Iterator[TrainingRow]:
        for start in range(0, len(rows), BATCH):
            columns = table[rows[start : start + BATCH].tolist()]
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))  # type: ignore[misc]

    return read


def split_rows(table: Any, wanted: Mapping[str, int]) -> dict[str, Numbers]:
    """split -> numbers of its rows, ascending. Which groups are held out depends on their texts alone, not on their order."""
    groups, order = _groups(table)
    sizes = np.bincount(groups)
    taken = np.full(len(sizes), -1, dtype=np.int64)  # of a group, the place of its split in `wanted`
    waiting = iter(order)
    for place, (split, rows) in enumerate(wanted.items()):
        _take(taken, sizes, waiting, place, rows)
        if not (taken == place).any():
            raise DataError(
                f"{len(groups):,} rows are too few, or share too many texts, for a split {split!r} of {rows:,} rows without texts of the "
                f"others (groups of rows with a text in common: {len(sizes):,}); give more pairs, or splits of your own"
            )
    if not (taken == -1).any():
        raise DataError(f"no row of {len(groups):,} is left for training; give more pairs, or splits of your own")
    names = [*wanted, "train"]
    return {names[place]: np.flatnonzero(taken[groups] == place) for place in (-1, *range(len(wanted)))}


def _take(taken: Numbers, sizes: Numbers, waiting: Iterator[np.int64], place: int, rows: int) -> None:
    """Groups for a split until it has `rows`. A large one, as of a popular answer, would be most of it: it stays in training."""
    left, least = rows, min(int(sizes.min()), rows)  # where every pair appears three times, a group has three rows at least
    while left > 0 and (group := next(waiting, None)) is not None:
        if sizes[group] <= max(least, rows // 10, min(left, rows // 3)):
            taken[group] = place
            left -= int(sizes[group])


def _groups(table: Any) -> tuple[Numbers, Numbers]:
    """The group of each row, and the groups in an order that depends on their texts. 40 bytes a row, no texts are held."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    queries, positives = (_hashes(table, name) for name in ("query", "positive"))
    found, nodes = np.unique(np.concatenate([queries, positives]), return_inverse=True)
    first, second = nodes[: len(queries)], nodes[len(queries) :]
    graph = coo_matrix((np.ones(len(first), dtype=np.int8), (first, second)), shape=(len(found), len(found)))
    _, of_node = connected_components(graph, directed=False)
    groups = of_node[first].astype(np.int64)
    least = np.full(groups.max() + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(least, of_node, found)
    return groups, np.argsort(least * np.uint64(0x9E3779B97F4A7C15), kind="stable")  # mixed: a large group's least hash is small


def _hashes(table: Any, column: str) -> NDArray[np.uint64]:
    texts = (text for batch in table.select_columns([column]).iter(BATCH) for text in batch[column])
    return np.fromiter((_text_hash(text) for text in texts), dtype=np.uint64, count=len(table))


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(text.lower().split()).encode(), digest_size=8).digest(), "big")


def check_hold_out(share: float | None, splits: Iterable[str]) -> None:
    if share is not None and not 0 < share < 0.5:
        raise ValueError(f"hold_out={share} must be a share between 0 and 0.5, as 0.1")
    if share is not None and "test" in splits:
        raise ValueError("hold_out makes a test split, but the source has one; leave it out")


def write_judged(tables: Mapping[str, Any], folder: Path, others: Iterable[str] = ()) -> None:
    """A BEIR folder: every passage of every split once, and the `others`, as the collection; queries and judgements of dev and test."""
    (folder / "qrels").mkdir(parents=True)
    number: dict[bytes, str] = {}  # of a passage, by its hash: the texts themselves are not held
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as corpus:
        for text in _passages(tables, others):
            if (key := _digest(text)) not in number:
                number[key] = f"p{len(number)}"
                corpus.write(json.dumps({"_id": number[key], "title": "", "text": text}, ensure_ascii=False) + "\n")
    queries: dict[str, str] = {}
    for split in (name for name in ("dev", "test") if name in tables):
        with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8") as qrels:
            qrels.write("query-id\tcorpus-id\tscore\n")
            pairs = {(row["query"], number[_digest(row["positive"])]): None for row in tables[split]}
            for query, passage in pairs:
                qrels.write(f"{queries.setdefault(query, f'q{len(queries)}')}\t{passage}\t1\n")
    lines = (json.dumps({"_id": key, "text": query}, ensure_ascii=False) + "\n" for query, key in queries.items())
    (folder / "queries.jsonl").write_text("".join(lines), encoding="utf-8")


def _passages(tables: Mapping[str, Any], others: Iterable[str]) -> Iterator[str]:
    for table in tables.values():
        for batch in table.select_columns(["positive", "negatives"]).iter(BATCH):
            for positive, negatives in zip(batch["positive"], batch["negatives"], strict=True):
                yield positive
                yield from negatives
    yield from others


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
