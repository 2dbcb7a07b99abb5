"""Plain text into the set that pairs are drawn from: pieces of documents with a key of each document, duplicates dropped.

Memory is bounded: texts are streamed to disk; of each piece 8 bytes are held, and a few times that while duplicates are looked for.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, Value
from tqdm import tqdm

from contaccum.common.errors import DataError
from contaccum.common.outputs import check_new, scratch_for
from contaccum.data.drawn_pairs import KINDS, OF_SENTENCES, SHORTEST_CROP, DrawPairs
from contaccum.data.prepared import FLUSH_CHARACTERS, SAMPLES, PrepareSummary, SplitSummary, save_tables
from contaccum.data.readers.plain_text import read_documents
from contaccum.data.readers.rows import Tally

PIECE_WORDS = 256  # longer texts are cut
SHORTEST_WORDS = 8  # of a text that is cropped
PIECES = Features({"title": Value("string"), "text": Value("string"), "document": Value("int64"), "piece": Value("int32")})
TITLED = ("title-body", "dropout")
# After a full stop, with or without a closing mark, and at the end of a line.
SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]”’])\s+|(?<=[。！？])|\s*\n\s*")


def prepare_documents(source: str | Path | None, output: Path, kind: str) -> PrepareSummary:
    """Pieces of all documents of a collection or of plain text, from which `DrawPairs` draws pairs of one kind."""
    if kind not in KINDS:
        raise ValueError(f"unsupervised {kind!r}: use one of {', '.join(KINDS)}")
    if source is None:
        raise ValueError("no source: give a collection (a BEIR folder, a passages .tsv, a .jsonl), a .txt file or a folder of .txt files")
    check_new(output)
    with scratch_for(output) as scratch:
        tally = Tally()
        hashes = _write(_pieces(read_documents(Path(source)), kind, tally), scratch / "pieces.arrow")
        table = _without_duplicates(Dataset.from_file(str(scratch / "pieces.arrow")), hashes, tally)
        summary = PrepareSummary(str(output), kind, {"train": _summary(table, kind, tally)})
        save_tables({"train": table}, summary, scratch / "whole", output)
    return summary


def _pieces(documents: Iterator[tuple[str, str, str]], kind: str, tally: Tally) -> Iterator[dict[str, Any]]:
    for _, title, text in tqdm(documents, desc="reading documents", unit=" documents", disable=None):
        title = " ".join(title.split()) if kind in TITLED else ""  # what is not used makes no two texts differ
        units = [" ".join(part.split()) for part in SENTENCE_ENDS.split(text)] if kind in OF_SENTENCES else text.split()
        units = [unit for unit in units if unit]
        if reason := _unusable(kind, title, units):
            tally.dropped[reason] += 1
            continue
        joint = "\n" if kind in OF_SENTENCES else " "
        document = _key(f"{title}\n{' '.join(units)}")
        for number, piece in enumerate(cut(units)):
            if kind in OF_SENTENCES and len(piece) == 1:
                tally.dropped["of one sentence"] += 1
            else:
                yield {"title": title, "text": joint.join(piece), "document": document, "piece": number}


def _unusable(kind: str, title: str, units: list[str]) -> str | None:
    if not units:
        return "without text"
    if kind == "title-body" and not title:
        return "without a title"
    if kind == "crops" and len(units) < SHORTEST_WORDS:
        return f"of fewer than {SHORTEST_WORDS} words"
    if kind == "crops" and sum(map(len, units)) + len(units) - 1 < 2 * SHORTEST_CROP:
        return f"of fewer than {2 * SHORTEST_CROP} characters"
    return "of one sentence" if kind in OF_SENTENCES and len(units) == 1 else None


def cut(units: list[str], limit: int = PIECE_WORDS) -> list[list[str]]:
    """Words, or whole sentences, as as few lists as have about `limit` words each, all of about one length."""
    ends = list(accumulate(unit.count(" ") + 1 for unit in units))
    pieces = -(-ends[-1] // limit)
    places = [0, *(int(np.searchsorted(ends, ends[-1] * i / pieces)) + 1 for i in range(1, pieces)), len(units)]
    return [units[a:b] for a, b in pairwise(places) if a < b]


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _write(rows: Iterator[dict[str, Any]], path: Path) -> array[int]:
    """Write them batch by batch; a hash of what each is compared by."""
    hashes, waiting = array("q"), 0
    with datasets.arrow_writer.ArrowWriter(features=PIECES, path=str(path)) as writer:
        for row in rows:
            writer.write(row)
            hashes.append(_key(f"{row['title']}\n{row['text']}"))
            waiting += len(row["text"])
            if waiting > FLUSH_CHARACTERS:
                writer.write_examples_on_file()
                waiting = 0
        writer.finalize()
    return hashes


def _without_duplicates(table: Dataset, hashes: array[int], tally: Tally) -> Dataset:
    if not hashes:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in tally.dropped.items()) or "it has none"
        raise DataError(f"the source has no usable document ({reasons})")
    first = np.sort(np.unique(np.frombuffer(hashes, np.int64), return_index=True)[1])
    if len(first) < len(table):
        tally.dropped["that were there before"] = len(table) - len(first)
        table = table.select(first)
    return table


def _summary(table: Dataset, kind: str, tally: Tally) -> SplitSummary:
    summary = SplitSummary(rows=len(table), dropped=dict(tally.dropped))
    summary.notes = [f"pairs are drawn when they are read, for every epoch: {KINDS[kind]}"]
    for query, positive in zip(*_drawn(table, kind), strict=True):
        summary.add_sample(query, positive)
    return summary


def _drawn(table: Dataset, kind: str) -> tuple[list[str], list[str]]:
    pairs = DrawPairs(kind, seed=0)(table[:SAMPLES])
    return pairs["query"], pairs["positive"]
