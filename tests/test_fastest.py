"""`train --speed auto`: moves are tried within the time, the fastest is kept, and found again without trials."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from contaccum.cli import main
from contaccum.common.outputs import read_json
from contaccum.data.prepare import prepare
from contaccum.memory.planner import Measured
from contaccum.methods.config import TrainConfig
from contaccum.training import fastest as module
from contaccum.training.fastest import BUDGET, Search, cache_file, fastest, moves, options


class Device:
    """A stand-in for trials: each takes some seconds, and its speed follows from the options."""

    def __init__(self, seconds: float = 10.0, room: int = 10_000) -> None:
        self.now, self.seconds, self.room = 0.0, seconds, room
        self.tried: list[TrainConfig] = []

    def clock(self) -> float:
        return self.now

    def trial(self, config: TrainConfig, seconds: float) -> float | None:
        self.tried.append(config)
        self.now += min(self.seconds, seconds)
        if self.seconds > seconds:
            raise subprocess.TimeoutExpired("trial", seconds)
        if config.n_local > self.room:
            return None
        gains = {"cuda_graphs": 3.0, "gradient_checkpointing": 2.0, "torch_compile": 1.25, "unpad": 1.5}
        rate = 100.0
        for name, gain in gains.items():
            rate *= gain if getattr(config, name) else 1.0
        return rate

    def search(self, sized: Any = lambda config: config) -> tuple[Search, list[str]]:
        said: list[str] = []
        return Search(self.trial, sized, said.append, self.clock), said


@pytest.fixture
def compiles(monkeypatch) -> None:
    monkeypatch.setattr(module, "check_compiler", lambda cuda: None)
    monkeypatch.setattr(module, "check_unpadded", lambda precision, compiled, cuda: None)


BF16 = TrainConfig(data="d", output="o", precision="bf16")


def test_the_fastest_options_of_a_gpu_are_put_together(compiles) -> None:
    """CUDA graphs exclude checkpointing and unpadding; compiling is tried on top of them."""
    device = Device()
    search, said = device.search()
    found = search.fastest(BF16, list(moves(BF16, cuda=True)), cuda=True)
    assert (found.cuda_graphs, found.torch_compile, found.gradient_checkpointing, found.unpad) == (True, True, False, None)
    assert options(found) == "--precision bf16 --n-local 8 --torch-compile --cuda-graphs"
    assert max(search.rates.values()) == search.rates[options(found)] == pytest.approx(375)
    assert len(said) == len(device.tried) == 7  # twice the micro-batch in the end


def test_a_move_that_brings_no_more_than_noise_is_not_kept(compiles) -> None:
    found = Device().search()[0].fastest(BF16, [{"workers": 4}], cuda=True)
    assert found == BF16


def test_each_trial_has_the_micro_batches_that_fit_it_and_smaller_ones_where_memory_runs_out(compiles) -> None:
    device = Device(room=32)
    search, said = device.search(lambda config: replace(config, n_local=64 if config.cuda_graphs else 16))
    found = search.fastest(BF16, list(moves(BF16, cuda=True))[:2], cuda=True)
    assert [(config.n_local, config.cuda_graphs) for config in device.tried] == [(16, False), (64, True), (32, True), (32, True)]
    assert (found.n_local, found.cuda_graphs) == (32, True)
    assert sum("memory ran out" in line for line in said) == 1


def test_what_cannot_be_is_left_out_and_the_others_are_tried(monkeypatch) -> None:
    def no_compiler(cuda: bool) -> None:
        raise ValueError("torch_compile needs a C++ compiler")

    monkeypatch.setattr(module, "check_compiler", no_compiler)
    search, said = Device().search()
    config = replace(BF16, precision="fp32")
    found = search.fastest(config, [{"torch_compile": True}, {"cuda_graphs": True}, {"gradient_checkpointing": True}], cuda=False)
    assert found == replace(config, gradient_checkpointing=True)
    assert any("--torch-compile cannot be tried: torch_compile needs a C++ compiler" in line for line in said)
    assert any("--cuda-graphs cannot be tried: cuda_graphs needs an NVIDIA GPU" in line for line in said)


@pytest.mark.parametrize(("file", "n", "best"), [("capped-all-h200.json", 16, 996), ("capped-varied-h200.json", 16, 1076)])
def test_measured_speeds_lead_to_the_best_that_was_found_by_hand(compiles, file: str, n: int, best: float) -> None:
    """What was measured in 11 GB on an H200 stands in for the trials; what was not, does not fit."""
    rows = read_json(Path(__file__).parent.parent / "results" / file)["rows"]
    ours = [row for row in rows if row["way"].startswith("contaccum") and not row["failed"] and row["precision"] == "bf16"]
    names = ("graphs", "checkpointing", "compile", "unpad")
    speeds = {(row["n_local"], *(bool(row[name]) for name in names)): row["samples_per_second"] for row in ours}

    def trial(config: TrainConfig, seconds: float) -> float | None:
        unpads = config.unpad is not False and not config.cuda_graphs  # as `train` does by itself on such a GPU
        found = speeds.get((config.n_local, config.cuda_graphs, config.gradient_checkpointing, config.torch_compile, unpads))
        return None if found is None else float(found)

    def sized(config: TrainConfig) -> TrainConfig:
        return replace(config, n_local=128 if config.gradient_checkpointing else n)

    start = replace(BF16, n_total=512)
    found = Search(trial, sized, lambda line: None, lambda: 0.0).fastest(start, list(moves(start, cuda=True)), cuda=True)
    assert trial(found, 1.0) == pytest.approx(best, abs=1)


def test_a_damaged_cache_is_written_again(jsonl, model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_file().parent.mkdir()
    cache_file().write_text("{broken")
    monkeypatch.setattr(module, "try_in_process", lambda config, *_: Measured(config.n_local, False, 0, 0, samples_per_second=1.0))
    fastest(TrainConfig(**asked(jsonl(64), model_folder, tmp_path / "run")))
    (key,) = read_json(cache_file())
    cache_file().write_text(json.dumps({key: {"options": {"an_option_of_another_version": 1}}}))
    fastest(TrainConfig(**asked(jsonl(64), model_folder, tmp_path / "run")))
    assert read_json(cache_file())[key]["options"]["n_local"] == 2


def test_pairs_that_are_drawn_have_lengths_too(model_folder, tmp_path, monkeypatch) -> None:
    """What `prepare --unsupervised` has written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "texts.txt").write_text("".join(f"w{i} w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14\n" for i in range(20, 90)))
    prepare(tmp_path / "texts.txt", tmp_path / "crops", unsupervised="crops")
    monkeypatch.setattr(module, "try_in_process", lambda config, *_: Measured(config.n_local, False, 0, 0, samples_per_second=1.0))
    fastest(TrainConfig(**asked(str(tmp_path / "crops"), model_folder, tmp_path / "run")))
    (key,) = read_json(cache_file())
    assert ", 0 hard negatives" in key


