"""What a result must carry with it: the commit, the versions and the machine that gave it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("contaccum", "torch", "sentence-transformers", "transformers", "accelerate", "datasets", "peft")
PIECES, PIECE_BYTES = 16, 2**16  # that are read of a large file


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Command, commit (None outside a checkout), versions, machine and seed, ready for JSON."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "commit": git_commit(),
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "cuda": torch.version.cuda if cuda else None,
        "seed": seed,
    }


def git_commit() -> str | None:
    """`CONTACCUM_COMMIT` where it is set; else the commit of the checkout this package lies in, "-dirty" where files differ from it."""
    if given := os.environ.get("CONTACCUM_COMMIT"):
        return given
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        described = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:  # no git on this machine
        return None
    return described.stdout.strip() if described.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def marks_of(files: Iterable[Path], folder: Path) -> dict[str, str]:
    """name below `folder` -> what tells a file from another one, also on another machine: its bytes, and a checksum of pieces of it.

    A small file is read whole, of a large one `PIECES`: a training set may have many gigabytes.
    """
    return {file.relative_to(folder).as_posix(): _mark(file) for file in files}


def _mark(file: Path) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    last = max(0, size - PIECE_BYTES)
    with open(file, "rb") as opened:
        for piece in range(PIECES):
            opened.seek(last * piece // (PIECES - 1))
            digest.update(opened.read(PIECE_BYTES))
    return f"{size} bytes, sha256 {digest.hexdigest()[:16]}"
