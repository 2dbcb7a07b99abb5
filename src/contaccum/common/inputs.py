"""Small files that hold fields and values, and libraries that read a user's files: whatever goes wrong is one `DataError`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from contaccum.common.errors import DataError

LARGEST_BYTES = 256 * 2**20
LONGEST_REASON = 300  # characters
# What libraries say, part of it, and what it means. Their own advice is to load the objects all the same, which may run code.
MEANING = {
    "Weights only load failed": "it holds objects that are no weights, and might run code",
    "trust_remote_code=True": "it needs code of its own, which is not run here; in Python, load it yourself and pass what was loaded",
    "`ignore_mismatched_sizes`": "weights have other shapes than its config.json says",
}


def read_object(path: str | Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file."""
    with readable(f"{path} cannot be read as JSON", remedy):
        return _fields(json.loads(_text(path)), f"{path} must hold a JSON object", remedy)


def read_yaml(path: str | Path, remedy: str) -> dict[str, Any]:
    """The fields in a YAML file; none of an empty one."""
    with readable(f"{path} cannot be read as YAML", remedy):
        values = yaml.safe_load(_text(path))
        return _fields({} if values is None else values, f"{path} must hold fields and values, as 'lr: 2.0e-5'", remedy)


def _text(path: str | Path) -> str:
    """The file's text. What has no end, as a device, must not fill the memory."""
    with open(path, "rb") as file:
        raw = file.read(LARGEST_BYTES + 1)
    if len(raw) > LARGEST_BYTES:
        raise ValueError(f"more than {LARGEST_BYTES // 2**20} MB; is it the right file?")
    return raw.decode("utf-8")


def _fields(value: Any, needed: str, remedy: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise DataError(f"{needed}; {remedy}")
    return value


@contextmanager
def readable(what: str, remedy: str) -> Iterator[None]:
    """Any error in the block as a DataError `what (reason); remedy`: a library that meets a damaged file raises whatever it happens to
    raise. Only what the machine lacks stays as it is: memory, a package, a keyboard's interrupt."""
    try:
        yield
    except (DataError, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:
        if "out of memory" in str(error).lower() or "can't allocate memory" in str(error):
            raise
        raise DataError(f"{what} ({reason_of(error)}); {remedy}") from error


def reason_of(error: BaseException) -> str:
    """An error's message on one line of bounded length; its kind where it says nothing."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return error.strerror
    text = " ".join(str(error).split())
    text = f"no {text}" if isinstance(error, KeyError) else text
    text = next((meaning for words, meaning in MEANING.items() if words in text), text)
    return (text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ...") or type(error).__name__
