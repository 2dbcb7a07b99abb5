"""`mine`: a training set and a collection in, the same training set with hard negatives out."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter  # type: ignore[import-untyped]
from tqdm import tqdm

from contaccum.common.errors import DataError
from contaccum.common.outputs import check_new, move_out, scratch_for, write_json
from contaccum.common.provenance import provenance
from contaccum.data.answers import check_match
from contaccum.data.negatives import check_floats, check_numbers, denoise, existing, load_cross_encoder, mine_bm25, mine_dense
from contaccum.data.readers.beir import find_qrels, is_beir
from contaccum.data.readers.collections import encoded_texts
from contaccum.data.readers.saved import saved_splits
from contaccum.data.training_set import FEATURES, load_training_set, quiet_datasets

MINERS = ("bm25", "dense", "existing")
PASSAGES = Features({"text": Value("string")})


def mine(
    data: str | Path,
    collection: str | Path | None,
    output: str | Path,
    *,
    method: str = "bm25",
    splits: Sequence[str] = ("train",),
    per_query: int = 10,
    depth: int = 100,
    match: str = "string",
    stopwords: str | None = "en",
    model: str | Path | None = None,
    range_min: int | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    max_score: float | None = None,
    cross_encoder: str | Path | None = None,
    margin: float = 3.0,
) -> dict[str, Any]:
    """Find hard negatives: passages that look right, but are no positive and hold no answer. They replace those in the data.

    Args:
        data: training set: a prepared folder, a BEIR folder or a .jsonl
        collection: passages .tsv or .jsonl (also .gz, .xz) or a BEIR folder; left out: DATA's own passages
        output: folder to write; must not exist or be empty
        method: bm25, dense (nearest by --model) or existing (check the negatives in DATA)
        splits: splits to mine, with commas between; others stay as they are (default train)
        per_query: most negatives a row
        depth: how many of the best passages to choose from
        match: answers are string or regex (CuratedTREC)
        stopwords: language whose stop words are left out, or none (bm25)
        model: trained model, folder or name (dense)
        range_min: skip this many of the nearest passages (dense)
        absolute_margin: keep passages whose cosine is at least this far below the positive's (dense)
        relative_margin: the same, as a share of the positive's cosine, e.g. 0.05 (dense)
        max_score: keep passages whose cosine is at most this (dense)
        cross_encoder: cross-encoder that checks the negatives, folder or name
        margin: keep negatives that the cross-encoder scores at least this far below the positive

    Returns rows, rows_without_negatives, negatives, negatives_per_row, passages, seconds and peak_bytes (of this process so far).
    The folder appears when it is whole, and not before; passages and results pass through hidden files beside it. `mine.json` in it
    says how it was made.
    """
    started = time.monotonic()
    data, output = Path(data), Path(output)
    check_new(output)
    _check(data, method, splits)
    chosen = {"range_min": range_min, "absolute_margin": absolute_margin, "relative_margin": relative_margin, "max_score": max_score}
    filters = {name: value for name, value in chosen.items() if value is not None}
    check_floats(margin=margin, **filters)
    # Whatever is wrong with an option or a model is reported before the collection is read, which may take long.
    miner = _miner(method, per_query, depth, match, None if stopwords == "none" else stopwords, model, filters)
    scorer = None if cross_encoder is None else load_cross_encoder(cross_encoder)
    with scratch_for(output) as scratch:  # a rename moves what is finished
        tables = {name: load_training_set(data, name) for name in split_names(data)}
        mined = concatenate_datasets([tables[name] for name in splits])
        passages = _stored([] if method == "existing" else _texts(data, collection, mined), scratch)
        negatives = miner(mined, passages, scratch)
        if scorer is not None:
            negatives = denoise(mined, negatives, scorer, margin)
        negatives = iter(tqdm(negatives, desc="mining", total=len(mined), unit="row", dynamic_ncols=True, disable=None))
        counts: list[int] = []
        for name in splits:
            tables[name] = _written(_filled(tables[name], negatives, counts), FEATURES, scratch / f"{name}.arrow")
        assert next(negatives, None) is None
        summary = _summary(counts, len(passages), time.monotonic() - started)
        with quiet_datasets():
            DatasetDict(tables).save_to_disk(str(scratch / "whole"))
        if is_beir(data / "beir"):  # by which a model is evaluated
            shutil.copytree(data / "beir", scratch / "whole" / "beir")
        write_json(scratch / "whole" / "mine.json", summary | provenance())
        move_out(scratch / "whole", output)
    return summary


def _check(data: Path, method: str, splits: Sequence[str]) -> None:
    if method not in MINERS:
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(MINERS)}")
    names = split_names(data)
    if missing := [name for name in splits if name not in names]:
        raise DataError(f"{data} has no split {missing[0]!r}; it has {', '.join(names)}")
    if not splits or len(set(splits)) < len(splits):
        raise ValueError(f"splits={list(splits)} must name at least one split, and none twice")


def _miner(
    method: str, per_query: int, depth: int, match: str, stopwords: str | None, model: str | Path | None, filters: dict[str, Any]
) -> Callable[[Dataset, Dataset, Path], Iterator[list[str]]]:
    """(training set, passages, scratch folder) -> negatives per row, with options that were checked and a model that was loaded."""
    check_numbers(per_query, depth)
    check_match(match)
    if method == "existing":
        return lambda rows, passages, scratch: existing(rows, per_query=per_query, match=match)
    if method == "bm25":
        from contaccum.data.bm25 import tokenizer_without

        tokenizer_without(stopwords)
        return lambda rows, passages, scratch: mine_bm25(
            rows, passages, per_query=per_query, depth=depth, match=match, stopwords=stopwords, scratch=scratch
        )
    if model is None:
        raise ValueError("method='dense' needs the folder or name of a trained model; give one with --model")
    from contaccum.towers.loading import load_model

    encoder = load_model(model)
    return lambda rows, passages, scratch: mine_dense(
        rows, passages, encoder, per_query=per_query, depth=depth, match=match, scratch=scratch, **filters
    )


def split_names(data: Path) -> list[str]:
    """The splits of a training set, as `load_training_set` takes them; "train" where it has none."""
    if is_beir(data):
        return list(find_qrels(data))
    return saved_splits(data) or ["train"]


def _texts(data: Path, collection: str | Path | None, mined: Dataset) -> Iterable[str]:
    """The texts to choose negatives from."""
    if collection is not None:
        return (text for _, text in encoded_texts(collection, need_ids=False))
    return (text for _, text in encoded_texts(data, need_ids=False)) if is_beir(data) else dict.fromkeys(mined["positive"])


def _stored(texts: Iterable[str], scratch: Path) -> Dataset:
    """The passages as a table on disk."""
    counted = iter(tqdm(texts, desc="reading", unit="passage", dynamic_ncols=True, disable=None))
    batches = iter(lambda: list(islice(counted, 1000)), [])
    return _written(({"text": batch} for batch in batches), PASSAGES, scratch / "passages.arrow")


def _filled(table: Dataset, negatives: Iterator[list[str]], counts: list[int]) -> Iterator[dict[str, list[Any]]]:
    """The rows of `table` in batches with the next of `negatives`, whose numbers are added to `counts`."""
    for rows in table.iter(batch_size=1000):
        rows["negatives"] = list(islice(negatives, len(rows["query"])))
        counts.extend(len(texts) for texts in rows["negatives"])
        yield rows


def _written(batches: Iterable[dict[str, list[Any]]], features: Features, file: Path) -> Dataset:
    """A table written as a stream and memory-mapped."""
    with ArrowWriter(path=str(file), features=features) as writer:
        for batch in batches:
            writer.write_batch(batch)
        writer.finalize()
    return Dataset.from_file(str(file))


def _summary(counts: list[int], passages: int, seconds: float) -> dict[str, Any]:
    return {
        "rows": len(counts),
        "rows_without_negatives": counts.count(0),
        "negatives": sum(counts),
        "negatives_per_row": sum(counts) / max(1, len(counts)),
        "passages": passages,
        "seconds": seconds,
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int | None:
    """The most memory that this process has held; None on Windows, which does not say."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
