"""Cross-encoder scores as sentence-transformers publishes them: a pickle of {query id: {passage id: score}}, read as a stream.

The published file holds 160 million scores, about 16 GB as Python objects. So each query's scores are handed on as soon as they are read,
and forgotten. Nothing in the file can be run: its only classes may be numpy's numbers, which are read by the functions below.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from contaccum.common.errors import DataError
from contaccum.data.readers.files import open_binary, shown

Sink = Callable[[int, dict[Any, Any]], None]
NUMBER_FORMATS = {"f2": "e", "f4": "f", "f8": "d", "i2": "h", "i4": "i", "i8": "q"}  # numpy's name -> struct's


def read_scores(path: Path, sink: Sink) -> None:
    """Call `sink(query id, {passage id: score})` for every query of the file."""
    with open_binary(path) as file:
        try:
            rest = _Scores(cast(BinaryIO, io.BufferedReader(file, 2**20)), sink).load()
        except DataError:
            raise
        except Exception as error:  # a damaged pickle can fail in any way, a hostile one is refused by `find_class`
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{path}: no pickle of scores ({reason[:200]}); fetch the file again") from error
    if not isinstance(rest, dict) or rest:
        raise DataError(f"{path}: {{query id: {{passage id: score}}}} is needed, not {shown(rest)}")


class _Scores(pickle._Unpickler):
    """An unpickler that hands on every dict that is a value of a dict, instead of keeping it."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: BinaryIO, sink: Sink) -> None:
        super().__init__(file)
        self.sink = sink

    def find_class(self, module: str, name: str) -> Any:
        if name == "dtype" and module == "numpy":
            return _NumberType
        if name == "scalar" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _NumberType.read
        if name == "encode" and module == "_codecs":
            return _latin1  # how protocol 2 spells bytes
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, but only numbers and dicts are allowed")

    def load_setitems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._set(items[::2], items[1::2])

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self._set([key], [value])

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        if values and isinstance(values[0], dict):
            for key, value in zip(keys, values, strict=True):
                self.sink(msmarco_id(key), value)
        else:
            self.stack[-1].update(zip(keys, values, strict=True))  # type: ignore[attr-defined]

    # A pickle can refer back to any dict, so an unpickler remembers all of them: here they are forgotten, or they would fill the memory.
    def load_memoize(self) -> None:
        self.memo[len(self.memo)] = self._remembered()  # type: ignore[attr-defined]

    def load_binput(self) -> None:
        self.memo[self.read(1)[0]] = self._remembered()  # type: ignore[attr-defined]

    def load_long_binput(self) -> None:
        self.memo[struct.unpack("<I", self.read(4))[0]] = self._remembered()  # type: ignore[attr-defined]

    def _remembered(self) -> Any:
        top = self.stack[-1]  # type: ignore[attr-defined]
        return None if isinstance(top, dict) else top

    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.MEMOIZE[0]] = load_memoize
    dispatch[pickle.BINPUT[0]] = load_binput
    dispatch[pickle.LONG_BINPUT[0]] = load_long_binput


class _NumberType:
    """What numpy.dtype is to a pickled number: its size and kind, then its byte order."""

    def __init__(self, name: str, *options: Any) -> None:
        if name not in NUMBER_FORMATS:
            raise pickle.UnpicklingError(f"{shown(name)} is no type of number")
        self.format = "<" + NUMBER_FORMATS[name]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.format = (">" if state[1] == ">" else "<") + self.format[1:]

    @staticmethod
    def read(kind: Any, data: bytes) -> float:
        """What numpy.core.multiarray.scalar(kind, data) equals."""
        if not isinstance(kind, _NumberType):
            raise pickle.UnpicklingError("a number without a type")
        return float(struct.unpack(kind.format, data)[0])


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin-1")


def msmarco_id(key: Any) -> int:
    """An identifier of MS MARCO, which is a whole number, from the number or its digits."""
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 2**63:
        return key
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19:
        return int(key)
    raise ValueError(f"{shown(key)} is no identifier of MS MARCO: a whole number is needed")
