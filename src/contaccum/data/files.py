"""Text files as they are found: plain, .gz or .xz; one JSON object a line; errors that name file and line."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from contaccum.errors import DataError

SUFFIXES = ("", ".gz", ".xz")


def open_text(path: Path) -> TextIO:
    """`path` for reading as UTF-8, decompressed by its ending."""
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".xz":
            return lzma.open(path, "rt", encoding="utf-8")
        return open(path, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def find(folder: Path, name: str) -> Path:
    """`name` in `folder`, compressed or not."""
    for suffix in SUFFIXES:
        if (path := folder / (name + suffix)).exists():
            return path
    raise DataError(f"{folder} has no {name} (nor {name}.gz, {name}.xz)")


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every line that is not blank."""
    with open_text(path) as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise DataError(f"{path}, line {number}: a JSON object is needed, not {type(record).__name__}")
                    yield number, record
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
        except (EOFError, OSError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise DataError(f"{path}, after line {number}: {error}") from error


def text_field(record: dict[str, Any], name: str, path: Path, line: int) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        found = ", ".join(record) or "none"
        raise DataError(f"{path}, line {line}: no text under {name!r}; fields there: {found}")
    return value
