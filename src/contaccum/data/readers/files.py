"""Text files as they are found: plain, .gz or .xz; one JSON object a line; errors that name file and line."""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from contaccum.common.errors import DataError

SUFFIXES = ("", ".gz", ".xz")
ID_FIELDS = ("_id", "id")  # of a record
MAX_RECORD_BYTES = 256 * 2**20  # what is longer is no record but a file of another kind, and is refused before it fills the memory
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)  # of a file that cannot be read, is cut off or is damaged


def open_binary(path: Path) -> BinaryIO:
    """`path` for reading, decompressed by its ending."""
    try:
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        if path.suffix == ".xz":
            return cast(BinaryIO, lzma.open(path, "rb"))
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def find(folder: Path, name: str) -> Path:
    """`name` in `folder`, compressed or not."""
    for suffix in SUFFIXES:
        if (path := folder / (name + suffix)).exists():
            return path
    raise DataError(f"{folder} has no {name} (nor {name}.gz, {name}.xz)")


def bare_suffix(path: Path) -> str:
    """The ending that says what a file holds: ".json" of x.json, x.json.gz and x.json.xz."""
    return Path(path.stem).suffix.lower() if path.suffix in SUFFIXES[1:] else path.suffix.lower()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line with its ending), UTF-8 without a byte-order mark; memory is bounded by `MAX_RECORD_BYTES`."""
    number = 0
    with open_binary(path) as file:
        try:
            while raw := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                yield number, _decoded(raw, path, number)
        except READ_ERRORS as error:
            raise DataError(f"{path}, after line {number}: {error}") from error


def _decoded(raw: bytes, path: Path, number: int) -> str:
    if len(raw) > MAX_RECORD_BYTES:
        raise too_long(f"{path}, line {number}")
    try:
        return (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(path, number, error) from error


def too_long(place: str) -> DataError:
    return DataError(f"{place}: a record of more than {MAX_RECORD_BYTES // 2**20} MB; is this the right file and format?")


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    byte, kind = error.object[error.start], "utf-16" if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "latin1"
    return DataError(f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; convert the file, e.g. with iconv -f {kind} -t utf-8")


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) for every line that is not blank."""
    for number, line in read_lines(path):
        if line.strip():
            yield number, _object(line, path, number)


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets a thousand deep
        raise DataError(f"{path}, line {number}: not JSON that can be read ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number}: a JSON object is needed, not {type(record).__name__}")
    return record


def text_field(record: dict[str, Any], name: str, place: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise DataError(f"{place}: no text under {name!r}; fields there: {listed(record)}")
    return checked_text(value, name, place)


def first_text(record: dict[str, Any], names: tuple[str, ...], place: str) -> str:
    """The first of these fields that a record has."""
    for name in names:
        value = record.get(name)
        if isinstance(value, str) or (name in ID_FIELDS and isinstance(value, int) and not isinstance(value, bool)):
            return checked_text(str(value), name, place)
    raise DataError(f"{place}: no text under {' or '.join(map(repr, names))}; fields there: {listed(record)}")


def text_list(record: dict[str, Any], name: str, place: str) -> list[str]:
    """A list of texts; empty where there is none."""
    values = record.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise DataError(f"{place}: {name!r} must be a list of texts, not {shown(values)}")
    return [checked_text(value, name, place) for value in values]


def checked_text(value: str, name: str, place: str) -> str:
    """`value`, which can be written as UTF-8: JSON can spell half of a surrogate pair, which is no character."""
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: {name!r} holds half of a surrogate pair ({value[error.start]!r}), which is no character") from error
    return value


def passage_text(title: str | None, text: str) -> str:
    """A passage as it is encoded: its title, a blank, its text."""
    return f"{title or ''} {text}".strip()


def listed(names: Any) -> str:
    """Names for a message, on one line of bounded length."""
    joined = ", ".join(" ".join(str(name).split())[:60] for name in names)
    return (joined if len(joined) <= 400 else joined[:400] + " ...") or "none"


def shown(value: Any) -> str:
    """A value for a message, on one line of bounded length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
