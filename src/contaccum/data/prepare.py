"""Any source into one training set: a folder that `load_training_set` reads, Arrow on disk, splits kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import datasets

from contaccum.common.console import note
from contaccum.common.errors import DataError
from contaccum.common.outputs import check_new, scratch_for
from contaccum.data.documents import prepare_documents
from contaccum.data.download import download as fetch_files
from contaccum.data.download import files_of
from contaccum.data.guess import guess_columns
from contaccum.data.held_out import check_hold_out
from contaccum.data.held_out import hold_out as hold_back
from contaccum.data.prepared import PrepareSummary, SplitSummary, save_splits, write_split
from contaccum.data.readers.csv_jsonl_parquet import Columns
from contaccum.data.sources import FORMATS, ReadOptions, check_may_exist, detect, open_splits


def prepare(
    source: str | Path | None,
    output: str | Path,
    format: str = "auto",
    *,
    train: str | Path | None = None,
    dev: str | Path | None = None,
    test: str | Path | None = None,
    query_column: str | None = None,
    positive_column: str | None = None,
    negative_column: tuple[str, ...] = (),
    subset: str | None = None,
    max_negatives: int | None = None,
    require_negatives: bool | None = None,
    system: tuple[str, ...] = ("bm25",),
    margin: float = 3.0,
    hold_out: float | None = None,
    download: str | None = None,
    passages: bool = False,
    unsupervised: str | None = None,
) -> PrepareSummary:
    """Turn any data set into the form that `mine` and `train` read. Splits are kept.

    Args:
        source: file, folder or name of a data set on the hub
        output: folder to write; must not exist or be empty
        format: auto, dpr, beir, msmarco or pairs
        train, dev, test: file of this split (dpr, pairs)
        query_column: column of the query (pairs; left out: by its usual names)
        positive_column: column of the relevant passage (pairs; likewise)
        negative_column: column of hard negatives, repeatable (pairs; default: negative, negatives, negative_1, ...)
        subset: configuration of the data set on the hub (pairs)
        max_negatives: keep at most this many negatives a row (default: all; msmarco: 5)
        require_negatives: drop records without a negative (dpr; left out: yes, unless the whole file has none)
        system: search system whose hard negatives are taken, repeatable (msmarco; default: bm25)
        margin: keep negatives that score at least this far below the positive (msmarco)
        hold_out: share of the training rows to keep for a dev split and for a test split each, as 0.1; OUTPUT/beir is the folder to
            evaluate with
        download: first fetch nq, trivia, webq, trec or msmarco into SOURCE (default: downloads/NAME)
        passages: with --download: also fetch DPR's 21 million Wikipedia passages
        unsupervised: SOURCE is a collection, a .txt file (a document on each line) or a folder of .txt files; draw pairs from its texts:
            crops, inverse-cloze, neighbours, title-body or dropout

    The output is written whole or not at all. Memory stays bounded: of the texts, only a collection's queries and the rows of one batch
    are held.
    """
    output = Path(output)
    if unsupervised is not None:
        if train or dev or test or download or hold_out is not None or format != "auto":
            raise ValueError("unsupervised needs one collection as SOURCE; leave out format, train, dev, test, hold_out and download")
        return prepare_documents(source, output, unsupervised)
    check_new(output)
    if source is not None and not str(source).strip():
        raise DataError("the source has no name; give a file, a folder or the name of a data set on the hub")
    if download is not None:
        source = source or f"downloads/{download}"
        fetch_files(files_of(download, passages), Path(source))
    name = None if source is None else str(source)
    paths = {split: Path(path) for split, path in (("train", train), ("dev", dev), ("test", test)) if path is not None}
    _check(name, paths, format, max_negatives, margin)
    kind = detect(name, paths) if format == "auto" else format
    columns = Columns(query_column or "query", positive_column or "positive", tuple(negative_column))
    if kind == "pairs" and None in (query_column, positive_column):
        source = str(next(iter(paths.values()), name))
        check_may_exist(source)
        guess = guess_columns(source, subset, query_column, positive_column, negative_column)
        if not guess.by_place and guess.columns != columns:
            columns = guess.columns
            note(guess.line)
    options = ReadOptions(columns, subset, require_negatives, tuple(system), margin, max_negatives)
    with scratch_for(output) as scratch:
        with open_splits(name, paths, kind, options, scratch) as splits:
            check_hold_out(hold_out, splits)
            written = {split: write_split(rows, split, scratch / f"{split}.arrow", max_negatives) for split, rows in splits.items()}
        if hold_out is not None:
            rows = written["train"].rows
            wanted = {split: math.ceil(hold_out * rows) for split in ("dev", "test") if split not in written}
            written |= _with_held_out(written["train"], scratch, wanted)
        summary = PrepareSummary(str(output), kind, written)
        save_splits(summary, scratch, output, judged=hold_out is not None)
    return summary


def _with_held_out(whole: SplitSummary, scratch: Path, wanted: Mapping[str, int]) -> dict[str, SplitSummary]:
    """The training rows written so far as several splits."""
    table = datasets.Dataset.from_file(str((scratch / "train.arrow").replace(scratch / "all.arrow")))
    parts = {split: write_split(rows, split, scratch / f"{split}.arrow", None) for split, rows in hold_back(table, wanted).items()}
    parts["train"].dropped, parts["train"].notes = whole.dropped, whole.notes
    return parts


def _check(source: str | None, paths: Mapping[str, Path], format: str, max_negatives: int | None, margin: float) -> None:
    if format not in FORMATS:
        raise ValueError(f"format {format!r}: use one of {', '.join(FORMATS)}")
    if source is None and not paths:
        raise ValueError("no source: give a file, a folder, the name of a data set, or --train FILE")
    for path in paths.values():
        if not path.exists():
            raise DataError(f"{path} does not exist")
    if max_negatives is not None and max_negatives < 0:
        raise ValueError(f"max_negatives {max_negatives}: use 0 or more")
    if not margin >= 0:
        raise ValueError(f"margin {margin}: use 0 or more; a negative is kept if it scores at least this far below the positive")
