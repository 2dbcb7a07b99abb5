"""Checkpoint folders of a trainer: where they are, whether they are complete, and files in them that are written whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from contaccum.common.errors import CheckpointError


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def resumed_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where a trainer of another kind has read its state from: it does not say, but mostly it is its own checkpoint."""
    folder = checkpoint_folder(args, state)
    remedy = "name the folder that is resumed: ContAccumCallback(loss, checkpoint=...)"
    if not is_complete(folder):
        raise CheckpointError(f"{folder} is no complete checkpoint; {remedy}")
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    if json.dumps(log) != json.dumps(state.log_history):
        raise CheckpointError(f"{folder} is of another run than the one that is resumed; {remedy}")
    return folder


def is_complete(checkpoint: Path) -> bool:
    """The trainer's state is written last."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


def last_complete_checkpoint(folder: Path) -> Path:
    """The newest checkpoint in `folder` that was written to its end."""
    numbered = [(int(m.group(1)), p) for p in folder.glob("checkpoint-*") if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))]
    complete = [p for _, p in sorted(numbered) if is_complete(p)]
    if not complete:
        raise CheckpointError(f"{folder} has no complete checkpoint to resume from; start again (without --resume)")
    return complete[-1]
