"""Killed, refused or out of room: what is left is gone on with, and nothing is lost. Every point: benchmarks/crash_points.py."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import typer
import yaml

from conftest import needs_adapters, rows, write_beir
from contaccum.adapters.checkpoint_folders import damage, is_complete
from contaccum.adapters.trainer import ContAccumTrainer
from contaccum.cli import app, main
from contaccum.common.errors import CheckpointError, is_full_disk
from contaccum.common.lock import alone_in
from contaccum.common.outputs import is_unused, remove_parts, scratch_for, sole_path, write_jsonl, write_text
from contaccum.common.provenance import marks_of
from contaccum.data.prepare import prepare
from contaccum.data.training_set import files_of
from contaccum.experiments.cell import _trained
from contaccum.methods.config import TrainConfig, load_config
from contaccum.retrieval.encode import encode
from contaccum.training.logfile import keep_updates
from contaccum.training.run import train
from contaccum.training.run_folder import STATES, checkpoint_to_resume
from test_train import assert_bit_equal, final_state, options

ROOT = Path(__file__).parents[1]


class Another:
    """A process that is alone in a folder until it is killed."""

    def __init__(self, folder: Path) -> None:
        ready, tell = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            with alone_in(folder):
                os.write(tell, b"1")
                signal.pause()
        os.read(ready, 1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_lock_dies_with_its_process_and_leaves_nothing(tmp_path) -> None:
    folder = tmp_path / "new" / "run"
    other = Another(folder)
    with (
        pytest.raises(ValueError, match=r"another process is writing to .*run; wait until it ends, or use another --output"),
        alone_in(folder),
    ):
        pass
    other.kill()
    with alone_in(folder):
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert list(folder.iterdir()) == []  # it was there before
    with alone_in(tmp_path / "other" / "run"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_scratch_folder_is_emptied_of_what_a_killed_process_left(tmp_path) -> None:
    left = tmp_path / ".out.part"
    left.mkdir()
    (left / "train.arrow").touch()
    with scratch_for(tmp_path / "out") as scratch:
        assert (scratch, [path.name for path in scratch.iterdir()]) == (left, [".lock"])
        (scratch / "more").mkdir()
    assert list(tmp_path.iterdir()) == []
    other = Another(left)
    with pytest.raises(ValueError, match=r"another process is writing to .*out; wait"), scratch_for(tmp_path / "out"):
        pass
    other.kill()


def test_a_file_that_one_process_writes_is_refused_to_another_and_what_killed_ones_left_goes(tmp_path) -> None:
    with sole_path(tmp_path / "a") as part:
        write_text(part, "first")
        with pytest.raises(ValueError, match=r"another process is writing to .*a; wait"):
            elsewhere(tmp_path / "a")
    left = tmp_path / ".a.part"
    left.mkdir()
    (left / "a.123.part").touch()
    elsewhere(tmp_path / "a")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "second")]


def elsewhere(file: Path) -> None:
    """Write `file` in another process."""
    script = "import sys; from contaccum.common.outputs import *\nwith sole_path(sys.argv[1]) as part: write_text(part, 'second')"
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)


def test_a_file_is_whole_or_not_there(tmp_path) -> None:
    write_text(tmp_path / "a", "before")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a", "x" * 100_000 + "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]
    (tmp_path / "a").rename(tmp_path / "a.part")  # a user's own
    (tmp_path / "b.123.part").touch()
    assert not is_unused(tmp_path)
    remove_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.part"]


@pytest.fixture(scope="module")
def finished(model_folder, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """A finished run whose last update is within an epoch, and its options."""
    folder = tmp_path_factory.mktemp("finished")
    write_jsonl(folder / "rows.jsonl", rows(32))
    arguments = options(str(folder / "rows.jsonl"), model_folder, folder / "run", epochs=1.5, save_every=3)
    train(TrainConfig(**arguments))
    return arguments, folder / "run"


@pytest.fixture
def run(finished, tmp_path) -> tuple[dict[str, Any], Path]:
    arguments, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    return arguments | {"output": str(tmp_path / "run")}, tmp_path / "run"


def emptied(*names: str) -> Callable[[Path], None]:
    def empty(run: Path) -> None:
        for name in names:
            (run / name).write_text("")

    return empty


def removed(*names: str) -> Callable[[Path], None]:
    def remove(run: Path) -> None:
        for name in names:
            shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return remove


def changed(name: str, change: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        (run / "summary.json").unlink()
        change(run / name)

    return spoil


CRASHES: dict[str, tuple[Callable[[Path], None], int | None]] = {
    "between model and summary": (removed("summary.json"), 6),
    "the summary was emptied": (emptied("summary.json"), 6),
    "after the last checkpoint": (removed("summary.json", "model"), 6),
    "the optimizer's state was emptied": (emptied("summary.json", "checkpoints/checkpoint-6/optimizer.pt"), 3),
    "the optimizer's state is of other objects": (
        changed("checkpoints/checkpoint-6/optimizer.pt", lambda file: torch.save({"state": Path("x")}, file)),
        3,
    ),
    "the trainer's state is of another step": (
        changed("checkpoints/checkpoint-6/trainer_state.json", lambda file: file.write_text('{"global_step": 9, "log_history": 5}')),
        3,
    ),
    "a file of the model is gone": (removed("summary.json", "checkpoints/checkpoint-6/modules.json"), 3),
    "before the first checkpoint": (removed("summary.json", "model", "checkpoints"), None),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_run_is_resumed_wherever_it_was_killed(run, name: str) -> None:
    arguments, folder = run
    whole, config = final_state(folder), (folder / "config.yaml").stat().st_mtime_ns
    crash, update = CRASHES[name]
    crash(folder)
    (folder / "model.1.part").mkdir()
    (folder / "log.jsonl.1.part").touch()
    assert train(TrainConfig(**arguments), resume=True)["resumed_at_update"] == update
    assert_bit_equal(whole, final_state(folder))
    assert (folder / "config.yaml").stat().st_mtime_ns == config  # written once
    kept = {"config.yaml", "run.json", "log.jsonl", "checkpoints", "model", "summary.json"}
    assert {path.name for path in folder.iterdir()} == kept


@pytest.mark.parametrize("kind", ["one tower", "two towers", "adapters"])
def test_a_checkpoint_without_one_of_its_files_is_passed_over(kind: str, jsonl, model_folder, tmp_path) -> None:
    if kind == "adapters":
        needs_adapters()
    chosen = {"one tower": {"tied": True}, "two towers": {"tied": False}, "adapters": {"tied": True, "lora_rank": 2}}[kind]
    arguments = options(jsonl(32), model_folder, tmp_path / "run", **chosen, epochs=1, save_every=2, checkpoints_at_end=True)
    train(TrainConfig(**arguments))
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    for name in [file.relative_to(checkpoint) for file in checkpoint.rglob("*") if file.is_file() and file.name != "trainer_state.json"]:
        (checkpoint / name).rename(tmp_path / "gone")
        passed = damage(checkpoint, STATES)
        assert passed == (None if name.name == "files.json" else f"it has no {name.as_posix()}")
        (tmp_path / "gone").rename(checkpoint / name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_checkpoint_in_which_a_bit_is_another_is_passed_over(name: str, run) -> None:
    """Also where the file can be read as before, with other weights or settings."""
    _, folder = run
    checkpoint = folder / "checkpoints" / "checkpoint-3"
    assert damage(checkpoint) is None
    file = min(checkpoint.rglob(name))
    content = file.read_bytes()
    place = content.index(b"1") if file.suffix == ".json" else len(content) - 9
    file.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
    assert damage(checkpoint) == f"{file.relative_to(checkpoint).as_posix()} is damaged"


@pytest.mark.parametrize(
    "change",
    [
        {"save_steps": [[2]]},
        {"train_batch_size": [4]},
        {"max_steps": None},
        {"log_history": {}},
        {"best_model_checkpoint": 3},
        "[" * 100_000,
    ],
)
def test_a_checkpoint_whose_state_cannot_be_one_is_not_complete(change: dict[str, Any] | str, run) -> None:
    _, folder = run
    file = folder / "checkpoints" / "checkpoint-3" / "trainer_state.json"
    assert is_complete(file.parent)
    file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    assert not is_complete(file.parent)


def test_a_folder_in_the_place_of_weights_is_none(run) -> None:
    _, folder = run
    checkpoint = folder / "checkpoints" / "checkpoint-3"
    file = min(checkpoint.rglob("model.safetensors"))
    file.unlink()
    file.mkdir()
    assert damage(checkpoint) == f"it has no {file.relative_to(checkpoint).as_posix()}"


def test_a_list_of_files_without_a_bottom_is_a_damaged_one(run) -> None:
    _, folder = run
    checkpoint = folder / "checkpoints" / "checkpoint-3"
    (checkpoint / "files.json").write_text("[" * 100_000)
    assert damage(checkpoint) == "files.json is damaged"


@pytest.mark.parametrize("line", ['{"loss": 1.0}', "[1]", "7", "{", "[" * 100_000, '{"update": "2"}'])
def test_a_log_ends_before_a_line_of_no_update(line: str, tmp_path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(f'{{"update": 1}}\n{line}\n{{"update": 3}}\n')
    keep_updates(file, 2)
    assert file.read_text() == '{"update": 1}\n'


@pytest.mark.parametrize("reason", ["it has no modules.json", "it has no rng_state_0.pth"])
def test_a_run_none_of_whose_checkpoints_can_be_used_is_refused(run, reason: str) -> None:
    """Damaged ones; or those of another number of processes, where nothing says how many they were."""
    _, folder = run
    (folder / "summary.json").unlink()
    if "modules" in reason:
        for checkpoint in (folder / "checkpoints").iterdir():
            (checkpoint / "modules.json").unlink()
    else:
        (folder / "run.json").write_text("")
    with pytest.raises(
        CheckpointError, match=rf"has no complete checkpoint to resume from \(checkpoint-3: {reason}\); resume it by as many"
    ):
        checkpoint_to_resume(folder, load_config(folder / "config.yaml", {}), 1 if "modules" in reason else 2)


def test_a_run_is_not_resumed_with_other_data(jsonl, model_folder, tmp_path) -> None:
    """One that was begun before runs knew their data goes on; so does a copy of the same data."""
    folder, data = tmp_path / "run", Path(jsonl(32))
    arguments = options(str(data), model_folder, folder, epochs=1)
    train(TrainConfig(**arguments))
    (folder / "summary.json").unlink()
    before = data.read_text()
    data.write_text(before.replace("w1 ", "w2 "))
    with pytest.raises(ValueError, match=rf"{data.name} of the training data has changed since {folder} was begun; bring back what it"):
        train(TrainConfig(**arguments), resume=True)
    data.write_text(before)
    checkpoint_to_resume(folder, load_config(folder / "config.yaml", {}), 1)
    data.write_text(before.replace("w1 ", "w2 "))
    begun = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({name: value for name, value in begun.items() if name != "data"}))
    assert train(TrainConfig(**arguments), resume=True)["updates"] == 4


@pytest.mark.parametrize("kind", ["a folder of judgements", "a saved data set", "a saved table"])
def test_which_files_are_the_training_data(kind: str, tmp_path) -> None:
    """And no others, which may come and go beside them."""
    if kind == "a folder of judgements":
        folder = write_beir(tmp_path / "data", ["w1", "w2"], ["w1", "w2"], train=range(2), test=range(2))
        expected = ["corpus.jsonl", "queries.jsonl", "qrels/train.tsv"]
    else:
        table = datasets.Dataset.from_list(rows(4))
        folder, saved = tmp_path / "data", table if "table" in kind else datasets.DatasetDict(train=table, test=table)
        saved.save_to_disk(folder)
        expected = ["data-00000-of-00001.arrow" if "table" in kind else "train/data-00000-of-00001.arrow"]
    assert [file.relative_to(folder).as_posix() for file in files_of(folder, "train")] == expected


def test_marks_tell_large_files_apart(tmp_path) -> None:
    """By their bytes, their ends and what lies between."""
    size, marks = 5 * 2**20, set()
    for content in (
        b"a" * size,
        b"a" * (size + 1),
        b"b" + b"a" * (size - 1),
        b"a" * (size - 1) + b"b",
        b"a" * 2**21 + b"b" * (size - 2**21),
    ):
        (tmp_path / "file").write_bytes(content)
        marks.add(marks_of([tmp_path / "file"], tmp_path)["file"])
    assert len(marks) == 5


@pytest.mark.parametrize("kept", [False, True])
def test_checkpoints_of_a_finished_run_go_though_it_was_killed_before_it_removed_them(run, kept: bool) -> None:
    arguments, folder = run
    arguments = arguments | {"checkpoints_at_end": kept}
    (folder / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load((folder / "config.yaml").read_text()) | arguments))
    with pytest.raises(ValueError, match="is finished: its model is in"):
        train(TrainConfig(**arguments), resume=True)
    assert (folder / "checkpoints").exists() == kept
    (folder / "checkpoints").mkdir(exist_ok=True)
    assert _trained(folder, arguments)["updates"] == 6
    assert (folder / "checkpoints").exists() == kept


def test_a_folder_without_a_configuration_is_not_begun(jsonl, model_folder, tmp_path) -> None:
    """Killed between making the folder and config.yaml."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    for name in (".lock", "run.json", "config.yaml.7.part"):
        (folder / name).touch()
    arguments = options(jsonl(32), model_folder, folder, epochs=1)
    with pytest.raises(ValueError, match="holds no run to resume"):
        train(TrainConfig(**arguments), resume=True)
    train(TrainConfig(**arguments))
    assert json.loads((folder / "run.json").read_text())["processes"] == 1


