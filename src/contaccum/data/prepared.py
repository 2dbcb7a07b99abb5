"""What `prepare` writes: the splits as Arrow files, a summary, and a folder that appears when it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
from tqdm import tqdm

from contaccum.common.errors import DataError
from contaccum.common.outputs import move_out, write_json
from contaccum.data.held_out import write_judged
from contaccum.data.readers.rows import Tally, TrainingRow
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
        self.add_sample(row["query"], row["positive"], row["negatives"][0] if row["negatives"] else None)

    def add_sample(self, query: str, positive: str, negative: str | None = None) -> None:
        """Show this pair, if it is one of the first."""
        if len(self.samples) < SAMPLES:
            first = None if negative is None else _clipped(negative)
            self.samples.append({"query": _clipped(query), "positive": _clipped(positive), "first_negative": first})


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
    tables = {split: datasets.Dataset.from_file(str(scratch / f"{split}.arrow")) for split in summary.splits}
    save_tables(tables, summary, scratch / "whole", output, judged, others)


def save_tables(
    tables: Mapping[str, datasets.Dataset],
    summary: PrepareSummary,
    whole: Path,
    output: Path,
    judged: bool = False,
    others: Iterable[str] = (),
) -> None:
    """The same of tables, by way of the scratch folder `whole`."""
    with quiet_datasets():
        datasets.DatasetDict(tables).save_to_disk(str(whole))
    if judged:
        write_judged(tables, whole / "beir", others)
    write_json(whole / SUMMARY_FILE, asdict(summary))
    move_out(whole, output)
