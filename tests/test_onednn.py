"""Linear layers by oneDNN compute what nn.Linear does, and leave everything else as it is."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from conftest import assert_close
from contaccum.methods.config import TrainConfig
from contaccum.towers import onednn
from contaccum.towers.onednn import leave_onednn, onednn_where_it_suits, suits_onednn, take_onednn
from contaccum.training.run import train

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch comes without oneDNN")


def small(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256, bias=bias), nn.GELU(), nn.Linear(256, 128, bias=bias), nn.Linear(128, 3))


def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what goes by oneDNN from now on."""
    seen: list[tuple[int, ...]] = []
    usual = onednn._product

    def product(left, right, bias=None):
        seen.append(tuple(left.shape))
        return usual(left, right, bias)

    monkeypatch.setattr(onednn, "_product", product)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 128), (3, 7, 128)])
def test_outputs_and_gradients_are_those_of_the_usual_way(bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = products(monkeypatch)
    found = []
    for taken in (False, True):
        model, inputs = small(bias), torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if taken:
            take_onednn(model)
        assert bool(seen) is False
        output = model(inputs)
        output.square().sum().backward()
        found.append({"output": output.detach(), "inputs": inputs.grad, **{name: p.grad for name, p in model.named_parameters()}})
    assert len(seen) == 2 * 3  # the third layer is too small
    assert_close(*found)


def test_frozen_weights_get_no_gradient_and_cost_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    model[0].requires_grad_(False)
    take_onednn(model)
    seen = products(monkeypatch)
    model(torch.randn(4, 128)).sum().backward()
    assert len(seen) == 2 + 1  # forward, and the second layer's weight: nothing before it needs a gradient
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


@pytest.mark.parametrize("autocast", [True, False])
def test_other_types_go_the_usual_way(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small() if autocast else small().bfloat16()
    inputs = torch.randn(4, 128, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(inputs)
        take_onednn(model)
        seen = products(monkeypatch)
        assert torch.equal(model(inputs), expected)
    assert not seen


def test_a_copy_has_its_own_weights_and_names_stay() -> None:
    model = small()
    names = list(model.state_dict())
    take_onednn(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.zero_()
        copied[0].bias.zero_()
    assert not copied[0](torch.ones(1, 128)).any()
    assert model[0](torch.ones(1, 128)).any()
    assert list(model.state_dict()) == names
    leave_onednn(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_within_the_block_only_and_what_was_taken_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "suits_onednn", lambda: True)
    model = small()
    with onednn_where_it_suits(model):
        assert "forward" in model[0].__dict__
    assert "forward" not in model[0].__dict__
    take_onednn(model)
    with onednn_where_it_suits(model):
        pass
    assert "forward" in model[0].__dict__


def test_it_suits_amd_processors_with_avx512(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processor = tmp_path / "cpuinfo"
    monkeypatch.setattr(onednn, "Path", lambda name: processor)
    for capability, vendor, suits in (
        ("AVX512", "AuthenticAMD", True),
        ("AVX2", "AuthenticAMD", False),
        ("AVX512", "GenuineIntel", False),
        ("AVX512", None, False),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        processor.unlink(missing_ok=True)
        if vendor:
            processor.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
        suits_onednn.cache_clear()
        assert suits_onednn() is suits
    suits_onednn.cache_clear()


@pytest.mark.parametrize("suits", [True, False])
def test_train_takes_it_where_it_suits(
    suits: bool, model_folder: str, jsonl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tower's layers go by oneDNN in training and leave it afterwards; a loss with a bank is the same but for rounding."""
    monkeypatch.setattr(onednn, "SMALLEST", 0)
    options = {"data": jsonl(32), "model": model_folder, "tied": True, "max_seq_length": 32, "epochs": 2}
    options |= {"n_total": 8, "n_local": 4, "bank": 2, "warmup_updates": 0}
    seen = products(monkeypatch)
    losses = []
    for now in (suits, False):
        monkeypatch.setattr(onednn, "suits_onednn", lambda now=now: now)
        losses.append(train(TrainConfig(**options, output=str(tmp_path / f"{suits}-{len(losses)}")))["final_loss"])
    assert bool(seen) is suits
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_killed_run_is_resumed_bit_by_bit(
    model_folder: str, jsonl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "SMALLEST", 0)
    monkeypatch.setattr(onednn, "suits_onednn", lambda: True)
    seen = products(monkeypatch)
    options = {"max_seq_length": 32, "n_total": 8, "n_local": 4, "bank": 8, "epochs": 1, "save_every": 2, "warmup_updates": 0}
    config = TrainConfig(data=jsonl(32), model=model_folder, output=str(tmp_path / "run"), **options)
    train(config)
    model = tmp_path / "run" / "model"
    whole = {file: load_file(file) for file in model.rglob("*.safetensors")}
    for made in (model, tmp_path / "run" / "checkpoints" / "checkpoint-4"):  # as if it had been killed
        shutil.rmtree(made)
    (tmp_path / "run" / "summary.json").unlink()
    assert train(config, resume=True)["resumed_at_update"] == 2
    assert seen
    assert whole
    assert all(torch.equal(load_file(file)[name], value) for file, values in whole.items() for name, value in values.items())
