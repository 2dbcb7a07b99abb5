"""One process at a time in a folder: a lock that dies with its process."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system that has none


@contextmanager
def alone_in(folder: Path, place: Path | None = None, name: str = LOCK) -> Iterator[None]:
    """ValueError where another process is at work in `folder`, or on `place` where that is what the user knows.

    The folder is made, and removed again where nothing was written to it. The file `name` in it holds the lock: a POSIX lock, which
    forked processes do not share.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = _locked(folder / name, place or folder)
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)  # while it is held: who opens it from now on makes a new one
        os.close(file)
        with suppress(OSError):  # it is not empty, and neither are those above
            for path in made:
                path.rmdir()


def _locked(path: Path, place: Path) -> int:
    """A descriptor of the locked file. Another process may remove file and folder between any two steps."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue
        try:
            _lock(file, place)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file: int, place: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ValueError(f"another process is writing to {place}; wait until it ends, or use another --output") from error
        if error.errno not in NO_LOCKS:
            raise
