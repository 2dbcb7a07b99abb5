"""Plain text as documents: a .txt file has one on each line, a folder of .txt files one in each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from contaccum.data.readers.collections import read_collection_of
from contaccum.data.readers.files import bare_suffix, read_lines


def read_documents(path: Path) -> Iterator[tuple[str, str, str]]:
    """(id, title, text) of a collection or of plain text, as a stream. Plain text has no titles."""
    if path.is_file() and bare_suffix(path) == ".txt":
        return ((str(line), "", text) for line, text in read_lines(path))
    if files := _text_files(path):
        return ((file.name, "", "".join(text for _, text in read_lines(file))) for file in files)
    return read_collection_of(path, need_ids=False)


def _text_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if bare_suffix(file) == ".txt") if folder.is_dir() else []
