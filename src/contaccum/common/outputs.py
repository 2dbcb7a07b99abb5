"""What a command writes: a place where it can, checked before anything is computed, and files that appear when they are whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from contaccum.common.errors import DataError


def check_output(output: str | Path | None, taken: Iterable[str | Path | None] = (), option: str = "--output") -> None:
    """ValueError where nothing can be made at `output`, or where it is one of the files that are read or written besides."""
    if output is None:
        return
    output = Path(output)
    nearest = next(folder for folder in (output, *output.parents) if folder.exists())
    folder = nearest.parent if nearest == output and nearest.is_file() else nearest
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ValueError(f"{output} cannot be made: {folder} is not a folder that can be written to; use another {option}")
    if any(file is not None and os.path.realpath(file) == os.path.realpath(output) for file in taken):
        raise ValueError(f"{output} is also read or written here and would be replaced; use another {option}")


def check_file(output: str | Path | None, taken: Iterable[str | Path | None] = (), option: str = "--output") -> None:
    """The same for an output that is a file."""
    if output is not None and Path(output).is_dir():
        raise ValueError(f"{output} is a folder; give {option} a file")
    check_output(output, taken, option)


def check_new(output: Path) -> None:
    """DataError where there is something at `output` besides an empty folder; ValueError where nothing can be made there."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty folder; choose another --output or remove it")
    check_output(output)


@contextmanager
def whole_path(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to; it takes `path`'s place at the end. What failed leaves nothing."""
    path = Path(path)
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # several processes may write the same file
    try:
        yield part
        os.replace(part, path)
    finally:
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        remove_empty(made)


@contextmanager
def gone_if_refused(folder: Path) -> Iterator[None]:
    """Where the block refuses its input, a `folder` that was not there before is not there afterwards."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except ValueError:
        if new and folder.is_dir():
            shutil.rmtree(folder)
            remove_empty(new)
        raise


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders, the inner ones first, in which there is nothing."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def whole_file(path: str | Path) -> Iterator[TextIO]:
    """A text file that appears under its name when it is whole."""
    with whole_path(path) as part, open(part, "w", encoding="utf-8") as file:
        yield file


def write_text(path: str | Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text)


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_jsonl(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    with whole_file(path) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
