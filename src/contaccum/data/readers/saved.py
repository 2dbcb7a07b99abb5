"""Folders that `Dataset.save_to_disk` wrote, as `contaccum prepare` leaves them."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]

from contaccum.common.errors import DataError
from contaccum.common.inputs import read_object, readable
from contaccum.data.readers.files import listed, shown

LISTING = "dataset_dict.json"
SPLIT_NAME = re.compile(r"\w[\w.-]*")  # a file's name, and no path
REMEDY = "prepare the data set again"


def is_saved(folder: Path) -> bool:
    return (folder / LISTING).is_file() or (folder / "state.json").is_file()


def saved_splits(folder: Path) -> list[str] | None:
    """The names of its splits; None where it holds one table without a name."""
    listing = folder / LISTING
    if not listing.is_file():
        return None
    names = read_object(listing, REMEDY).get("splits")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise DataError(f"{listing} lists no splits but {shown(names)}; {REMEDY}")
    for name in names:
        check_split_name(name, str(listing))
    return names


def check_split_name(name: str, place: str) -> None:
    """DataError where it cannot be the name of a file in the folder that is written."""
    if not SPLIT_NAME.fullmatch(name) or not name.isascii():
        raise DataError(f"{place}: {shown(name)} cannot name a split; use letters, digits, '_', '-' and '.'")


def load_saved(folder: Path, used: Collection[str] | None = None) -> dict[str, Any]:
    """split -> table; of a folder that holds one table, "train". Those that are used (None: all) are read once, and are whole."""
    names = saved_splits(folder)
    with readable(f"{folder} cannot be read as a saved data set", REMEDY):
        loaded = datasets.load_from_disk(str(folder), keep_in_memory=False)
        tables = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        for name, table in tables.items():
            if used is None or name in used:
                _check_whole(table)
    if names is not None and (missing := set(names) - tables.keys()):
        raise DataError(f"{folder} has no split {listed(sorted(missing))}; {REMEDY}")
    return tables


def _check_whole(table: Any) -> None:
    """DataError where a file's offsets, lengths or texts cannot be: Arrow looks at none of them when it maps a file, and what reads such a
    text fails without naming it, or reads another. The texts are passed over at some gigabytes in a second."""
    for file in dict.fromkeys(entry["filename"] for entry in table.cache_files):
        with readable(f"{file} is damaged", REMEDY), pa.memory_map(file) as source, pa.ipc.open_stream(source) as stream:
            stream.read_all().validate(full=True)
    table[:1]  # columns that the files do not have
