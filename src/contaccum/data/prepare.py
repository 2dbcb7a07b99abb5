"""Any source into one training set: a folder that `load_training_set` reads, Arrow on disk, splits kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm

from contaccum.common.errors import DataError
from contaccum.common.outputs import check_new, move_out, scratch_for, write_json
from contaccum.data.download import download as fetch_files
from contaccum.data.download import files_of
from contaccum.data.held_out import check_hold_out, write_judged
from contaccum.data.held_out import hold_out as hold_back
from contaccum.data.readers.csv_jsonl_parquet import Columns
from contaccum.data.readers.rows import Tally, TrainingRow
from contaccum.data.sources import FORMATS, ReadOptions, detect, open_splits
from contaccum.data.training_set import FEATURES, quiet_datasets

SUMMARY_FILE = "prepare.json"
SAMPLES = 2
FLUSH_CHARACTERS = 2**26  # written to disk at the latest when so much text waits


@dataclass
class SplitSummary:
    """Counts of one split; `negatives_*` are per row."""

    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    negatives_min: int = 0
    negatives_mean: float = 0.0
    negatives_max: int = 0
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, str | None]] = field(default_factory=list)

    def add(self, row: TrainingRow) -> None:
        count = len(row["negatives"])
        self.negatives_min = min(self.negatives_min, count) if self.rows else count
        self.negatives_max = max(self.negatives_max, count)
        self.negatives_mean += (count - self.negatives_mean) / (self.rows + 1)
        self.rows += 1
        if len(self.samples) < SAMPLES:
            negative = _clipped(row["negatives"][0]) if row["negatives"] else None
            self.samples.append({"query": _clipped(row["query"]), "positive": _clipped(row["positive"]), "first_negative": negative})


@dataclass
class PrepareSummary:
    output: str
    format: str
    splits: dict[str, SplitSummary]

    def table(self) -> str:
        """Counts and samples as plain text."""
        lines = [f"{'split':<8}{'rows':>12}{'dropped':>12}   negatives per row (min, mean, max)"]
        for name, split in self.splits.items():
            negatives = f"{split.negatives_min:,}, {split.negatives_mean:,.1f}, {split.negatives_max:,}"
            lines.append(f"{name:<8}{split.rows:>12,}{sum(split.dropped.values()):>12,}   {negatives}")
        for name, split in self.splits.items():
            lines += [f"{name}: dropped {count:,} {reason}" for reason, count in split.dropped.items()]
            lines += [f"{name}: {note}" for note in split.notes]
        first = next(iter(self.splits.values()))
        for sample in first.samples:
            lines += ["", f"query     {sample['query']}", f"positive  {sample['positive']}"]
            lines += [f"negative  {sample['first_negative']}"] if sample["first_negative"] else []
        judged = Path(self.output) / "beir"
        lines += ["", f"{self.format} -> {self.output}"]
        return "\n".join([*lines, f"to evaluate a model: contaccum evaluate MODEL {judged}"] if judged.is_dir() else lines)


def _clipped(text: str, width: int = 120) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 4] + " ..."


def prepare(
    source: str | Path | None,
    output: str | Path,
    format: str = "auto",
    *,
    train: str | Path | None = None,
    dev: str | Path | None = None,
    test: str | Path | None = None,
    query_column: str = "query",
    positive_column: str = "positive",
    negative_column: tuple[str, ...] = (),
    subset: str | None = None,
    max_negatives: int | None = None,
    require_negatives: bool | None = None,
    system: tuple[str, ...] = ("bm25",),
    margin: float = 3.0,
    hold_out: float | None = None,
    download: str | None = None,
    passages: bool = False,
) -> PrepareSummary:
    """Turn any data set into the form that `mine` and `train` read. Splits are kept.

    Args:
        source: file, folder or name of a data set on the hub
        output: folder to write; must not exist or be empty
        format: auto, dpr, beir, msmarco or pairs
        train, dev, test: file of this split (dpr, pairs)
        query_column: column of the query (pairs)
        positive_column: column of the relevant passage (pairs)
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

    The output is written whole or not at all. Memory stays bounded: of the texts, only a collection's queries and the rows of one batch
    are held.
    """
    output = Path(output)
    check_new(output)
    if download is not None:
        source = source or f"downloads/{download}"
        fetch_files(files_of(download, passages), Path(source))
    name = None if source is None else str(source)
    paths = {split: Path(path) for split, path in (("train", train), ("dev", dev), ("test", test)) if path is not None}
    _check(name, paths, format, max_negatives, margin)
    kind = detect(name, paths) if format == "auto" else format
    columns = Columns(query_column, positive_column, tuple(negative_column))
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


def write_split(rows: Any, split: str, path: Path, max_negatives: int | None) -> SplitSummary:
    """Write a split's rows to an Arrow file, batch by batch."""
    tally, summary, waiting = Tally(), SplitSummary(), 0
    with datasets.arrow_writer.ArrowWriter(features=FEATURES, path=str(path)) as writer:
        for row in tqdm(_usable(rows(tally), tally, max_negatives), desc=f"preparing {split}", unit=" rows", disable=None):
            writer.write(row)
            summary.add(row)
            waiting += len(row["positive"]) + sum(map(len, row["negatives"]))
            if waiting > FLUSH_CHARACTERS:
                writer.write_examples_on_file()
                waiting = 0
        writer.finalize()
    summary.dropped, summary.notes = dict(tally.dropped), tally.notes
    if not summary.rows:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in summary.dropped.items()) or "it has none"
        raise DataError(f"the split {split!r} has no usable record ({reasons})")
    return summary


def _usable(rows: Iterator[TrainingRow], tally: Tally, max_negatives: int | None) -> Iterator[TrainingRow]:
    """Rows with a query and a positive, and with at most `max_negatives` negatives, none blank."""
    for row in rows:
        if not row["query"].strip():
            tally.dropped["with a blank query"] += 1
        elif not row["positive"].strip():
            tally.dropped["with a blank positive"] += 1
        else:
            row["negatives"] = [text for text in row["negatives"] if text.strip()][:max_negatives]
            yield row


def save_splits(summary: PrepareSummary, scratch: Path, output: Path, judged: bool, others: Iterable[str] = ()) -> None:
    """The Arrow files of a scratch folder as one, which takes its final name when it is whole. `judged`: with a BEIR folder of all
    passages, and of `others`."""
    whole = scratch / "whole"
    tables = {split: datasets.Dataset.from_file(str(scratch / f"{split}.arrow")) for split in summary.splits}
    with quiet_datasets():
        datasets.DatasetDict(tables).save_to_disk(str(whole))
    if judged:
        write_judged(tables, whole / "beir", others)
    write_json(whole / SUMMARY_FILE, asdict(summary))
    move_out(whole, output)
