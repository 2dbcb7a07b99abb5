"""One JSON array of objects, read object by object (ijson): memory is that of the largest one, however long the file."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ijson

from contaccum.common.errors import DataError
from contaccum.data.readers import files
from contaccum.data.readers.files import READ_ERRORS, open_binary, shown

DEEPEST = 10_000  # levels: ijson's memory grows with their square. No more than a few are needed


def read_array(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, object) for every object of the array that the file is."""
    with open_binary(path) as file:
        source, number = _Source(path, file), 0
        try:
            for number, record in enumerate(ijson.items(source, "item", use_float=True), start=1):
                source.unread = source.depth = 0
                if not isinstance(record, dict):
                    raise DataError(f"{path}, record {number}: a JSON object is needed, not {shown(record)}")
                yield f"{path}, record {number}", record
        except DataError:
            raise
        except READ_ERRORS as error:
            raise DataError(f"{path}, after record {number}: {error}") from error
        except (ijson.JSONError, ValueError) as error:  # ValueError: a number of thousands of digits
            if source.empty:
                raise DataError(f"{path} is empty") from error
            cut = "; the file seems to be cut off" if isinstance(error, ijson.IncompleteJSONError) else ""
            reason = str(error).split("\n")[0].strip()
            raise DataError(f"{path}, after record {number}: not JSON that can be read ({reason}){cut}") from error


def begins_with_array(path: Path) -> bool:
    return first_bytes(path, 4096).startswith(b"[")


def first_bytes(path: Path, count: int) -> bytes:
    """Without a byte-order mark and blanks."""
    with open_binary(path) as file:
        try:
            return file.read(count).removeprefix(BOM_UTF8).lstrip()
        except READ_ERRORS as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _deepest(raw: bytes, depth: int) -> int:
    """The deepest nesting in `raw`, from `depth` on; brackets in texts count as well."""
    most = depth
    for bracket in raw:
        depth += (bracket in b"[{") - (bracket in b"]}")
        most = max(most, depth)
    return most


class _Source:
    """The file as ijson reads it: it begins with an array, after a byte-order mark perhaps, and no record is without end or bottom."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.empty, self.unread, self.depth = True, 0, 0  # bytes since the last record, and how deeply they are nested

    def read(self, size: int) -> bytes:
        raw = self.file.read(size)
        if self.empty and raw:
            raw = raw.removeprefix(BOM_UTF8)
            if (first := raw.lstrip()[:1]) not in (b"[", b""):
                begins = first.decode("ascii", "replace")
                raise DataError(f"{self.path}: a JSON array of records is needed, but this begins with {begins!r}; is it DPR's format?")
            self.empty = not first
        self.unread += len(raw)
        if self.unread > files.MAX_RECORD_BYTES:
            raise files.too_long(str(self.path))
        opened, closed = raw.count(b"[") + raw.count(b"{"), raw.count(b"]") + raw.count(b"}")
        if self.depth + opened > DEEPEST and _deepest(raw, self.depth) > DEEPEST:
            raise DataError(f"{self.path} holds lists in lists, more than {DEEPEST:,} deep; is it the right file?")
        self.depth = max(0, self.depth + opened - closed)
        return b"" if self.empty and size else raw
