"""Two gloo processes with n = 4 are one process with n = 8; and a process that dies takes nothing with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from conftest import assert_close
from contaccum.methods.table import METHODS
from contaccum.training.logfile import read_log
from distributed_worker import COMBINED
from test_train import command, options

WORKER = str(Path(__file__).with_name("distributed_worker.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


@pytest.fixture(scope="module")
def outputs(model_folder, tmp_path_factory) -> tuple[Path, Path]:
    import json

    from conftest import rows

    folder = tmp_path_factory.mktemp("distributed")
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(64, negatives=1)))
    one, two = folder / "one", folder / "two"
    for output, launcher in ((one, [sys.executable]), (two, TORCHRUN)):
        output.mkdir()
        done = subprocess.run([*launcher, WORKER, model_folder, str(data), str(output)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    return one, two


@pytest.mark.parametrize("hard_negatives", [0, 1])
@pytest.mark.parametrize("method", [*METHODS, COMBINED])
def test_two_processes_equal_one(outputs, method: str, hard_negatives: int) -> None:
    (weights, bank, updates), (weights2, bank2, updates2) = (torch.load(o / f"{method}-{hard_negatives}.pt") for o in outputs)
    assert updates == updates2 == 4
    assert_close(weights, weights2)
    assert bank.keys() == bank2.keys()
    for name in bank:
        if isinstance(bank[name], torch.Tensor):
            assert torch.allclose(bank[name], bank2[name], rtol=1e-3, atol=1e-5), name
        else:
            assert bank[name] == bank2[name], name
    if method == COMBINED or METHODS[method].bank:
        other = torch.load(outputs[1] / f"{method}-{hard_negatives}-rank.pt")
        assert all(torch.equal(other[name], value) for name, value in bank2.items() if isinstance(value, torch.Tensor))


def test_the_gradients_moved_something(outputs) -> None:
    """Guards the equalities above: methods differ from each other."""
    weights = {method: torch.load(outputs[0] / f"{method}-1.pt")[0] for method in ("gradaccum", "gradcache", "contaccum", "prebatch")}
    name = next(n for n in weights["gradaccum"] if n.endswith("dense.weight"))
    for a in weights:
        for b in weights:
            assert a == b or not torch.allclose(weights[a][name], weights[b][name], atol=1e-6), (a, b)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="PyTorch 2.6 cannot load what several processes on CPUs save")
def test_a_process_that_dies_leaves_a_resumable_run(jsonl, model_folder, tmp_path) -> None:
    arguments = options(jsonl(64, negatives=1), model_folder, tmp_path / "run", n_local=2, epochs=40, save_every=4, keep_checkpoints=1)
    launch = [*TORCHRUN, *command(arguments)[1:]]
    process = subprocess.Popen(launch, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while not (tmp_path / "run" / "checkpoints" / "checkpoint-8" / "trainer_state.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.kill(rank_one(process.pid), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Signal 9 (SIGKILL)" in errors
    resumed = subprocess.run(
        [*TORCHRUN, "-m", "contaccum", "train", "--output", str(tmp_path / "run"), "--resume"], capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert [line["update"] for line in read_log(tmp_path / "run" / "log.jsonl")] == list(range(1, 321))


def rank_one(launcher: int) -> int:
    """The process of rank 1 among the launcher's children, by its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue  # it ended while we looked
        if parent == launcher and b"RANK=1" in environment:
            return int(folder.name)
    raise AssertionError("no process of rank 1")
