"""BEIR folders: `corpus.jsonl`, `queries.jsonl`, `qrels/SPLIT.tsv`, each plain, .gz or .xz."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from contaccum.common.console import note
from contaccum.common.errors import DataError
from contaccum.data.readers.files import ID_FIELDS, SUFFIXES, find, first_text, passage_text, read_jsonl, read_lines, shown, text_field
from contaccum.data.readers.ids import SeenIds
from contaccum.data.readers.rows import Tally, TrainingRow

MOST_REPEATED = 0.01  # of a file's lines, whose id another one has


class TextLookup(Protocol):
    """id -> text: a dict, or a store on disk."""

    def get(self, key: str, /) -> str | None: ...


class Judgement(NamedTuple):
    line: int
    query: str
    document: str
    score: int


def is_beir(folder: Path) -> bool:
    return folder.is_dir() and any((folder / f"corpus.jsonl{suffix}").exists() for suffix in SUFFIXES)


def read_collection(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(id, title, text) for every document of a BEIR folder, as a stream."""
    return read_entries(find(folder, "corpus.jsonl"))


def read_entries(path: Path, need_ids: bool = True) -> Iterator[tuple[str, str, str]]:
    """(id, title, text) for every line of a corpus or queries file, as a stream; a title that is missing is empty.

    Without `need_ids`, lines may have none; their numbers then take its place. Of a few lines with one id the first counts, and a note
    says so. Where they are many, ids are not what they should be.
    """
    seen, line, repeated = SeenIds(), 0, list[str]()
    for line, record in read_jsonl(path):
        place = f"{path}, line {line}"
        key = first_text(record, ID_FIELDS, place) if need_ids else str(line)
        if not seen.add(key):
            repeated.append(f"{place}: the id {shown(key)} appears a second time")
            continue
        title = "" if record.get("title") is None else text_field(record, "title", place)
        yield key, title, text_field(record, "text", place)
    if not line:
        raise DataError(f"{path} is empty")
    if len(repeated) > MOST_REPEATED * line:
        raise DataError(f"{repeated[0]}; give each text an id of its own")
    if repeated:
        _note_once(f"{repeated[0]}; the first of the texts is taken{f', as for {len(repeated) - 1} more' if len(repeated) > 1 else ''}")


@cache
def _note_once(line: str) -> None:
    note(line)


def read_texts(path: Path) -> dict[str, str]:
    """id -> text of a corpus or queries file; a title stands before its text, as BEIR joins them."""
    return {key: passage_text(title, text) for key, title, text in read_entries(path)}


def read_judgements(path: Path) -> Iterator[Judgement]:
    """Every line of a qrels file but its header, blank ones and repetitions; a (query, document) that is judged in two ways is an error."""
    pairs, seen, number = SeenIds(), SeenIds(), 0
    for number, line in read_lines(path):
        fields = line.rstrip("\r\n").split("\t")
        if fields == [""] or (number == 1 and fields[0] == "query-id"):
            continue
        if len(fields) != 3 or not _is_whole(fields[2]):
            raise DataError(f"{path}, line {number}: query-id, corpus-id and a whole number are needed, tab-separated")
        new = seen.add("\t".join(fields))
        if not pairs.add(f"{fields[0]}\t{fields[1]}"):
            if new:
                raise DataError(f"{path}, line {number}: {shown(fields[0])} and {shown(fields[1])} appear a second time, judged otherwise")
            continue
        yield Judgement(number, fields[0], fields[1], int(fields[2]))
    if not number:
        raise DataError(f"{path} is empty")


def _is_whole(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 10


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """query id -> document id -> judgement."""
    qrels: dict[str, dict[str, int]] = {}
    for _, query, document, score in read_judgements(path):
        qrels.setdefault(query, {})[document] = score
    if not qrels:
        raise DataError(f"{path} is empty")
    return qrels


def read_pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    """(query, relevant passage) for every positive judgement of a split, in the file's order."""
    qrels_path = find(folder / "qrels", f"{split}.tsv")
    queries, corpus = read_texts(find(folder, "queries.jsonl")), read_texts(find(folder, "corpus.jsonl"))
    return [(row["query"], row["positive"]) for row in training_rows(qrels_path, queries, corpus, Tally())]


def training_rows(qrels_path: Path, queries: TextLookup, corpus: TextLookup, tally: Tally) -> Iterator[TrainingRow]:
    """A row without negatives per positive judgement, in the file's order."""
    empty = True
    for line, query_id, document_id, score in read_judgements(qrels_path):
        empty = False
        query, document = queries.get(query_id), corpus.get(document_id)
        if query is None:
            raise DataError(f"{qrels_path}, line {line}: names the query {shown(query_id)}, which queries.jsonl does not hold")
        if document is None:
            raise DataError(f"{qrels_path}, line {line}: names the document {shown(document_id)}, which corpus.jsonl does not hold")
        if score > 0:
            yield TrainingRow(query=query, positive=document, negatives=[], answers=[])
        else:
            tally.dropped["judged not relevant"] += 1
    if empty:
        raise DataError(f"{qrels_path} is empty")


def find_qrels(folder: Path) -> dict[str, Path]:
    """split -> qrels file, train, dev and test first."""
    found: dict[str, Path] = {}
    for path in sorted((folder / "qrels").glob("*.tsv*")):
        split, _, compression = path.name.partition(".tsv")
        if compression in SUFFIXES and (first := found.setdefault(split, path)) != path:
            raise DataError(f"{folder} has both {first.name} and {path.name} in qrels; remove one")
    if not found:
        raise DataError(f"{folder} has no qrels/SPLIT.tsv (nor .gz, .xz)")
    order = {name: place for place, name in enumerate(("train", "dev", "test"))}
    return {split: found[split] for split in sorted(found, key=lambda name: (order.get(name, len(order)), name))}


def qrels_file(path: Path, split: str | None) -> Path:
    """A qrels file: `path` itself, or the one of a BEIR folder's split ("test" where None)."""
    if not path.is_dir():
        return path
    files = find_qrels(path)
    if (split or "test") not in files:
        raise DataError(f"{path} has no split {split or 'test'!r}; it has {', '.join(files)}")
    return files[split or "test"]