@pytest.mark.parametrize(("seconds", "trials"), [(50.0, 3), (70.0, 2), (500.0, 1)])
def test_trials_end_with_their_time(compiles, seconds: float, trials: int) -> None:
    device = Device(seconds)
    search, said = device.search()
    found = search.fastest(BF16, list(moves(BF16, cuda=True)), cuda=True)
    assert len(device.tried) == trials
    assert device.now <= BUDGET
    assert (f"not ended in {BUDGET:.0f} seconds" in said[-1]) == (seconds * trials > BUDGET)
    assert found.cuda_graphs == (seconds == 50.0)


def test_on_a_cpu_there_are_n_threads_and_compiling() -> None:
    names = [name for move in moves(TrainConfig(n_total=16, n_local=8), cuda=False) for name in move]
    assert names == ["n_local", *["threads"] * (torch.get_num_threads() > 1), "torch_compile"]


def asked(data: str, model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {"data": data, "model": model, "output": str(folder), "n_total": 8, "n_local": 2, "epochs": 1, "max_seq_length": 32, **changes}


@pytest.mark.parametrize(
    ("changes", "words", "expected"),
    [
        ({"memory": "11GB"}, [], True),
        ({"memory": "11GB", "method": "gradcache"}, [], True),
        ({}, [], False),
        ({"memory": "11GB"}, ["--speed", "off"], False),
        ({"memory": "11GB", "precision": "bf16"}, [], False),
        ({"memory": "11GB", "n_local": 2}, [], False),
        ({"memory": "11GB", "local_tokens": 512}, [], False),
        ({"memory": "11GB", "lora_rank": 4}, [], False),
        ({"memory": "11GB", "method": "gradaccum"}, [], False),
    ],
)
def test_on_a_gpu_with_a_memory_trials_are_made_unless_an_option_is_given(
    changes, words, expected, jsonl, model_folder, tmp_path, monkeypatch
) -> None:
    started: list[TrainConfig] = []

    def stop(config: TrainConfig) -> TrainConfig:
        started.append(config)
        raise ValueError("enough")

    def trained(config: TrainConfig, resume: bool) -> None:
        raise ValueError("enough")

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "fastest", stop)
    monkeypatch.setattr("contaccum.training.run.train", trained)
    given = {"data": jsonl(64), "model": model_folder, "output": tmp_path / "run"}
    for place in ("command line", "file"):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({name: str(value) for name, value in (given | changes).items()}))
        typed = [f"--{name.replace('_', '-')}={value}" for name, value in (given | changes).items()]
        monkeypatch.setattr(
            "sys.argv", ["contaccum", "train", *(typed if place == "command line" else [str(tmp_path / "config.yaml")]), *words]
        )
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
    assert len(started) == 2 * expected


