"""`encode`: a model and a collection, or queries, in; shards of vectors out.

1. The texts are read as a stream and cut into shards of `shard_size`; process r of w takes the shards r, r + w, r + 2w, ...
2. A shard that is already there, whole and made of the same texts, is left alone.
3. Any other is encoded window by window and written; it appears when it is whole.
4. Whichever process finds that all shards are there writes the finished manifest. Nobody waits for anybody.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contaccum.common.console import note
from contaccum.common.errors import DataError
from contaccum.common.lock import LOCK, alone_in
from contaccum.common.outputs import check_output, is_unused, remove_parts, write_json
from contaccum.common.provenance import provenance
from contaccum.data.readers.collections import encoded_texts
from contaccum.data.readers.queries import read_queries
from contaccum.retrieval.shards import (
    DTYPES,
    MANIFEST,
    check_id,
    forget_entry,
    read_entry,
    read_entry_unchecked,
    read_manifest,
    write_shard,
)

if TYPE_CHECKING:
    from contaccum.retrieval.batches import Encoder

IdAndText = tuple[str, str]  # id, what is encoded

WINDOW = 8192  # texts that are tokenised and sorted together
MUST_MATCH = ("model_checksum", "task", "dtype", "dim", "shard_size", "max_seq_length", "precision", "normalized", "prompt")


def encode(
    model: Any,
    texts: str | Path,
    output: str | Path,
    *,
    queries: bool = False,
    split: str | None = None,
    dtype: str = "float16",
    shard_size: int = 100_000,
    max_seq_length: int | None = None,
    tokens_per_batch: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Turn texts into vectors, stored as a folder of shards.

    `Vectors` reads them. They equal `model.encode_document` (with `queries`: `encode_query`) up to rounding. If the model compares by
    cosine they are normalised, so that search is always by inner product. On a GPU they are computed in fp16: it has three bits more than
    bf16, half precision is what is stored, and a value that overflows is noticed. Run again after an interruption, it keeps the shards that
    are there: the files are the same as without one. Under torchrun the processes share the shards.

    Args:
        model: trained model, folder or name (in Python also the object)
        texts: collection, as BEIR folder, .tsv or .jsonl (also .gz, .xz); with --queries, queries
        output: folder of shards to write or continue
        queries: the texts are queries: BEIR or prepared folder, .json, .jsonl, .csv, .tsv
        split: queries of this split (BEIR and prepared folders)
        dtype: of the stored vectors: float16 or float32
        shard_size: vectors in a file; processes share the work by files
        max_seq_length: tokens per text; left out: the model's
        tokens_per_batch: tokens that the model reads at once; left out: 4096 on a CPU, 65536 on a GPU
        precision: of the computation: fp32, bf16 or fp16; left out: fp32 on a CPU, fp16 on a GPU
        device: cpu, cuda, cuda:1, ...; left out: a GPU if there is one
    """
    from tqdm import tqdm

    from contaccum.retrieval.model import model_on_device

    started, output = time.monotonic(), Path(output)
    _check(dtype, shard_size, max_seq_length, tokens_per_batch, precision, split, queries)
    check_output(output)
    source = _Source(texts, queries, split)
    count = source.checked()
    loaded = model_on_device(model, device, max_seq_length)
    encoder = make_encoder(loaded, "query" if queries else "document", tokens_per_batch, precision)
    description = _description(loaded, encoder, model, source, dtype, shard_size)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    total, number, encoded, busy = 0, -1, 0, 0.0
    shown = progress and rank == 0
    with (
        alone_in(output, name=f"{LOCK}-{rank}"),
        _opened(output, description, world),
        tqdm(total=-(-count // world), desc="encoding", unit=" texts", disable=None if shown else True, dynamic_ncols=True) as bar,
    ):
        for number, size, shard in _shards(iter(source), shard_size, rank, world):
            if shard and not encoded:
                _check_texts(loaded, encoder, [text for _, text in shard])
            total, begun = total + size, time.monotonic()
            if shard and _encode_shard(encoder, shard, output, number, dtype, bar.update):
                encoded, busy = encoded + len(shard), busy + time.monotonic() - begun
        shards = number + 1
        complete = _finish(output, shards, total)
    return {
        "texts": total,
        "encoded": encoded,
        "shards": shards,
        "dim": description["dim"],
        "complete": complete,
        "seconds": time.monotonic() - started,
        "texts_per_second": encoded / busy if encoded else 0.0,
        "output": str(output),
    }


def make_encoder(model: Any, task: str, tokens_per_batch: int | None, precision: str | None) -> Encoder:
    """The encoder with the defaults of `encode` for the model's device and similarity."""
    from contaccum.retrieval.batches import Encoder
    from contaccum.retrieval.model import is_cosine

    on_gpu = model.device.type == "cuda"
    budget = tokens_per_batch or (65_536 if on_gpu else 4_096)
    return Encoder(model, task, budget, precision or ("fp16" if on_gpu else "fp32"), is_cosine(model))


def _shards(stream: Iterator[IdAndText], size: int, rank: int, world: int) -> Iterator[tuple[int, int, list[IdAndText]]]:
    """Step 1: (number, count, texts) of every shard; the texts of other processes' shards are counted, but not held."""
    for number in numbers():
        part = islice(stream, size)
        texts = list(part) if number % world == rank else []
        if not (found := len(texts) or sum(1 for _ in part)):
            return
        yield number, found, texts


class _Source:
    """(id, text) pairs, from the first each time."""

    def __init__(self, path: str | Path, queries: bool, split: str | None) -> None:
        self.path, self.split = path, split
        self.queries = [(query.id, query.text) for query in read_queries(path, split)] if queries else None

    def __iter__(self) -> Iterator[IdAndText]:
        return iter(self.queries) if self.queries is not None else encoded_texts(self.path)

    def checked(self) -> int:
        """How many there are, read to the end: what cannot be used is refused before hours are spent on what stands before it."""
        count = 0
        for key, _ in self:
            check_id(key)
            count += 1
        return count


def _check_texts(model: Any, encoder: Encoder, texts: list[str]) -> None:
    """By the first of them: whether the model can tell texts from each other."""
    from contaccum.towers.loading import check_words, same_vector

    check_words(model, texts)
    if same_vector(lambda some: encoder.vectors(encoder.batches(some)), texts):
        note("the model gives the first texts the same vector, all of them: results of a search, and metrics, mean nothing")


def _encode_shard(encoder: Any, shard: list[IdAndText], output: Path, number: int, dtype: str, advance: Callable[[int], object]) -> bool:
    """Steps 2 and 3 for one shard; whether it had to be encoded."""
    from contaccum.retrieval.batches import ahead

    ids, texts = [key for key, _ in shard], [text for _, text in shard]
    checksum = _texts_checksum(shard)
    if (entry := read_entry(output, number)) is not None:
        if entry.texts_sha256 != checksum:
            raise DataError(f"{output} was encoded from other texts (shard {number} differs); choose another output")
        advance(len(shard))
        return False
    forget_entry(output, number)
    windows = (texts[begin : begin + WINDOW] for begin in range(0, len(texts), WINDOW))
    parts = [stored(encoder.vectors(batches, advance), dtype) for batches in ahead(encoder.batches(window) for window in windows)]
    write_shard(output, number, np.concatenate(parts), ids, checksum)
    return True


def stored(vectors: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The vectors in the type in which they are stored, all finite."""
    with np.errstate(over="ignore"):
        cast = vectors.astype(dtype)
    if not np.isfinite(cast).all():
        remedy = "use --dtype float32" if np.isfinite(vectors).all() else "try --precision fp32, or check the model"
        raise ValueError(f"a vector is not finite as {dtype} (largest value {np.abs(vectors).max():g}); {remedy}")
    return cast


def _texts_checksum(shard: Iterable[IdAndText]) -> str:
    digest = hashlib.sha256()
    for key, text in shard:
        digest.update(f"{len(key)} {len(text)} {key}{text}".encode())
    return digest.hexdigest()


def _description(model: Any, encoder: Any, name: Any, source: _Source, dtype: str, shard_size: int) -> dict[str, Any]:
    from contaccum.retrieval.model import model_checksum

    origin = provenance()
    return {
        "complete": False,
        "model": str(name) if isinstance(name, (str, Path)) else type(name).__name__,
        "model_checksum": model_checksum(model),
        "task": encoder.task,
        "prompt": encoder.prompt,
        "source": str(source.path),
        "split": source.split,
        "dim": encoder.dim(),
        "dtype": dtype,
        "normalized": encoder.normalize,
        "precision": encoder.precision,
        "max_seq_length": model.max_seq_length,
        "shard_size": shard_size,
        "commit": origin["commit"],
        "versions": origin["versions"],
    }


@contextmanager
def _opened(output: Path, description: dict[str, Any], world: int) -> Iterator[None]:
    """The folder, begun or gone on with. Where encoding fails before a shard is whole, nothing is left in it."""
    if world == 1:
        remove_parts(output)
    new = not (output / MANIFEST).exists()
    _open_output(output, description)
    try:
        yield
    except Exception:
        if new and world == 1 and all(file.name == MANIFEST or file.name.startswith(LOCK) for file in output.iterdir()):
            (output / MANIFEST).unlink()
        raise


def _open_output(output: Path, description: dict[str, Any]) -> None:
    """Start a folder, or go on with one that the same model and settings began."""
    if (output / MANIFEST).exists():
        known = read_manifest(output)
        if wrong := [name for name in MUST_MATCH if known.get(name) != description[name]]:
            origin = f"{wrong[0]}={known.get(wrong[0])!r}, not {description[wrong[0]]!r}"
            raise DataError(f"{output} was begun with {origin}; give what it was begun with, or another output")
    elif not is_unused(output, first=MANIFEST):  # which another process may just have written
        raise DataError(f"{output} holds files but no {MANIFEST}; choose another output")
    else:
        write_json(output / MANIFEST, description)


def _finish(output: Path, shards: int, total: int) -> bool:
    """Step 4. Processes that finish together write the same."""
    entries = [read_entry_unchecked(output, number) for number in range(shards)]
    found = [entry for entry in entries if entry is not None]
    if len(found) < shards:
        return False
    if read_entry_unchecked(output, shards) is not None:
        raise DataError(f"{output} holds more shards than these texts fill ({shards}); choose another output")
    # The commit and versions are those of the run that began the folder.
    begun = read_manifest(output)
    write_json(output / MANIFEST, {**begun, "complete": True, "count": total, "shards": [asdict(entry) for entry in found]})
    for left in output.glob("shard-*.part"):  # of processes that were killed: nobody writes a shard any more
        left.unlink(missing_ok=True)
    return True


def _check(
    dtype: str,
    shard_size: int,
    max_seq_length: int | None,
    tokens_per_batch: int | None,
    precision: str | None,
    split: str | None,
    queries: bool,
) -> None:
    from contaccum.retrieval.batches import PRECISIONS

    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    for name, value in (("shard_size", shard_size), ("max_seq_length", max_seq_length), ("tokens_per_batch", tokens_per_batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    if split is not None and not queries:
        raise ValueError(f"split={split!r} chooses queries; add --queries")
