"""Whole trainings with faster towers: what is on by itself, resuming, what is refused."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contaccum.methods.config import TrainConfig, load_config
from contaccum.methods.table import get_method, split_update
from contaccum.towers.speed import compile_towers, encoders, has_flash_attention, unpad_towers, unpads_by_itself
from contaccum.training.logfile import read_log
from contaccum.training.run import train
from contaccum.training.trainer_arguments import tokenizing_workers, training_arguments
from test_train import assert_bit_equal, final_state, options


@pytest.fixture
def fast(jsonl, model_folder, tmp_path, monkeypatch) -> Callable[..., TrainConfig]:
    monkeypatch.setattr("contaccum.training.run.compile_towers", functools.partial(compile_towers, backend="aot_eager"))

    def config(name: str, **changes: Any) -> TrainConfig:
        return TrainConfig(**options(jsonl(64, negatives=3), model_folder, tmp_path / name, **{"epochs": 2, **changes}))

    return config


def test_training_with_fast_towers_resumes_bit_equal(fast, tmp_path) -> None:
    resumes_bit_equal(lambda name: fast(name, torch_compile=True, unpad=True, keep_checkpoints=9), tmp_path)


def resumes_bit_equal(config: Callable[[str], TrainConfig], folder: Path) -> None:
    """A run of 16 updates, whole and gone on with from its eighth; `config(name)` writes to `folder / name`."""
    whole, again = config("whole"), config("again")
    train(whole)
    shutil.copytree(folder / "whole", folder / "again")
    for name in ("model", "summary.json", "checkpoints/checkpoint-16", "checkpoints/checkpoint-12"):
        path = folder / "again" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    stored = (folder / "again" / "config.yaml").read_text().replace(whole.output, again.output)
    (folder / "again" / "config.yaml").write_text(stored)
    assert train(again, resume=True)["resumed_at_update"] == 8
    assert_bit_equal(final_state(folder / "whole"), final_state(folder / "again"))


def test_compiled_training_is_plain_training(fast, tmp_path) -> None:
    for name, changes in {"plain": {}, "compiled": {"torch_compile": True}}.items():
        train(fast(name, **changes))
    plain, compiled = ([line["loss"] for line in read_log(tmp_path / name / "log.jsonl")] for name in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-3)


def test_tokenising_ahead_changes_nothing(fast, tmp_path) -> None:
    """Negatives are drawn again in the second epoch, in whichever process."""
    for name, workers in {"none": 0, "two": 2}.items():
        train(fast(name, workers=workers))
    assert_bit_equal(final_state(tmp_path / "none"), final_state(tmp_path / "two"))


@pytest.mark.parametrize(("precision", "changes", "unpadded"), [("bf16", {}, True), ("bf16", {"unpad": False}, False), ("fp32", {}, False)])
def test_padding_is_left_out_by_itself_where_that_is_fast(precision, changes, unpadded, fast, tmp_path, monkeypatch) -> None:
    """And a run that is gone on with elsewhere stays as it began."""
    monkeypatch.setattr("contaccum.towers.speed.has_flash_attention", lambda: True)
    unpadding: list[Any] = []
    monkeypatch.setattr("contaccum.training.run.unpad_towers", lambda model: (unpadding.append(model), unpad_towers(model)))
    config = fast("run", precision=precision, max_updates=4, **changes)
    train(config)
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "run" / "summary.json").unlink()
    assert load_config(tmp_path / "run" / "config.yaml", {}).unpad is unpadded
    assert len(unpadding) == unpadded
    monkeypatch.setattr("contaccum.towers.speed.has_flash_attention", lambda: False)
    train(config, resume=True)
    assert len(unpadding) == 2 * unpadded


def test_what_cannot_be_unpadded_is_padded_by_itself(tiny_encoder, monkeypatch) -> None:
    monkeypatch.setattr("contaccum.towers.speed.has_flash_attention", lambda: True)
    assert unpads_by_itself(tiny_encoder(), "fp16")
    assert not unpads_by_itself(tiny_encoder("modernbert"), "fp16")
    model = tiny_encoder()
    next(encoders(model)).config.output_hidden_states = True
    assert not unpads_by_itself(model, "fp16")


def test_flash_attention_is_nvidias_and_built(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    monkeypatch.setattr("torch.version.hip", None)
    assert has_flash_attention()
    for name, value in {
        "torch.cuda.is_available": lambda: False,
        "torch.cuda.get_device_capability": lambda: (7, 5),
        "torch.backends.cuda.is_flash_attention_available": lambda: False,
        "torch.version.hip": "7.0",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert not has_flash_attention()


def test_defaults_of_a_run(fast) -> None:
    config = fast("run")
    assert tokenizing_workers(config) == (2 if torch.cuda.is_available() else 0)
    arguments = training_arguments(config, split_update(get_method(config.method), config.n_total, config.n_local), 1, 64, ["negative"])
    assert arguments.optim == "adamw_torch_fused"
    assert arguments.torch_compile is False  # would compile the whole model, and turn on TF32
    assert arguments.accelerator_config.non_blocking is torch.cuda.is_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_tf32_without_a_gpu_is_one_clear_line(fast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tf32 needs an NVIDIA GPU"):
        train(fast("run", tf32=True))
    assert not (tmp_path / "run").exists()
