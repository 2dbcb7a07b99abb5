"""The folder of a run through crashes: begun once, by one process, resumed as it was begun, finished last of all.

1. `run.json`, then `config.yaml`: a folder without the latter is not begun, and a plain start takes it.
2. Checkpoints, which the trainer writes. A resumed run goes on from the newest one that is whole.
3. `model/`, then `summary.json`: a folder with the latter is finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback

from contaccum.adapters.checkpoint_folders import checkpoints_in, complete_checkpoints, last_complete_checkpoint, list_files
from contaccum.common.console import note
from contaccum.common.errors import not_saved
from contaccum.common.lock import alone_in
from contaccum.common.outputs import check_output, is_unused, read_if_whole, remove_parts, whole_path, write_json, write_text
from contaccum.common.provenance import marks_of, provenance
from contaccum.data.training_set import files_of
from contaccum.methods.config import AUTO, TrainConfig, load_config

STATES = ("optimizer.pt", "scheduler.pt", "contaccum_state.pt")  # of a checkpoint: without one of these a resumed run trains differently


def refuse_used_folder(run: Path) -> None:
    if not is_unused(run, first="run.json"):
        raise ValueError(f"{run} is not empty; use --resume to go on with a run there, or another --output")
    check_output(run)


@contextmanager
def alone_in_run(run: Path) -> Iterator[None]:
    """No other process writes to it meanwhile. What a killed one left half written is removed."""
    with alone_in(run):
        remove_parts(run)
        try:
            yield
        finally:
            with suppress(OSError):  # which the trainer makes, also where a run is refused, or saves none
                (run / "checkpoints").rmdir()


def begin(run: Path, config: TrainConfig, processes: int, auto: list[str]) -> None:
    """Only when nothing of the input can be refused any more is anything written. `auto`: fields that the run chose by itself."""
    refuse_used_folder(run)
    write_json(run / "run.json", provenance(config.seed) | {"processes": processes, "auto": auto, "data": _data_marks(config)})
    write_text(run / "config.yaml", yaml.safe_dump(asdict(config), sort_keys=False))


def finished(run: Path) -> dict[str, Any] | None:
    """The summary of a run that came to its end."""
    return read_if_whole(run / "summary.json")


def finish(run: Path, model: Any, summary: dict[str, Any], keep_checkpoints: bool) -> None:
    """The model first, whole or not at all; then the summary, which says that the run is finished. Then nothing needs a checkpoint."""
    try:
        with whole_path(run / "model") as part:
            model.save_pretrained(str(part))
            if (run / "model").exists():  # of a process that was killed before its summary: the same
                shutil.rmtree(run / "model")
        write_json(run / "summary.json", summary)
    except Exception as error:
        raise not_saved(run / "model", error, "go on with --resume") from error
    remove_checkpoints(run, keep_checkpoints)


def remove_checkpoints(run: Path, keep: bool) -> None:
    """Of a finished run, nothing needs them; also where its process was killed before it had removed them."""
    if not keep:
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


def as_resolved_before(run: Path, config: TrainConfig) -> TrainConfig:
    """What each "auto" was when the run began."""
    if not (run / "config.yaml").exists():
        return config
    stored = load_config(run / "config.yaml", {})
    if config.n_local == AUTO:
        config = replace(config, n_local=stored.n_local, gradient_checkpointing=stored.gradient_checkpointing)
    if config.bank == "auto":
        config = replace(config, bank=stored.bank)
    if config.drift_correction == "auto":
        config = replace(config, drift_correction=stored.drift_correction)
    if config.unpad is None:
        config = replace(config, unpad=stored.unpad)
    return config


def checkpoint_to_resume(run: Path, config: TrainConfig, processes: int) -> Path | None:
    """The newest whole checkpoint of the same run; None where it was killed before its first."""
    stored = run / "config.yaml"
    if not stored.exists():
        raise ValueError(f"{run} holds no run to resume; start it without --resume")
    before = asdict(load_config(stored, {}))
    changed = {k: v for k, v in asdict(config).items() if before[k] != v and k != "output"}
    if changed:
        name, value = next(iter(changed.items()))
        raise ValueError(f"{run} was started with {name}={before[name]!r}, not {value!r}; resume it unchanged or use another --output")
    if finished(run) is not None:
        remove_checkpoints(run, config.checkpoints_at_end)
        raise ValueError(f"{run} is finished: its model is in {run / 'model'}")
    known = read_if_whole(run / "run.json") or {}
    begun = known.get("processes", processes)
    if begun != processes:
        remedy = "without torchrun" if begun == 1 else f"under torchrun --nproc-per-node {begun}"
        raise ValueError(
            f"{run} was started by {begun} process{'es' if begun > 1 else ''}, not {processes}; resume it {remedy}, or use another --output"
        )
    _check_same_data(run, known.get("data"), _data_marks(config))
    random = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    if not complete_checkpoints(folder := run / "checkpoints"):
        note(f"{run} has no complete checkpoint: it begins again at its first update")
        return None
    remedy = f"resume it by as many processes as began it, remove {folder} to train from the start, or use another --output"
    return last_complete_checkpoint(folder, (*STATES, *random), remedy)


def _data_marks(config: TrainConfig) -> dict[str, str]:
    data = Path(config.data)
    return marks_of(files_of(data, config.split), data.parent if data.is_file() else data)


def _check_same_data(run: Path, before: dict[str, str] | None, now: dict[str, str]) -> None:
    """ValueError where files have changed; older runs do not know what they were."""
    if changed := [file for file in sorted({*(before or {}), *now}) if before is not None and before.get(file) != now.get(file)]:
        raise ValueError(
            f"{changed[0]} of the training data has changed since {run} was begun; bring back what it was, or use another --output"
        )


class FileList(TrainerCallback):
    """Lists the files of each checkpoint before it counts as complete: one that loses a file is passed over."""

    def before_checkpoint(self, folder: Path) -> None:
        list_files(folder)


def remove_older(checkpoint: Path, keep: int, best: str | None) -> None:
    """What the trainer would have deleted next, had it not been killed: all but the `keep` newest up to this one, and the best."""
    known = checkpoints_in(checkpoint.parent)
    for older in known[: max(0, known.index(checkpoint) + 1 - keep)]:
        if best is None or Path(best).name != older.name:
            shutil.rmtree(older)
