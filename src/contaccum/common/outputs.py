"""Where a command may write: said before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def check_output(output: str | Path | None, taken: Iterable[str | Path | None] = (), option: str = "--output") -> None:
    """ValueError where nothing can be made at `output`, or where it is one of the files that are read or written besides."""
    if output is None:
        return
    output = Path(output)
    nearest = next(folder for folder in (output, *output.parents) if folder.exists())
    folder = nearest.parent if nearest == output and nearest.is_file() else nearest
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ValueError(f"{output} cannot be made: {folder} is no folder that can be written to; use another {option}")
    if any(file is not None and Path(file).resolve() == output.resolve() for file in taken):
        raise ValueError(f"{output} is also read or written here and would be replaced; use another {option}")


def check_file(output: str | Path | None, taken: Iterable[str | Path | None] = (), option: str = "--output") -> None:
    """The same for an output that is a file."""
    if output is not None and Path(output).is_dir():
        raise ValueError(f"{output} is a folder; give {option} a file")
    check_output(output, taken, option)
