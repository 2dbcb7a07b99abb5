"""Folders that `Dataset.save_to_disk` wrote, as `contaccum prepare` leaves them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets

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


def load_saved(folder: Path) -> dict[str, Any]:
    """split -> table; of a folder that holds one table, "train"."""
    names = saved_splits(folder)
    with readable(f"{folder} cannot be read as a saved data set", REMEDY):
        loaded = datasets.load_from_disk(str(folder))
        tables = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        for table in tables.values():
            table[:1]  # a damaged table shows itself at the first look
    if names is not None and (missing := set(names) - tables.keys()):
        raise DataError(f"{folder} has no split {listed(sorted(missing))}; {REMEDY}")
    return tables
