"""Any readable data as what a comparison needs: rows to train on, dev and test queries, and one collection to search.

1. `prepare` reads the source; columns are guessed where it is a table.
2. Dev and test rows are held out where the source has none; the training rows are shuffled, so that the first of them are a sample.
3. A BEIR folder is written: the collection is every passage of every split, and the source's own collection where it has one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from contaccum.common.errors import DataError
from contaccum.common.outputs import read_if_whole, scratch_for, write_json
from contaccum.data.guess import guess_columns
from contaccum.data.held_out import hold_out
from contaccum.data.prepare import prepare
from contaccum.data.prepared import PrepareSummary, SplitSummary, save_splits, write_split
from contaccum.data.readers.beir import is_beir, qrels_file, read_qrels
from contaccum.data.readers.collections import count_lines, encoded_texts
from contaccum.data.sources import check_may_exist, detect
from contaccum.data.training_set import FEATURES, load_training_set

MOST = {"test": 1000, "dev": 200}  # rows held out at most ...
SHARE = {"test": 10, "dev": 20}  # ... and one in so many
FEW = 50  # test queries: fewer tell little


@dataclass(frozen=True)
class Columns:
    """As asked for; None is guessed."""

    query: str | None = None
    positive: str | None = None
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """What `contaccum compare` made of a source."""

    folder: str  # a training set with the splits train, dev and test; its folder beir holds collection, dev and test queries
    rows: int  # to train on
    queries: int  # to test by
    passages: int  # to search
    lines: list[str] = field(default_factory=list)  # what was done, for the user
    files: dict[str, list[int]] = field(default_factory=dict)  # of the source -> bytes and time of the last change

    @property
    def beir(self) -> Path:
        return Path(self.folder) / "beir"


def prepared(source: str | Path, folder: Path, columns: Columns, subset: str | None = None) -> Prepared:
    """The source under `folder`, whole or not at all; what is there already is used again."""
    known, files = folder / "prepared.json", _files(Path(source), folder.parent)
    if (stored := read_if_whole(known)) is not None:
        before = Prepared(**stored)
        if changed := [file for file in sorted({*before.files, *files}) if before.files.get(file) != files.get(file)]:
            raise ValueError(f"{changed[0]} has changed since {folder.parent} was begun; use another --output")
        return before
    if folder.exists():  # of a process that was killed before it wrote the above
        shutil.rmtree(folder)
    lines: list[str] = []
    check_may_exist(str(source))
    kind = detect(str(source), {})
    options: dict[str, Any] = {"subset": subset}
    if kind == "pairs":
        guess = guess_columns(str(source), subset, columns.query, columns.positive, columns.negatives)
        options |= {"query_column": guess.columns.query, "positive_column": guess.columns.positive}
        options["negative_column"] = guess.columns.negatives
        lines.append(guess.line)
    with scratch_for(folder) as scratch:
        found = prepare(source, scratch / "rows", kind, **options)
        lines += _counts(found)
        summary = _with_held_out(found, scratch, folder, lines)
        save_splits(summary, scratch, folder, judged=True, others=_own_collection(Path(source), kind))
    result = replace(_counted(summary, folder, lines), files=files)
    write_json(known, asdict(result))
    return result


def _files(source: Path, output: Path) -> dict[str, list[int]]:
    """The file, or those in the folder; without what is written below `output`, which may lie in it."""
    inside = [path for path in sorted(source.rglob("*")) if path.is_file()] if source.is_dir() else []
    files = [source] if source.is_file() else [path for path in inside if not path.resolve().is_relative_to(output.resolve())]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _counts(found: PrepareSummary) -> list[str]:
    dropped = ((split, count, reason) for split, part in found.splits.items() for reason, count in part.dropped.items())
    return [f"{split}: left out {count:,} row{'s' if count > 1 else ''} {reason}" for split, count, reason in dropped]


def _with_held_out(found: PrepareSummary, scratch: Path, folder: Path, lines: list[str]) -> PrepareSummary:
    """Arrow files of train, dev and test in `scratch`; those that the source lacks are taken from its training rows."""
    if "train" not in found.splits:
        raise DataError(f"there is no split 'train', but {', '.join(found.splits)}; nothing can be trained on")
    table = load_training_set(found.output, "train")
    wanted = {split: max(1, min(MOST[split], len(table) // SHARE[split])) for split in ("test", "dev") if split not in found.splits}
    parts: dict[str, Callable[[Any], Iterator[Any]]] = {**hold_out(table, wanted, keep_order=False)}
    parts |= {split: partial(_rows, load_training_set(found.output, split)) for split in ("dev", "test") if split in found.splits}
    splits: dict[str, SplitSummary] = {
        split: write_split(parts[split], split, scratch / f"{split}.arrow", None) for split in ("train", "dev", "test")
    }
    if wanted:
        counts = " and ".join(f"{splits[split].rows:,} for {'testing' if split == 'test' else 'the learning curve'}" for split in wanted)
        lines.append(f"held out of {len(table):,} rows: {counts}; rows that share a text stay together")
    return PrepareSummary(str(folder), found.format, splits)


def _rows(table: Any, tally: Any) -> Iterator[Any]:
    yield from (dict(zip(FEATURES, values, strict=True)) for batch in table.iter(1000) for values in zip(*batch.values(), strict=True))


def _own_collection(source: Path, kind: str) -> Iterator[str]:
    """The passages that a source has besides those of its rows."""
    files = [source] if is_beir(source) else sorted(source.glob("*.tsv*")) if kind == "dpr" and source.is_dir() else []
    yield from chain.from_iterable((text for _, text in encoded_texts(file)) for file in files)


def _counted(summary: PrepareSummary, folder: Path, lines: list[str]) -> Prepared:
    beir = folder / "beir"
    passages, queries = count_lines(beir), len(read_qrels(qrels_file(beir, "test")))
    if queries < FEW:
        lines.append(f"note: {queries:,} test queries are few: only large differences will show")
    lines.append(f"{summary.splits['train'].rows:,} rows to train on, {queries:,} test queries, {passages:,} passages to search")
    return Prepared(str(folder), summary.splits["train"].rows, queries, passages, lines)


def smaller_collection(prepared: Prepared, folder: Path, passages: int) -> Path:
    """A BEIR folder with the same queries whose collection holds all that is relevant and the first `passages` of the rest."""
    from contaccum.common.outputs import write_jsonl
    from contaccum.data.readers.collections import read_collection_of

    if (folder / "corpus.jsonl").exists():  # which is written last
        return folder
    shutil.copytree(prepared.beir / "qrels", folder / "qrels", dirs_exist_ok=True)
    shutil.copy(prepared.beir / "queries.jsonl", folder / "queries.jsonl")
    judged = (read_qrels(qrels_file(prepared.beir, split)) for split in ("dev", "test"))
    relevant = {doc for qrels in judged for grades in qrels.values() for doc in grades}

    def chosen() -> Iterator[dict[str, str]]:
        left = passages
        for key, title, text in read_collection_of(prepared.beir):
            if key in relevant or left > 0:
                left -= key not in relevant
                yield {"_id": key, "title": title, "text": text}

    write_jsonl(folder / "corpus.jsonl", chosen())
    return folder
