"""Which columns of a table hold queries, positives and negatives: by their names, else by their places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from contaccum.common.errors import DataError
from contaccum.data.readers.csv_jsonl_parquet import (
    ARROW_ERRORS,
    USUAL_NEGATIVES,
    Columns,
    one_line,
    open_data_set,
    read_data_set,
    read_records,
)
from contaccum.data.readers.files import bare_suffix, listed, shown

# Lower-cased, underscores and hyphens as blanks; the first that is there is taken.
QUERY_NAMES = (
    *("query", "question", "anchor", "queries", "search query", "query text", "question text", "q", "title", "prompt", "instruction"),
    *("input", "sentence1", "sentence 1", "sentence a", "text1", "source", "claim", "docstring", "premise"),
)
POSITIVE_NAMES = (
    *("positive", "pos", "answer", "passage", "document", "positive passage", "positive document", "doc", "context", "response", "output"),
    *("text", "body", "abstract", "content", "description", "answers", "sentence2", "sentence 2", "sentence b", "text2", "target"),
    *("evidence", "code", "paragraph", "summary", "hypothesis"),
)
NEGATIVE_NAMES = re.compile(r"(hard )?neg(ative)?s?( passage| document| text)?s?( ?\d+)?")
LABELS = ("label", "labels", "score", "is duplicate", "relevance", "similarity")
PEEKED = 50  # records
LONGEST_NAME = 80  # characters: a longer name of a column is a text


@dataclass(frozen=True)
class Guess:
    columns: Columns
    line: str  # what was chosen, and why, for the user
    by_place: bool  # not by names that tell


def guess_columns(
    source: str, subset: str | None = None, query: str | None = None, positive: str | None = None, negatives: Sequence[str] = ()
) -> Guess:
    """The columns of a file of pairs or a data set; those that are given stay. DataError that lists the columns where none fit."""
    records = _peek(source, subset)
    names = list(dict.fromkeys(name for record in records for name in record))
    if long := next((name for name in names if len(str(name)) > LONGEST_NAME), None):
        raise DataError(f"{source}: the first line must name the columns, but it reads {shown(long)}; add a line such as query,positive")
    texts = [name for name in names if _holds_text(record.get(name) for record in records)]
    if missing := [name for name in (query, positive, *negatives) if name is not None and name not in names]:
        raise DataError(f"{source}: no column {listed(missing)}; columns there: {listed(names)}")
    how = "as given" if query and positive else "by name"
    query = query or next((name for name in names if name == QUERY_NAMES[0]), None)  # whatever they hold: reading them tells
    positive = positive or next((name for name in names if name == POSITIVE_NAMES[0]), None)
    chosen_negatives = tuple(negatives) or tuple(name for name in names if _is_negative(name) and name not in (query, positive))
    free = [name for name in texts if name not in chosen_negatives and name not in (query, positive)]
    named = [*free, *(name for name in names if all(record.get(name) in (None, "") for record in records))]  # blank ones are told later
    by_name_query = query or _named(named, QUERY_NAMES)
    by_name_positive = positive or _named([name for name in named if name != by_name_query], POSITIVE_NAMES)
    found = (by_name_query, by_name_positive)
    if None in found:
        rest = [name for name in free if name not in found]
        if len(rest) < found.count(None):
            raise DataError(f"{source}: {_lacking(texts, names)}; two columns of texts are needed, a query and its positive")
        rest = sentences if len(sentences := _sentences(rest, records)) >= found.count(None) else rest
        found, how = (found[0] or rest.pop(0), found[1] or rest.pop(0)), "by place, as no usual name is there"
    columns = Columns(str(found[0]), str(found[1]), chosen_negatives)
    return Guess(columns, _described(columns, how, names), None in (by_name_query, by_name_positive))


def _described(columns: Columns, how: str, names: Sequence[str]) -> str:
    parts = [f"query = {columns.query!r}", f"positive = {columns.positive!r}"]
    parts += [f"negatives = {', '.join(map(repr, columns.negatives))}"] if columns.negatives else []
    unused = [name for name in names if name not in columns.named()]
    others = f"; not used: {listed(unused)}" if unused else ""
    line = f"columns: {', '.join(parts)} ({how}{others}); others with --query-column, --positive-column, --negative-column"
    if labels := [name for name in unused if _plain(name) in LABELS]:
        line += f"\nnote: {labels[0]!r} is not read: every row counts as a relevant pair; leave out those that are not"
    return line


def _lacking(texts: Sequence[str], names: Sequence[str]) -> str:
    only = f"only {listed(texts)} of" if texts else "none of"
    return f"{only} its columns ({listed(names)}) {'hold' if len(texts) > 1 else 'holds'} texts"


def _peek(source: str, subset: str | None) -> list[Mapping[str, Any]]:
    """The first records, whatever their columns."""
    path = Path(source)
    if path.is_file() and bare_suffix(path) == ".parquet":
        return _first_of_parquet(path)
    if path.is_file():
        return [record for _, record in islice(read_records(path, Columns()), PEEKED)]
    opened = open_data_set(source, subset)
    split = "train" if "train" in opened else next(iter(opened))
    return [record for _, record in islice(read_data_set(source, split, opened[split]), PEEKED)]


def _first_of_parquet(path: Path) -> list[Mapping[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            records: list[Mapping[str, Any]] = next(file.iter_batches(PEEKED)).to_pylist()
            return records
    except StopIteration:
        raise DataError(f"{path} is empty") from None
    except ARROW_ERRORS as error:
        raise DataError(f"{path}: not Parquet that can be read ({one_line(error)})") from error


def _holds_text(values: Iterable[Any]) -> bool:
    """Texts with letters, not numbers as texts, ids or addresses alone."""
    found = [value for value in values if value is not None and value != ""]
    return bool(found) and all(isinstance(value, str) for value in found) and any(any(map(str.isalpha, value)) for value in found)


def _sentences(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of which most texts have several words: the others are names, ids or kinds, if there is a choice."""
    wordy = {name: [" " in str(value).strip() for record in records if (value := record.get(name))] for name in names}
    return [name for name in names if sum(wordy[name]) > len(wordy[name]) / 2]


def _plain(name: str) -> str:
    return " ".join(re.split(r"[\s_\-.]+", str(name).strip().lower()))


def _is_negative(name: str) -> bool:
    return bool(USUAL_NEGATIVES.fullmatch(name) or NEGATIVE_NAMES.fullmatch(_plain(name)))


def _named(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    plain = {_plain(name): name for name in reversed(names)}
    return next((plain[name] for name in wanted if name in plain), None)