def test_what_was_found_is_remembered_said_and_trained_with(jsonl, model_folder, tmp_path, monkeypatch, capsys) -> None:
    """By the command, twice, with a stand-in for the trials' processes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")  # a user's own, which stays
    tried: list[TrainConfig] = []
    trials: list[int] = []

    def stand_in(config: TrainConfig, limit_bytes: int, query_tokens: int | None, lengths: Any, seconds: float, *_: Any) -> Measured:
        tried.append(config)
        assert 0 < min(tokens for row in lengths for tokens in row) < query_tokens
        assert 0 < seconds <= BUDGET
        return Measured(config.n_local, False, 0, 0, samples_per_second=10.0 * config.n_local * (0.5 if config.torch_compile else 1))

    monkeypatch.setattr(module, "try_in_process", stand_in)
    for turn in range(2):
        words = [f"--{k.replace('_', '-')}={v}" for k, v in asked(jsonl(64), model_folder, tmp_path / f"run-{turn}").items()]
        monkeypatch.setattr("sys.argv", ["contaccum", "train", *words, "--speed", "auto", "--no-evaluate"])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        assert f"as found{' before' * turn}: contaccum train ... --n-local 8" in capsys.readouterr().err
        assert yaml.safe_load((tmp_path / f"run-{turn}" / "config.yaml").read_text())["n_local"] == 8
        trials.append(len(tried))
    assert trials[0] == trials[1] >= 3, "the second run tries nothing"
    assert cache_file() == tmp_path / "cache" / "contaccum" / "speed.json"
    other = TrainConfig(**asked(jsonl(64), model_folder, tmp_path / "other", n_total=16))
    fastest(other)
    assert len(tried) > trials[1], "another size is another question"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_local": 0}, "speed=auto chooses n_local; leave n_local=auto, local_tokens and whole_updates out"),
        ({"local_tokens": 512}, "speed=auto chooses n_local; leave n_local=auto, local_tokens and whole_updates out"),
    ],
)
def test_what_it_chooses_is_not_given_too(jsonl, model_folder, tmp_path, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        fastest(TrainConfig(**(asked(jsonl(64), model_folder, tmp_path / "run") | changes)))


def test_several_processes_and_used_folders_are_refused_before_any_trial(jsonl, model_folder, tmp_path, monkeypatch) -> None:
    config = TrainConfig(**asked(jsonl(64), model_folder, tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        fastest(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="speed=auto measures one process"):
        fastest(replace(config, output=str(tmp_path / "empty")))


@pytest.mark.slow
def test_real_trials_on_this_machine(jsonl, model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = fastest(TrainConfig(**asked(jsonl(64), model_folder, tmp_path / "run", tied=True)))
    assert found.n_local in (2, 4, 8)
    (entry,) = read_json(cache_file()).values()
    assert len(entry["samples_per_second"]) >= 2
    assert entry["samples_per_second"][options(found)] > 0
