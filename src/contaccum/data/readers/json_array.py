"""One JSON array of objects, read object by object: memory is that of the largest one, however long the file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from contaccum.common.errors import DataError
from contaccum.data.readers import files
from contaccum.data.readers.files import READ_ERRORS, not_utf8, open_binary, too_long

CHUNK_BYTES = 2**20
CUT_CHARACTERS = 16  # a literal or an escape cut off by the end of the buffer is reported no farther from that end than this
BLANKS = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()


def read_array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line on which it begins, object) for every object of the array that the file is."""
    with open_binary(path) as file:
        text = _Text(path, file)
        first = text.peek()
        if not first:
            raise DataError(f"{path} is empty")
        if first != "[":
            raise text.error(f"a JSON array of records is needed, but this begins with {first!r}; is it DPR's format?")
        text.advance(1)
        yield from _objects(text)
        if rest := text.peek():
            raise text.error(f"{rest!r} after the end of the array")


def _objects(text: _Text) -> Iterator[tuple[int, dict[str, Any]]]:
    separator = text.peek()
    if separator == "]":
        text.advance(1)
        return
    while separator != "]":
        if (begins := text.peek()) != "{":
            raise text.error(f"a JSON object is needed, not {begins!r}" if begins else "the file ends within the array")
        yield text.line, text.decode()
        separator = text.peek()
        if separator not in (",", "]"):
            raise text.error(f"',' or ']' is needed, not {separator!r}" if separator else "the file ends within the array")
        text.advance(1)


class _Text:
    """The file's text from `position` on, which stands on `line`; read only as far as needed."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.position, self.line, self.ended = "", 0, 1, False

    def peek(self) -> str:
        """The next character that is not blank, now at `position`; "" at the end of the file."""
        while True:
            blanks = BLANKS.match(self.text, self.position)
            assert blanks is not None
            self.advance(blanks.end() - self.position)
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._more():
                return ""

    def advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count

    def decode(self) -> dict[str, Any]:
        """The object at `position`, which moves behind it."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                if not (self._cut_off(error) and self._more()):
                    raise self._not_json(error) from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets a thousand deep
                raise self.error(f"not JSON that can be read ({error})") from error
            else:
                self.advance(end - self.position)
                assert isinstance(value, dict)
                return value

    def error(self, message: str) -> DataError:
        return DataError(f"{self.path}, line {self.line}: {message}")

    def _not_json(self, error: json.JSONDecodeError) -> DataError:
        line = self.line + self.text.count("\n", self.position, error.pos)
        cut = "; the file seems to be cut off" if self.ended and error.pos >= len(self.text) - 1 else ""
        return DataError(f"{self.path}, line {line}: not JSON ({error.msg}){cut}")

    def _cut_off(self, error: json.JSONDecodeError) -> bool:
        """Whether more text could mend this error."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - CUT_CHARACTERS

    def _more(self) -> bool:
        """Read on, twice as far each time, so that a long object is parsed a few times only; False at the end of the file."""
        if self.ended:
            return False
        rest = self.text[self.position :]
        if len(rest) > files.MAX_RECORD_BYTES:
            raise too_long(self.path, self.line)
        size = min(max(CHUNK_BYTES, len(rest)), files.MAX_RECORD_BYTES - len(rest) + CHUNK_BYTES)
        self.text, self.position = rest + self._read(size, rest), 0
        return True

    def _read(self, size: int, rest: str) -> str:
        try:
            raw = self.file.read(size)
        except READ_ERRORS as error:
            raise DataError(f"{self.path}, after line {self.line + rest.count(chr(10))}: {error}") from error
        self.ended = not raw
        try:
            return self.decoder.decode(raw, final=self.ended)
        except UnicodeDecodeError as error:
            raise not_utf8(self.path, self.line + rest.count("\n") + error.object[: error.start].count(b"\n"), error) from error
