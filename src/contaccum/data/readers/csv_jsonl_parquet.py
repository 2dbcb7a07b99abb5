"""Plain pairs and triplets: JSON lines, CSV, TSV, Parquet, or a data set of the `datasets` library; columns are chosen by name."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from contaccum.common.errors import DataError
from contaccum.common.inputs import readable
from contaccum.data.readers.dpr import MAX_FIELD_CHARACTERS
from contaccum.data.readers.files import bare_suffix, checked_text, listed, read_jsonl, read_lines, shown
from contaccum.data.readers.json_array import begins_with_array, read_array
from contaccum.data.readers.rows import TrainingRow
from contaccum.data.readers.saved import check_split_name, is_saved, load_saved

Record = tuple[str, Mapping[str, Any]]  # the place, for messages, and column -> value
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
USUAL_NEGATIVES = re.compile(r"negatives?|negative_\d+")
SPLIT_NAMES = {"validation": "dev", "valid": "dev"}
PARQUET_ROWS = 256  # read at once
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, datasets.exceptions.DatasetsError)


@dataclass(frozen=True)
class Columns:
    """Where a row's texts stand. Without `negatives`: `negative`, `negatives`, `negative_1` and so on, where there are such."""

    query: str = "query"
    positive: str = "positive"
    negatives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if twice := next((name for name in self.named() if self.named().count(name) > 1), None):
            options = "--query-column, --positive-column and --negative-column"
            raise ValueError(f"column {twice!r} is chosen twice, of query, positive and negatives; choose others with {options}")

    def named(self) -> tuple[str, ...]:
        return (self.query, self.positive, *self.negatives)

    def negative_columns(self, there: Mapping[str, Any]) -> list[str]:
        return list(self.negatives) or [name for name in there if USUAL_NEGATIVES.fullmatch(name)]


def training_rows(records: Iterator[Record], columns: Columns) -> Iterator[TrainingRow]:
    """A row per record. A value is a text or, of negatives and "answers", a list of texts; a missing one (null) is blank."""
    for place, record in records:
        require_columns(columns, record, place)
        yield TrainingRow(
            query=_text(record[columns.query], columns.query, place),
            positive=_text(record[columns.positive], columns.positive, place),
            negatives=[text for name in columns.negative_columns(record) for text in _texts(record[name], name, place)],
            answers=_texts(record.get("answers"), "answers", place),
        )


def require_columns(columns: Columns, there: Any, place: str) -> None:
    if missing := [name for name in columns.named() if name not in there]:
        options = "--query-column, --positive-column and --negative-column"
        raise DataError(f"{place}: no column {listed(missing)}; columns there: {listed(there)}; choose with {options}")


def _text(value: Any, name: str, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{place}: {name!r} must be a text, not {shown(value)}")
    return checked_text(value, name, place)


def _texts(value: Any, name: str, place: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for entry in values if (text := _text(entry, name, place))]


def read_records(path: Path, columns: Columns) -> Iterator[Record]:
    """The records of a file, by its ending."""
    suffix = bare_suffix(path)
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: the ending {suffix!r} is not one of {', '.join(SUFFIXES)}")
    if suffix == ".parquet":
        records = _read_parquet(path, columns)
    elif suffix in (".csv", ".tsv"):
        records = _read_csv(path, _delimiter(path) if suffix == ".csv" else "\t")
    elif suffix == ".json" and begins_with_array(path):
        records = read_array(path)
    else:
        records = ((f"{path}, line {line}", record) for line, record in read_jsonl(path))
    empty = True
    for record in records:
        empty = False
        yield record
    if empty:
        raise DataError(f"{path} is empty")


def _delimiter(path: Path) -> str:
    """What the first line has most of: some programs write semicolons or tabs."""
    first = next((line for _, line in read_lines(path)), "")
    return max(",;\t", key=first.count)


def _read_csv(path: Path, delimiter: str) -> Iterator[Record]:
    """Quoted as csv does; the first line names the columns."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD_CHARACTERS))
    reader = csv.reader((line for _, line in read_lines(path)), delimiter=delimiter, strict=True)
    header: list[str] = []
    begins = 1
    try:
        for fields in reader:
            place, begins = f"{path}, line {begins}", reader.line_num + 1
            if not header:
                header = _header(fields, place)
            elif fields and len(fields) != len(header):
                raise DataError(f"{place}: {len(fields)} fields, but {len(header)} columns: {listed(header)}")
            elif fields:
                yield place, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {begins}: not CSV ({error})") from error


def _header(fields: list[str], place: str) -> list[str]:
    if not fields or len(set(fields)) < len(fields):
        raise DataError(f"{place}: the first line must name the columns, each once; it reads {listed(fields)}")
    return fields


def _read_parquet(path: Path, columns: Columns) -> Iterator[Record]:
    """Only the columns needed, a few rows at a time."""
    try:
        with pq.ParquetFile(path) as file:
            there = dict.fromkeys(file.schema_arrow.names)
            require_columns(columns, there, str(path))
            wanted = [*dict.fromkeys([*columns.named(), *columns.negative_columns(there)]), *(["answers"] if "answers" in there else [])]
            row = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=wanted):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", record
    except DataError:
        raise
    except ARROW_ERRORS as error:
        raise DataError(f"{path}: not Parquet that can be read ({one_line(error)})") from error


def open_data_set(name: str, subset: str | None) -> dict[str, Any]:
    """split -> rows, of a data set on the hub, of a folder of data files or of a folder that `save_to_disk` wrote; streamed."""
    if is_saved(Path(name)):
        splits = load_saved(Path(name))
    else:
        remedy = "give a file, a folder of data files, or the name of a data set on the hub"
        with readable(f"{name} is neither a file that exists nor a data set that can be loaded", remedy):
            splits = dict(datasets.load_dataset(name, subset, streaming=True))
    for split in splits:
        check_split_name(str(split), name)
    return {SPLIT_NAMES.get(str(split), str(split)): rows for split, rows in splits.items()}


def read_data_set(name: str, split: str, rows: Any) -> Iterator[Record]:
    """The records of one split that `open_data_set` gave."""
    with readable(f"{name}, {split}: cannot be read", "check its files"):
        for number, record in enumerate(rows, start=1):
            yield f"{name}, {split}, row {number}", record


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