def test_a_run_goes_on_as_it_was_begun_and_by_one_process_alone(run, monkeypatch) -> None:
    arguments, folder = run
    (folder / "summary.json").unlink()
    before = final_state(folder)
    other = Another(folder)
    with pytest.raises(ValueError, match="another process is writing to"):
        train(TrainConfig(**arguments), resume=True)
    other.kill()
    begun = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(begun | {"processes": 2}))
    message = "was started by 2 processes, not 1; resume it under torchrun --nproc-per-node 2, or use another --output"
    with pytest.raises(ValueError, match=message):
        train(TrainConfig(**arguments), resume=True)
    assert_bit_equal(before, final_state(folder))


def test_two_that_start_at_once(jsonl, model_folder, tmp_path) -> None:
    folder = tmp_path / "run"
    other = Another(folder)
    with pytest.raises(ValueError, match="another process is writing to"):
        train(TrainConfig(**options(jsonl(32), model_folder, folder, epochs=1)))
    other.kill()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "[Errno 13] Permission denied; go on with --resume"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device; make room and go on with --resume"),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), "(os error 122); make room and go on with --resume"),
    ],
)
def test_what_could_not_be_saved_says_why(jsonl, model_folder, tmp_path, monkeypatch, error: Exception, message: str) -> None:
    def fail(self: Any, folder: str) -> None:
        raise error

    monkeypatch.setattr(ContAccumTrainer, "_save_rng_state", fail)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        train(TrainConfig(**options(jsonl(32), model_folder, tmp_path / "run", epochs=1)))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: no room is left on the disk (No space left on device); make room"),
        (EOFError("Ran out of input"), 1, "error: a file that was read ends too early (Ran out of input)"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_the_command_line_says_what_happened(monkeypatch, capsys, error: BaseException, code: int, message: str) -> None:
    def fail() -> None:
        raise error

    typer.main.get_command(app)
    monkeypatch.setattr("contaccum.experiments.request.Request.check", lambda self: fail())
    monkeypatch.setattr(sys, "argv", ["contaccum", "reproduce", "memory", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert message in capsys.readouterr().err


def test_a_full_disk_is_known_by_its_cause() -> None:
    try:
        raise OSError(errno.EDQUOT, "quota")
    except OSError as cause:
        outer = RuntimeError("could not write")
        outer.__cause__ = cause
    assert is_full_disk(outer)
    assert not is_full_disk(OSError(errno.EIO, "I/O error"))


def test_refused_texts_leave_nothing(tiny_encoder, tmp_path) -> None:
    file = tmp_path / "passages.jsonl"
    file.write_text('{"_id": "a", "text": "w1"}\n{"_id": "a", "text": "w2"}\n')
    with pytest.raises(ValueError, match="a second time"):
        encode(tiny_encoder(), file, tmp_path / "deep" / "vectors", progress=False)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"query": "", "positive": "x"}\n')
    with pytest.raises(ValueError, match="no usable record"):
        prepare(bad, tmp_path / "other" / "prepared")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "passages.jsonl"]


def test_a_dry_run_needs_no_pytorch() -> None:
    script = "import sys, contaccum.cli.reproduce, contaccum.experiments.request; print('torch' in sys.modules, 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.split() == ["False", "False"]


def crash_points(*words: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "crash_points.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and Linux")
def test_killed_or_without_room_at_a_few_file_operations() -> None:
    crash_points("encode", "--every", "15")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and Linux")
@pytest.mark.parametrize(
    "command",
    [
        "train",
        "train-dev",
        "mine",
        "prepare-dpr",
        "prepare-beir",
        "search",
        "search-index",
        "evaluate",
        "evaluate-run",
        "report",
        "reproduce",
        "compare",
    ],
)
def test_killed_or_without_room_at_file_operations(command: str) -> None:
    crash_points(command, "--every", "40" if command in ("reproduce", "compare") else "12")
