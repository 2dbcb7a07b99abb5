"""Which format a source has, and its splits as streams of rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from contaccum.common.errors import DataError
from contaccum.data.readers import beir, dpr, msmarco
from contaccum.data.readers import csv_jsonl_parquet as pairs
from contaccum.data.readers.files import bare_suffix, find, passage_text
from contaccum.data.readers.json_array import first_bytes
from contaccum.data.readers.rows import Tally, TrainingRow
from contaccum.data.readers.store import TextStore

FORMATS = ("auto", "dpr", "beir", "msmarco", "pairs")
HUB_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
FIRST_RECORD = 65_536  # bytes that show of which kind a JSON array is
Splits = dict[str, Callable[[Tally], Iterator[TrainingRow]]]


@dataclass(frozen=True)
class ReadOptions:
    """How a source is read; each field is used by the formats it names."""

    columns: pairs.Columns
    subset: str | None  # pairs: of a data set on the hub
    require_negatives: bool | None  # dpr
    systems: tuple[str, ...]  # msmarco
    margin: float  # msmarco
    max_negatives: int | None  # all formats; None keeps all, of MS MARCO `msmarco.NEGATIVES_PER_QUERY`


def detect(source: str | None, files: Mapping[str, Path]) -> str:
    """The format of a source, by what it looks like."""
    if files or (source and Path(source).is_file()):
        return _detect_file(next(iter(files.values())) if files else Path(str(source)))
    folder = Path(source or "")
    if msmarco.is_msmarco(folder):
        return "msmarco"
    if beir.is_beir(folder):
        return "beir"
    return "dpr" if folder.is_dir() and dpr.find_retriever_files(folder) else "pairs"


def _detect_file(path: Path) -> str:
    """DPR's files are one JSON array of records with lists of passages; JSON lines begin with an object."""
    if bare_suffix(path) != ".json":
        return "pairs"
    head = first_bytes(path, FIRST_RECORD)
    return "dpr" if head.startswith(b"[") and (b"_ctxs" in head or b"}" not in head) else "pairs"


@contextmanager
def open_splits(source: str | None, files: Mapping[str, Path], kind: str, options: ReadOptions, scratch: Path) -> Iterator[Splits]:
    """split -> rows, of a source of a known format; `scratch` is a folder for what does not fit in memory."""
    if kind == "dpr":
        yield _dpr_splits(source, files, options)
    elif kind == "pairs":
        yield _pairs_splits(source, files, options)
    elif files:
        raise DataError(f"--train, --dev and --test name files of the formats dpr and pairs; {kind} is read from one folder")
    else:
        with _beir_splits(Path(source or ""), kind, options, scratch) as splits:
            yield splits


def _dpr_splits(source: str | None, files: Mapping[str, Path], options: ReadOptions) -> Splits:
    if source and Path(source).is_dir():
        found = {**dpr.find_retriever_files(Path(source)), **files}
        if not found:
            raise DataError(f"{source} has no file biencoder-*-train.json (nor -dev, -test, .gz, .xz); name one with --train FILE")
    else:
        found = {**({"train": Path(source)} if source else {}), **files}
    return {split: partial(dpr.training_rows, path, require_negatives=options.require_negatives) for split, path in found.items()}


def _pairs_splits(source: str | None, files: Mapping[str, Path], options: ReadOptions) -> Splits:
    if source and not Path(source).is_file() and not files:
        check_may_exist(source)
        opened = pairs.open_data_set(source, options.subset)
        return {split: _pairs_rows(pairs.read_data_set(source, split, rows), options) for split, rows in opened.items()}
    found = {**({"train": Path(source)} if source else {}), **files}
    return {split: _pairs_rows(pairs.read_records(path, options.columns), options) for split, path in found.items()}


def check_may_exist(name: str) -> None:
    """DataError where a name is neither there nor one that the hub could know."""
    on_hub = HUB_NAME.fullmatch(name) and bare_suffix(Path(name)) not in pairs.SUFFIXES
    if not Path(name).exists() and not on_hub:
        raise DataError(f"{name} does not exist; give a file, a folder or the name of a data set on the hub")


def _pairs_rows(records: Iterator[pairs.Record], options: ReadOptions) -> Callable[[Tally], Iterator[TrainingRow]]:
    return lambda tally: pairs.training_rows(records, options.columns)


@contextmanager
def _beir_splits(folder: Path, kind: str, options: ReadOptions, scratch: Path) -> Iterator[Splits]:
    qrels = beir.find_qrels(folder)
    queries = beir.read_texts(find(folder, "queries.jsonl"))
    documents = tqdm(beir.read_collection(folder), desc="reading the collection", unit=" passages", disable=None)
    collection = ((key, passage_text(title, text)) for key, title, text in documents)
    with TextStore(scratch / "collection.sqlite", collection) as corpus:
        splits: Splits = {split: partial(beir.training_rows, path, queries, corpus) for split, path in qrels.items()}
        if kind == "msmarco":
            splits["train"] = partial(
                msmarco.training_rows,
                folder,
                queries,
                corpus,
                systems=options.systems,
                margin=options.margin,
                negatives_per_query=msmarco.NEGATIVES_PER_QUERY if options.max_negatives is None else options.max_negatives,
            )
        yield splits
