"""Vectors on disk: numbered shards of half- or single-precision `.npy`, their ids, and a manifest with a checksum of each.

    shard-00000.npy      vectors (count, dim)
    shard-00000.ids.npy  ids as UTF-8 bytes (count,)
    shard-00000.json     count and checksums; written last, so that a shard that has it is whole
    manifest.json        what the vectors are (model, settings, commit), and all of the above once every shard is there

Every file is written beside its name and renamed when whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contaccum.common.errors import DataError
from contaccum.common.inputs import read_object, readable, reason_of
from contaccum.common.outputs import whole_path, write_json

DTYPES = ("float16", "float32")
MANIFEST = "manifest.json"
CHUNK_BYTES = 2**22
AGAIN = "encode again into another folder"

Array = NDArray[Any]


@dataclass(frozen=True)
class ShardEntry:
    """One shard: how many vectors, and the SHA-256 of its two files and of the texts that were encoded."""

    number: int
    count: int
    vectors_sha256: str
    ids_sha256: str
    texts_sha256: str

    @property
    def vectors_name(self) -> str:
        return f"shard-{self.number:05d}.npy"

    @property
    def ids_name(self) -> str:
        return f"shard-{self.number:05d}.ids.npy"


def write_array(path: Path, array: Array) -> str:
    """Write an array whole, on the disk when this returns, and return its file's SHA-256."""
    with whole_path(path) as part:
        with open(part, "wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(np.ascontiguousarray(array).data)  # np.save would not say that the disk is full
            file.flush()
            os.fsync(file.fileno())
        return sha256_of(part)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_shard(folder: Path, number: int, vectors: Array, ids: Sequence[str], texts_sha256: str) -> ShardEntry:
    """Write one shard, its entry last."""
    name = ShardEntry(number, len(ids), "", "", texts_sha256)
    vectors_sha256 = write_array(folder / name.vectors_name, vectors)
    ids_sha256 = write_array(folder / name.ids_name, id_array(ids))
    entry = ShardEntry(number, len(ids), vectors_sha256, ids_sha256, texts_sha256)
    write_json(_entry_file(folder, number), asdict(entry))
    return entry


def id_array(ids: Sequence[str]) -> Array:
    """Ids as fixed-width UTF-8 bytes, which can be memory-mapped; their order is that of the texts' code points."""
    for key in ids:
        check_id(key)
    return np.array([key.encode() for key in ids])


def check_id(key: str) -> None:
    if not key or "\0" in key:
        raise DataError(f"the id {key!r} is empty or holds a NUL character and cannot be stored; rename it")


def read_entry(folder: Path, number: int) -> ShardEntry | None:
    """The entry of a shard whose files are whole and unchanged; None where there is none or they are not."""
    if not (file := _entry_file(folder, number)).exists():
        return None
    try:
        entry = ShardEntry(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):  # cut off or not ours: made again
        return None
    expected = {entry.vectors_name: entry.vectors_sha256, entry.ids_name: entry.ids_sha256}
    whole = all((folder / name).exists() and sha256_of(folder / name) == checksum for name, checksum in expected.items())
    return entry if whole else None


def forget_entry(folder: Path, number: int) -> None:
    """Say that a shard is not whole, before it is written again."""
    _entry_file(folder, number).unlink(missing_ok=True)


def _entry_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.json"


def read_entry_unchecked(folder: Path, number: int) -> ShardEntry | None:
    """The entry of a shard as its writer left it: for another process's shard, which that process checks."""
    file = _entry_file(folder, number)
    return ShardEntry(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.exists():
        raise DataError(f"{folder} has no {MANIFEST}: it holds no encoded vectors; run contaccum encode")
    return read_object(file, AGAIN)


def _entry(stored: dict[str, Any]) -> ShardEntry:
    entry = ShardEntry(**stored)
    _count(entry.count)
    if not all(isinstance(checksum, str) for checksum in (entry.vectors_sha256, entry.ids_sha256, entry.texts_sha256)):
        raise ValueError(f"shard {entry.number} has no checksums")
    return entry


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**40:
        raise ValueError(f"{value!r} where a count is needed")
    return value


class Vectors:
    """A folder of shards, for reading. Row i of the collection is row i of the shards in their order.

    Files that differ from the manifest's checksums raise `DataError`: ids when the folder is opened, vectors as they stream past.
    """

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.folder, self.verify = Path(folder), verify
        self.manifest = read_manifest(self.folder)
        if not self.manifest.get("complete"):
            raise DataError(f"{self.folder} is not whole yet; run its contaccum encode again, which goes on where it stopped")
        with readable(f"{self.folder / MANIFEST} is damaged", AGAIN):
            self.shards = [_entry(stored) for stored in self.manifest["shards"]]
            if (dtype := self.manifest["dtype"]) not in DTYPES:
                raise ValueError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")
            self.dim, self.dtype = _count(self.manifest["dim"]), np.dtype(dtype)
            if [shard.number for shard in self.shards] != list(range(len(self.shards))) or not self.shards:
                raise ValueError("its shards are not numbered from 0")
        self.starts = np.cumsum([0, *(shard.count for shard in self.shards)])  # of each shard's first row; the last is the count
        self._ids = [self._open_ids(shard) for shard in self.shards]
        self._id_width = max(ids.dtype.itemsize for ids in self._ids)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def checksum(self) -> str:
        """One value for all vectors and ids, in their order."""
        return hashlib.sha256("".join(s.vectors_sha256 + s.ids_sha256 for s in self.shards).encode()).hexdigest()

    def ids_at(self, rows: NDArray[np.int64]) -> Array:
        """Ids of these rows, as bytes."""
        found = np.empty(rows.shape, dtype=f"S{self._id_width}")
        owners = np.searchsorted(self.starts, rows, side="right") - 1
        for shard in np.unique(owners):
            mine = owners == shard
            found[mine] = self._ids[shard][rows[mine] - self.starts[shard]]
        return found

    def arrays(self) -> Iterator[Array]:
        """Each shard's vectors, memory-mapped."""
        for shard in self.shards:
            yield np.load(self.folder / shard.vectors_name, mmap_mode="r")

    def blocks(self, rows: int) -> Iterator[tuple[int, Array]]:
        """(first row, up to `rows` vectors), read in order; holds one block, whatever the size of a shard."""
        for shard, start in zip(self.shards, self.starts, strict=False):
            for offset, block in self._shard_blocks(shard, rows):
                yield int(start) + offset, block

    def _shard_blocks(self, shard: ShardEntry, rows: int) -> Iterator[tuple[int, Array]]:
        path, digest = self.folder / shard.vectors_name, hashlib.sha256()
        offset = self._first_byte(path, (shard.count, self.dim))
        with open(path, "rb") as file:
            digest.update(file.read(offset))
            for start in range(0, shard.count, rows):  # read, not mapped: what was used is not held
                count = min(rows, shard.count - start)
                block = np.fromfile(file, self.dtype, count * self.dim).reshape(count, self.dim)
                if self.verify:
                    digest.update(block.data)
                yield start, block
        if self.verify and digest.hexdigest() != shard.vectors_sha256:
            raise self._changed(path)

    def _first_byte(self, path: Path, shape: tuple[int, int]) -> int:
        """Of the vectors, behind the header, in a file of this shape."""
        mapped = self._mapped(path)
        if (mapped.shape, mapped.dtype) != (shape, self.dtype) or np.isfortran(mapped):
            raise self._changed(path)
        return int(mapped.offset)

    def _mapped(self, path: Path) -> np.memmap[Any, Any]:
        try:
            mapped = np.load(path, mmap_mode="r")
        except OSError as error:
            raise self._unreadable(path, error) from error
        except Exception as error:  # cut off, or its header damaged
            raise self._changed(path) from error
        if not isinstance(mapped, np.memmap):
            raise self._changed(path)
        return mapped

    def _open_ids(self, shard: ShardEntry) -> Array:
        path = self.folder / shard.ids_name
        ids = self._mapped(path)
        if (self.verify and sha256_of(path) != shard.ids_sha256) or ids.shape != (shard.count,) or ids.dtype.kind != "S":
            raise self._changed(path)
        return ids

    def _unreadable(self, path: Path, error: OSError) -> DataError:
        return DataError(f"{path} cannot be read ({reason_of(error)}); run its contaccum encode again")

    def _changed(self, path: Path) -> DataError:
        return DataError(
            f"{path} is not the file that {self.folder / MANIFEST} describes: it is truncated, swapped or damaged; encode it again"
        )
