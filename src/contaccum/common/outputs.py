"""What a command writes: a place where it can, checked before anything is computed, and files that appear when they are whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from contaccum.common.errors import DataError
from contaccum.common.lock import LOCK, alone_in

PART = ".part"  # how the name of what is not whole yet ends


def check_output(output: str | Path | None, taken: Iterable[str | Path | None] = (), option: str = "--output") -> None:
    """ValueError where nothing can be made at `output`, or where it is one of the files that are read or written besides."""
    if output is None:
        return
    output = Path(output)
    if output.is_symlink() and not output.exists():
        raise ValueError(f"{output} is a symlink that leads nowhere; make what it points to, or use another {option}")
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


def is_unused(folder: Path, first: str = "") -> bool:
    """Whether nothing is begun there: it is missing, empty, or holds what a killed process leaves before its second whole file; `first`
    is the name of the first."""
    return not folder.exists() or (folder.is_dir() and all(_is_remnant(path) or path.name == first for path in folder.iterdir()))


def _is_remnant(path: Path) -> bool:
    return path.name.startswith(LOCK) or _is_part(path) or (path.is_dir() and not any(path.iterdir()))


def _is_part(path: Path) -> bool:
    """Whether `whole_path` named it so."""
    return re.search(rf"\.\d+\{PART}$", path.name) is not None


def move_out(whole: Path, output: Path) -> None:
    """A finished folder leaves its scratch folder for its place, where there is nothing or an empty folder. What lies beside it goes first:
    it may be large, and no later run would remove it."""
    _empty(whole.parent, but=(whole.name, LOCK))
    if output.exists():
        output.rmdir()
    os.replace(whole, output)


def remove_parts(folder: Path) -> None:
    """What killed processes left beside its name, in `folder` and below. For whoever is alone in it."""
    for part in [path for path in folder.rglob(f"*{PART}") if _is_part(path)]:
        remove(part)


def remove(path: Path) -> None:
    """A file, or a folder and all in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def scratch_for(output: Path) -> Iterator[Path]:
    """An empty folder beside `output`, for this process alone; it is removed at the end, and what a killed process left in it before."""
    folder = output.parent / f".{output.name}{PART}"
    with alone_in(folder, output):
        _empty(folder)
        try:
            yield folder
        finally:
            _empty(folder)
    with suppress(OSError):  # the next process is in it
        folder.rmdir()


def _empty(folder: Path, but: Sequence[str] = (LOCK,)) -> None:
    for path in folder.iterdir():
        if path.name not in but:
            remove(path)


@contextmanager
def whole_path(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to; it takes `path`'s place at the end. What failed leaves nothing."""
    path = Path(path)
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")  # several processes may write the same file
    try:
        yield part
        os.replace(part, path)
    finally:
        remove(part)
        remove_empty(made)


@contextmanager
def sole_path(path: str | Path) -> Iterator[Path]:
    """The same where one process alone writes it: another is refused, and what killed ones left goes."""
    with scratch_for(Path(path)) as scratch:
        part = scratch / Path(path).name
        yield part
        os.replace(part, path)


@contextmanager
def gone_if_refused(folder: Path) -> Iterator[None]:
    """Where the block refuses its input, what it began in `folder` goes. For whoever is alone in it."""
    new = is_unused(folder)
    try:
        yield
    except ValueError:
        if new and folder.is_dir():
            _empty(folder)
        raise


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders, the inner ones first, in which there is nothing."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def whole_file(path: str | Path) -> Iterator[TextIO]:
    """A text file that appears under its name when it is whole, and on the disk: it is not found empty when power has failed."""
    with whole_path(path) as part, open(part, "w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_text(path: str | Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text)


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_if_whole(path: str | Path) -> dict[str, Any] | None:
    """A JSON object; None where the file is missing, empty or cut off, as where its writer was killed."""
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_jsonl(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    with whole_file(path) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
