"""Errors whose message is meant for the user: what, where and the remedy, in one line."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = ("no space left", "disk quota exceeded", "disk is full", "os error 28", "os error 122")  # of libraries that keep no number
LITTLE = 2**20  # bytes free: hardly a file fits


class DataError(ValueError):
    """A file that cannot be used; the message names it, the place in it and the remedy."""


class DivergedError(RuntimeError):
    """A training whose losses or weights are no numbers any more; the message says since when and what to do."""


class FailedRunsError(RuntimeError):
    """Some of several runs have failed; what the others gave has been shown."""


class CheckpointError(RuntimeError):
    """A checkpoint or model that could not be written or read; the message says which and what to do."""


def is_full_disk(error: BaseException, place: Path | None = None) -> bool:
    """Whether something could not be written for want of room. Where `place` is, room is looked for: PyTorch gives no reason."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    if any(getattr(one, "errno", None) in FULL or any(text in str(one).lower() for text in FULL_TEXTS) for one in causes):
        return True
    return place is not None and has_no_room(place)


def has_no_room(place: Path) -> bool:
    """Whether next to nothing more can be written there."""
    folder = next((path for path in (place, *place.parents) if path.exists()), None)
    return folder is not None and shutil.disk_usage(folder).free < LITTLE


def not_saved(place: Path, error: BaseException, remedy: str) -> CheckpointError:
    """What happened, and the remedy; it begins with making room only where that is what was missing."""
    reason = " ".join(str(error).split()) or type(error).__name__
    room = "make room and " if is_full_disk(error, place) else ""
    return CheckpointError(f"could not save {place}: {reason}; {room}{remedy}")
