"""DPR's files: the retriever JSON (`biencoder-*.json`) and the passages (`psgs_w100.tsv`), each plain, .gz or .xz, read as a stream."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.common.errors import DataError
from contaccum.data.readers.files import listed, passage_text, read_lines, shown, text_field, text_list
from contaccum.data.readers.ids import SeenIds
from contaccum.data.readers.json_array import read_array
from contaccum.data.readers.rows import Tally, TrainingRow

MAX_FIELD_CHARACTERS = 2**24  # of a passage; Python's default of 131,072 refuses some


class Passage(NamedTuple):
    id: str  # "" where the file has none
    title: str
    text: str

    def __str__(self) -> str:
        return passage_text(self.title, self.text)


class DprRecord(NamedTuple):
    question: str  # normalised
    answers: list[str]
    positives: list[Passage]
    negatives: list[Passage]
    hard_negatives: list[Passage]

    def training_negatives(self) -> list[Passage]:
        """The hard negatives, or the plain ones of a record that has no hard ones, as DPR trains."""
        return self.hard_negatives or self.negatives


def normalize_question(question: str) -> str:
    """DPR's normalisation: the typographic apostrophe becomes the plain one."""
    return question.replace("’", "'")


def read_dpr(path: Path) -> Iterator[DprRecord]:
    """Every record of a retriever file."""
    empty = True
    for place, record in read_array(path):
        empty = False
        yield DprRecord(
            question=normalize_question(text_field(record, "question", place)),
            answers=text_list(record, "answers", place),
            positives=_passages(record, "positive_ctxs", place, required=True),
            negatives=_passages(record, "negative_ctxs", place),
            hard_negatives=_passages(record, "hard_negative_ctxs", place),
        )
    if empty:
        raise DataError(f"{path} holds no records")


def training_rows(path: Path, tally: Tally, require_negatives: bool | None = None) -> Iterator[TrainingRow]:
    """A row per record: its first positive, as DPR trains, and its `training_negatives`.

    Records without a positive are dropped and counted; so are those without any negative. `require_negatives=False` keeps the latter;
    None, the default, keeps them where no record of the file has a negative, that is, where they are still to be mined.
    """
    if require_negatives is None and not (require_negatives := any(record.training_negatives() for record in read_dpr(path))):
        tally.notes.append(f"{path.name} holds no negatives at all: its records are kept without; `contaccum mine` finds some")
    for record in read_dpr(path):
        negatives = record.training_negatives()
        if not record.positives:
            tally.dropped["without a positive"] += 1
        elif require_negatives and not negatives:
            tally.dropped["without a negative"] += 1
        else:
            yield TrainingRow(
                query=record.question,
                positive=str(record.positives[0]),
                negatives=[str(passage) for passage in negatives],
                answers=record.answers,
            )


def find_retriever_files(folder: Path) -> dict[str, Path]:
    """split -> `biencoder-*` file, for the splits train, dev and test that a folder has."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("biencoder-*")):
        match = re.fullmatch(r"biencoder-(?:.*[-_.])?(train|dev|test)(?:[-_.].*)?\.json(?:\.gz|\.xz)?", path.name)
        if match and (first := found.setdefault(match[1], path)) != path:
            raise DataError(f"{folder} has both {first.name} and {path.name}; choose with --{match[1]} FILE")
    return {split: found[split] for split in ("train", "dev", "test") if split in found}


def _passages(record: dict[str, Any], name: str, place: str, required: bool = False) -> list[Passage]:
    if required and name not in record:
        raise DataError(f"{place}: no {name!r}; fields there: {listed(record)}")
    passages = record.get(name, [])
    if not isinstance(passages, list):
        raise DataError(f"{place}: {name!r} must be a list of passages, not {shown(passages)}")
    return [_passage(passage, name, place) for passage in passages]


def _passage(passage: Any, name: str, place: str) -> Passage:
    if not isinstance(passage, dict):
        raise DataError(f"{place}: a passage of {name!r} must be an object with 'title' and 'text', not {shown(passage)}")
    title = "" if passage.get("title") is None else text_field(passage, "title", place)
    key = passage.get("passage_id", passage.get("psg_id", ""))
    return Passage(str(key), title, text_field(passage, "text", place))


def read_passages(path: Path) -> Iterator[tuple[str, str, str]]:
    """(id, title, text) of a collection in DPR's layout: id, text, title, tab-separated with csv quoting, with or without a header."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD_CHARACTERS))
    reader = csv.reader((line for _, line in read_lines(path)), delimiter="\t")
    seen, begins, empty = SeenIds(), 1, True
    try:
        for fields in reader:
            if fields and not (begins == 1 and fields[0] == "id"):
                empty = False
                yield _checked(fields, seen, path, begins)
            begins = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {begins}: {error}; is a quotation mark left open?") from error
    if empty:
        raise DataError(f"{path} holds no passages")


def _checked(fields: list[str], seen: SeenIds, path: Path, line: int) -> tuple[str, str, str]:
    if len(fields) != 3:
        raise DataError(f"{path}, line {line}: id, text and title are needed, tab-separated; there are {len(fields)}")
    key, text, title = fields
    if not seen.add(key):
        raise DataError(f"{path}, line {line}: the id {shown(key)} appears a second time")
    return key, title, text
