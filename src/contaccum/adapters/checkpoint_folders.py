"""Checkpoint folders of a trainer: where they are, whether they are complete, and files in them that are written whole or not at all."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerState, TrainingArguments
from transformers.trainer import safe_globals  # type: ignore[attr-defined]  # of all versions since 5.0

from contaccum.common.console import note
from contaccum.common.errors import CheckpointError
from contaccum.common.outputs import PART, write_json

FILES = "files.json"  # in a checkpoint: the names of its files, and checksums
UNSUMMED = (".pt", ".pth", ".md")  # PyTorch's hold a checksum of each tensor; a text for readers may change
MAY_LACK: dict[str, Any] = {
    **{"epoch": (int, float), "train_batch_size": int, "best_metric": (int, float), "best_global_step": int},
    "best_model_checkpoint": str,
}
CHUNK_BYTES = 2**22


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def resumed_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where a trainer of another kind has read its state from: it does not say, but mostly it is its own checkpoint."""
    folder = checkpoint_folder(args, state)
    remedy = "name the folder that is resumed: ContAccumCallback(loss, checkpoint=...)"
    if not is_complete(folder):
        raise CheckpointError(f"{folder} is no complete checkpoint; {remedy}")
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    if json.dumps(log) != json.dumps(state.log_history[: len(log)]):  # an evaluation may have come since
        raise CheckpointError(f"{folder} is of another run than the one that is resumed; {remedy}")
    return folder


def is_complete(checkpoint: Path) -> bool:
    """The trainer's state is written last."""
    state = _object(checkpoint / "trainer_state.json")
    of_this = checkpoint.name == f"checkpoint-{state.get('global_step')}" and "log_history" in state
    return of_this and all(map(_fits, state, state.values()))


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _fits(name: str, value: object) -> bool:
    """Whether a trainer's state can hold this: what it begins with, or what it may lack, says of which kind a value is."""
    if name in MAY_LACK:
        return value is None or isinstance(value, MAY_LACK[name])
    start = getattr(TrainerState(), name, None)
    return start is None or isinstance(value, (int, float) if isinstance(start, (int, float)) else type(start))


def last_complete_checkpoint(folder: Path, needed: Sequence[str] = (), remedy: str = "start again (without --resume)") -> Path:
    """The newest checkpoint in `folder` that was written to its end, holds the files `needed` and is not damaged.

    Newer ones that are passed over are named.
    """
    why = ""
    for checkpoint in reversed(complete_checkpoints(folder)):
        if (wrong := damage(checkpoint, needed)) is None:
            return checkpoint
        note(f"{checkpoint} is passed over: {wrong}")
        why = f" ({checkpoint.name}: {wrong})"
    raise CheckpointError(f"{folder} has no complete checkpoint to resume from{why}; {remedy}")


def complete_checkpoints(folder: Path) -> list[Path]:
    """By their numbers; what is in them may be damaged."""
    return [path for path in checkpoints_in(folder) if is_complete(path)]


def checkpoints_in(folder: Path) -> list[Path]:
    """By their numbers."""
    numbered = [(int(m.group(1)), p) for p in folder.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))]
    return [path for _, path in sorted(numbered)]


def list_files(checkpoint: Path) -> None:
    """Remember which files it has: of a model, neither their names nor their number are known beforehand. And the checksums of those
    that have none of their own, as safetensors."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file() and file.suffix != PART)
    checksums = {file.relative_to(checkpoint).as_posix(): None if file.suffix in UNSUMMED else _checksum(file) for file in files}
    write_json(checkpoint / FILES, checksums)


def _checksum(file: Path) -> int:
    """Some gigabytes in a second."""
    found = 0
    with open(file, "rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return found


def _listed(checkpoint: Path) -> dict[str, int | None]:
    """What `list_files` has found there; nothing of a checkpoint without such a list."""
    return _object(checkpoint / FILES)  # a damaged list is found as any damaged JSON is


def damage(checkpoint: Path, needed: Sequence[str] = ()) -> str | None:
    """What is wrong with the files of a checkpoint, as far as they or their list can tell; None where nothing is."""
    listed = _listed(checkpoint)
    if missing := [name for name in (*needed, *listed) if not (checkpoint / name).is_file()]:
        return f"it has no {missing[0]}"
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        name, check = file.relative_to(checkpoint).as_posix(), CHECKS.get(file.suffix)
        try:
            same = listed.get(name) is None or listed[name] == _checksum(file)
            whole = same and (check is None or check(file))
        except (OSError, ValueError, zipfile.BadZipFile, SafetensorError, EOFError, UnpicklingError, RuntimeError):
            whole = False
        if not whole:
            return f"{name} is damaged"
    return None


def _is_whole_archive(file: Path) -> bool:
    """It has the bytes that were written, and they are states: no other objects."""
    with zipfile.ZipFile(file) as archive:
        if archive.testzip() is not None:
            return False
    with safe_globals():  # as transformers reads them
        torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return True


def _is_whole_safetensors(file: Path) -> bool:
    with safe_open(file, framework="pt"):
        return True


def _is_json(file: Path) -> bool:
    json.loads(file.read_text(encoding="utf-8"))
    return True


CHECKS = {".pt": _is_whole_archive, ".pth": _is_whole_archive, ".safetensors": _is_whole_safetensors, ".json": _is_json}
