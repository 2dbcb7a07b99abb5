"""The training set: one table of (query, positive, negatives), and hard negatives drawn from it again each epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow.compute  # type: ignore[import-untyped]
from datasets import Dataset, Features, Sequence, Value

from contaccum.common.errors import DataError
from contaccum.common.inputs import readable
from contaccum.data.readers.beir import is_beir, read_pairs
from contaccum.data.readers.files import bare_suffix, listed, read_jsonl, text_field, text_list
from contaccum.data.readers.saved import LISTING, REMEDY, is_saved, load_saved

# One row per (query, relevant passage). `answers` are texts, or regular expressions, that a right passage contains; often none are known.
OTHER_FORMATS = (".csv", ".tsv", ".parquet", ".json")
FEATURES = Features(
    {
        "query": Value("string"),
        "positive": Value("string"),
        "negatives": Sequence(Value("string")),
        "answers": Sequence(Value("string")),
    }
)


def load_training_set(path: str | Path, split: str = "train", limit: int | None = None) -> Dataset:
    """Columns query, positive, negatives and answers (lists, possibly empty), from a BEIR folder, a JSONL file or a folder that
    `contaccum prepare` or `Dataset.save_to_disk` wrote.

    Several splits, as train+dev, give the rows of all.

    A JSONL line holds "query" and "positive", either "negatives" (a list) or "negative" (a text), and perhaps "answers" (a list).
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give a BEIR folder, a .jsonl file or a folder written by Dataset.save_to_disk")
    if is_beir(path):
        pairs = [pair for name in split.split("+") for pair in read_pairs(path, name)]
        dataset = as_table({"query": [q for q, _ in pairs], "positive": [p for _, p in pairs]})
    elif path.is_dir():
        dataset = _saved(path, split)
    else:
        if bare_suffix(path) in OTHER_FORMATS:
            raise DataError(f"{path} is no .jsonl file; contaccum prepare turns it into a training set")
        dataset = _from_jsonl(path)
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def files_of(path: str | Path, split: str) -> list[Path]:
    """Those whose texts `load_training_set` reads."""
    path, names = Path(path), split.split("+")
    if path.is_file():
        return [path]
    if is_beir(path):
        patterns = ["corpus.jsonl*", "queries.jsonl*", *(f"qrels/{name}.tsv*" for name in names)]
    else:
        patterns = [f"{name}/*.arrow" for name in names] if (path / LISTING).is_file() else ["*.arrow"]
    return [file for pattern in patterns for file in sorted(path.glob(pattern))]


def as_table(columns: dict[str, list[Any]]) -> Dataset:
    """A training set from its columns; lists that are missing are empty."""
    empty: list[list[str]] = [[] for _ in columns["query"]]
    return Dataset.from_dict({name: columns.get(name, empty) for name in FEATURES}, features=FEATURES)


def load_splits(folder: Path, split: str) -> Dataset:
    """The rows of a split, or of several, of a data set on disk."""
    if not is_saved(folder):
        raise DataError(f"{folder} is neither a BEIR folder (no corpus.jsonl) nor a saved data set (no dataset_dict.json)")
    names = split.split("+") if (folder / LISTING).is_file() else None
    tables = load_saved(folder, names)
    names = list(tables) if names is None else names
    if missing_splits := [name for name in names if name not in tables]:
        raise DataError(f"{folder} has no split {missing_splits[0]!r}; it has {listed(tables)}")
    with readable(f"{folder} cannot be read as a saved data set", REMEDY):
        return datasets.concatenate_datasets([tables[name] for name in names])


def _saved(folder: Path, split: str) -> Dataset:
    dataset = load_splits(folder, split)
    if {"text", "document"} <= set(dataset.column_names):
        raise DataError(f"{folder} holds texts that pairs are drawn from; contaccum train reads it, other commands need pairs")
    with readable(f"{folder} cannot be read as a saved data set", REMEDY):
        return _as_training_set(dataset, folder)


