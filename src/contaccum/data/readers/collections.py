"""Collections of passages from any of the formats: one stream of (id, title, text)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from contaccum.common.errors import DataError
from contaccum.data.readers.beir import is_beir, read_collection, read_entries
from contaccum.data.readers.dpr import read_passages
from contaccum.data.readers.files import READ_ERRORS, bare_suffix, find, open_binary, passage_text


def read_collection_of(path: str | Path, need_ids: bool = True) -> Iterator[tuple[str, str, str]]:
    """(id, title, text) of a BEIR folder's corpus, DPR's passages .tsv or a .jsonl (`_id` or `id`, `text`, perhaps `title`), streamed.

    Without `need_ids`, a .jsonl may have none; its line numbers then take their place.
    """
    path = Path(path)
    if is_beir(path):
        return read_collection(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give a BEIR folder, a passages .tsv or a .jsonl")
    readers: dict[str, Callable[[Path], Iterator[tuple[str, str, str]]]] = {
        ".tsv": read_passages,
        ".jsonl": partial(read_entries, need_ids=need_ids),
    }
    if path.is_dir() or bare_suffix(path) not in readers:
        prepared = " (of a prepared set: its folder beir, which prepare --hold-out writes)" if path.is_dir() else ""
        raise DataError(f"{path} is not a collection; give a BEIR folder{prepared}, a passages .tsv or a .jsonl (also .gz, .xz)")
    return readers[bare_suffix(path)](path)


def encoded_texts(path: str | Path, need_ids: bool = True) -> Iterator[tuple[str, str]]:
    """(id, text) of every passage of a collection, its title before its text."""
    return ((key, passage_text(title, text)) for key, title, text in read_collection_of(path, need_ids))


def count_lines(path: str | Path) -> int:
    """Lines of a collection's file: about its number of passages, for a progress bar."""
    path = find(Path(path), "corpus.jsonl") if is_beir(Path(path)) else Path(path)
    with open_binary(path) as file:
        try:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
        except READ_ERRORS as error:
            raise DataError(f"{path} cannot be read: {error}") from error