def _as_training_set(dataset: Dataset, folder: Path) -> Dataset:
    if missing := {"query", "positive"} - set(dataset.column_names):
        raise DataError(f"{folder} has no column {', '.join(sorted(missing))}; it has {', '.join(dataset.column_names)}")
    for name in set(FEATURES) - set(dataset.column_names):
        dataset = dataset.add_column(name, [[] for _ in range(len(dataset))])
    dataset = dataset.select_columns(list(FEATURES))
    dataset = dataset if dataset.features == FEATURES else dataset.cast(FEATURES)  # a cast writes a copy
    for name in FEATURES:
        column = dataset.data.column(name)
        if column.null_count or (name in ("negatives", "answers") and pyarrow.compute.list_flatten(column).null_count):
            raise DataError(f"{folder}: the column {name!r} holds a missing value (null) where a text is needed; {REMEDY}")
    return dataset


def _from_jsonl(path: Path) -> Dataset:
    columns: dict[str, list[Any]] = {name: [] for name in FEATURES}
    for line, record in read_jsonl(path):
        columns["query"].append(text_field(record, "query", f"{path}, line {line}"))
        columns["positive"].append(text_field(record, "positive", f"{path}, line {line}"))
        if "negative" in record:
            record.setdefault("negatives", [record["negative"]])
        for name in ("negatives", "answers"):
            columns[name].append(text_list(record, name, f"{path}, line {line}"))
    if not columns["query"]:
        raise DataError(f"{path} is empty")
    return as_table(columns)


def with_hard_negatives(dataset: Dataset, hard_negatives: int, seed: int) -> tuple[Dataset, DrawNegatives | None]:
    """The table as the trainer reads it: query, positive and `hard_negatives` more columns, drawn again for every epoch.

    Rows with too few negatives are dropped. The second value needs to know the epoch (`epoch`); None where there is nothing to draw.
    """
    if hard_negatives == 0:
        return dataset.select_columns(["query", "positive"]), None
    enough = [i for i, count in enumerate(_negative_counts(dataset)) if count >= hard_negatives]
    if not enough:
        raise DataError(f"no row has {hard_negatives} hard negatives; mine some or use --hard-negatives 0")
    kept = dataset.select(enough)
    draw = DrawNegatives(hard_negatives, seed)
    kept = kept.add_column("row", list(range(len(kept))))
    kept.set_transform(draw)
    return kept, draw


def without_blanks(dataset: Dataset) -> Dataset:
    """The rows whose query and positive hold something; DataError where there is none."""
    texts = dataset.select_columns(["query", "positive"]).with_format("arrow")
    blank = np.array([blank for batch in texts.iter(10_000) for blank in _blank(batch)], dtype=bool)
    if blank.all():
        raise DataError(f"none of {len(dataset):,} rows has both a query and a positive that are not blank; is it the right file?")
    return dataset.select(np.flatnonzero(~blank)) if blank.any() else dataset


def _blank(batch: Any) -> Any:
    """Of each row, whether one of its texts holds nothing that can be seen."""
    columns = [pyarrow.compute.equal(pyarrow.compute.utf8_trim_whitespace(batch[name]), "") for name in ("query", "positive")]
    return pyarrow.compute.or_(*columns).to_pylist()


def has_negatives(dataset: Dataset) -> bool:
    return any(_negative_counts(dataset))


def _negative_counts(dataset: Dataset) -> list[int]:
    """Hard negatives per row, without reading their texts."""
    counts: list[int] = pyarrow.compute.list_value_length(dataset.with_format("arrow")["negatives"][:]).to_pylist()
    return counts


class DrawnByEpoch(Protocol):
    """A transform that draws other values for every epoch."""

    epoch: int


class DrawNegatives:
    """Chooses a row's hard negatives by seed, epoch and row alone, so that a resumed run draws what it would have drawn."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        drawn = [
            random.Random(f"{self.seed} {self.epoch} {row}").sample(negatives, self.count)
            for row, negatives in zip(batch["row"], batch["negatives"], strict=True)
        ]
        columns = {"query": batch["query"], "positive": batch["positive"]}
        return columns | {name: [negatives[i] for negatives in drawn] for i, name in enumerate(negative_columns(self.count))}


def negative_columns(count: int) -> list[str]:
    return ["negative"] if count == 1 else [f"negative_{i + 1}" for i in range(count)]


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Without the library's own bars: one bar at a time."""
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
