"""Checkpoints: a resumed training equals one that was not interrupted, and no other bank is taken for its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformerTrainer
from transformers import TrainerCallback, TrainerState

from contaccum import ContAccumCallback, ContAccumLoss, ContAccumTrainer
from contaccum.adapters.checkpoint_folders import last_complete_checkpoint
from contaccum.common.errors import CheckpointError
from test_trainer import arguments, assert_bit_equal, dataset, state_of, trained


@pytest.mark.parametrize("way", ["trainer", "callback"])
@pytest.mark.parametrize("bank", [12, "auto"])
def test_resume_is_bit_equal(tiny_encoder, tmp_path, way, bank) -> None:
    """With dropout, two epochs, and a checkpoint in the middle of the first."""

    def run(folder: Path, resume: str | None = None):
        model = tiny_encoder()
        loss = ContAccumLoss(model, bank_size=bank)
        plain = {"trainer_class": SentenceTransformerTrainer, "callbacks": [ContAccumCallback(loss, checkpoint=resume)]}
        options = plain if way == "callback" else {}
        return trained(model, folder, loss=loss, num_train_epochs=2, save_strategy="steps", save_steps=3, resume=resume, **options)

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert_bit_equal(state_of(whole), state_of(resumed))
    assert resumed.loss.criterion.bank.size == (4 if bank == "auto" else 12)


def test_a_callback_does_not_take_another_run_s_bank(tiny_encoder, tmp_path) -> None:
    """A trainer does not say which folder it resumes: its own is taken for it, unless it is of another run, or not there."""

    def run(folder: str, resume: str | None = None, named: bool = False, seed: int = 1) -> Any:
        model = tiny_encoder()
        loss = ContAccumLoss(model, bank_size=12)
        given = str(tmp_path / resume) if resume else None
        callbacks = [ContAccumCallback(loss, given if named else None)]
        options = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "seed": seed, "resume": given}
        return trained(model, tmp_path / folder, SentenceTransformerTrainer, loss, callbacks=callbacks, **options)

    whole = run("a")
    run("b", seed=2)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is of another run than the one that is resumed; name the folder"):
        run("b", resume="a/checkpoint-2")
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is no complete checkpoint; name the folder that is resumed"):
        run("c", resume="a/checkpoint-2")
    assert_bit_equal(state_of(run("c", resume="a/checkpoint-2", named=True)), state_of(whole))
    assert_bit_equal(state_of(run("a", resume="a/checkpoint-2")), state_of(whole))


def test_a_bank_of_another_loss_is_refused(tiny_encoder, tmp_path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    trained(tiny_encoder(), tmp_path, **saved)
    model = tiny_encoder()
    with pytest.raises(ValueError, match=re.escape("the saved bank is of scale=20.0, this loss has scale=50.0; use what it was saved")):
        trained(model, tmp_path, loss=ContAccumLoss(model, scale=50, bank_size=12), resume=True)
    with pytest.raises(ValueError, match=re.escape("drift_correction='mean+zero-sum', this loss has drift_correction=None")):
        trained(model, tmp_path, loss=ContAccumLoss(model, drift_correction=None, bank_size=12), resume=True)
    two = {name: ContAccumLoss(model, bank_size=12) for name in "ab"}
    with pytest.raises(CheckpointError, match="holds the banks of 1 losses, but there are 2; resume with those losses"):
        trained(model, tmp_path, loss=two, data={"a": dataset(16), "b": dataset(16)}, resume=True)
    file = tmp_path / "checkpoint-4" / "contaccum_state.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"checkpoint-4/contaccum_state.pt cannot be read"):
        trained(model, tmp_path, resume=str(file.parent))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tiny_encoder, tmp_path, capsys) -> None:
    """Cut off, emptied, or with a bit that is another: the same training as without."""
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = state_of(trained(tiny_encoder(), tmp_path, **saved))
    newest = tmp_path / "checkpoint-4"
    for name, change in {
        "optimizer.pt": lambda data: b"",
        "model.safetensors": lambda data: data[:-100],
        "rng_state.pth": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    }.items():
        file = min(newest.rglob(name))
        file.write_bytes(change(file.read_bytes()))
        assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
        assert f"note: {newest} is passed over: {file.relative_to(newest)} is damaged" in capsys.readouterr().err
        assert_bit_equal(state_of(trained(tiny_encoder(), tmp_path, resume=True, **saved)), whole)  # which writes it again
    (newest / "optimizer.pt").unlink()
    assert last_complete_checkpoint(tmp_path) == newest
    assert last_complete_checkpoint(tmp_path, ["optimizer.pt"]) == tmp_path / "checkpoint-2"


@pytest.mark.parametrize("kind", [ContAccumTrainer, SentenceTransformerTrainer])
def test_a_second_run_into_the_same_folder_replaces_the_first_one_s_bank(tiny_encoder, tmp_path, kind) -> None:
    """Also what more processes have left there."""
    for seed in (1, 2):
        trainer = trained(tiny_encoder(), tmp_path, kind, save_strategy="steps", save_steps=4, seed=seed)
        (saved,) = torch.load(tmp_path / "checkpoint-4" / "contaccum_state.pt", weights_only=True)
        assert torch.equal(saved["banks.0._queries"], trainer.loss.criterion.state_dict()["banks.0._queries"])
        (tmp_path / "checkpoint-4" / "contaccum_state_1.pt").touch()
    trained(tiny_encoder(), tmp_path, kind, save_strategy="steps", save_steps=4)
    assert [file.name for file in (tmp_path / "checkpoint-4").glob("contaccum_state*")] == ["contaccum_state.pt"]


@pytest.mark.parametrize(("each_node", "local", "writes"), [(False, 0, False), (True, 0, True), (True, 1, False)])
def test_a_bank_is_saved_on_each_node_where_that_is_asked(tiny_encoder, tmp_path, monkeypatch, each_node, local, writes) -> None:
    """The first process of a second node."""
    monkeypatch.setattr("transformers.TrainingArguments.process_index", 4 + local)
    monkeypatch.setattr("transformers.TrainingArguments.local_process_index", local)
    args = arguments(tmp_path, save_on_each_node=each_node)
    callback = ContAccumCallback(ContAccumLoss(tiny_encoder(), bank_size=4))
    callback.on_train_begin(args, TrainerState(train_batch_size=4), None)
    callback.on_save(args, TrainerState(global_step=3), None)
    assert (tmp_path / "checkpoint-3" / "contaccum_state.pt").exists() == writes


def test_a_bank_of_another_precision_is_refused(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    trained(model, tmp_path, loss=ContAccumLoss(model, bank_size=12, bank_dtype=torch.bfloat16), save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match=re.escape("the saved bank is of bank_dtype='torch.bfloat16', this loss has bank_dtype=None")):
        trained(model, tmp_path, resume=True)
    same = {"bank_size": 12, "bank_dtype": torch.bfloat16, "drift_correction": "mean+zero-sum"}
    symmetric = ContAccumLoss(model, directions=("query_to_doc", "doc_to_query"), **same)
    with pytest.raises(ValueError, match=re.escape("of directions=('query_to_doc',), this loss has directions=('query_to_doc', 'doc_to_")):
        trained(model, tmp_path, loss=symmetric, resume=True)


def test_a_checkpoint_without_a_bank_is_refused(tiny_encoder, tmp_path) -> None:
    trained(tiny_encoder(), tmp_path, save_strategy="steps", save_steps=2)
    (tmp_path / "checkpoint-4" / "contaccum_state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no contaccum_state.pt"):
        trained(tiny_encoder(), tmp_path, resume=True)


def test_incomplete_checkpoints_are_passed_over(tmp_path) -> None:
    good = {step: json.dumps({"global_step": step, "log_history": []}) for step in (2, 10)}
    for step, state in (*good.items(), (12, '{"global_st'), (13, "{}"), (14, None), (15, good[2])):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-10"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        last_complete_checkpoint(tmp_path / "checkpoint-2")


class LowersScale(TrainerCallback):
    """A schedule of the loss's scale."""

    def __init__(self, loss: ContAccumLoss) -> None:
        self.loss = loss

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loss.scale = 5.0 + state.global_step


@pytest.mark.parametrize("correction", [None, "mean+zero-sum"])
def test_a_run_whose_scale_was_assigned_is_resumed(tiny_encoder, tmp_path: Path, correction: str | None) -> None:
    found = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = tiny_encoder()
        loss = ContAccumLoss(model, scale=5.0, bank_size=12, drift_correction=correction)
        options = {"save_strategy": "steps", "save_steps": 2, "resume": resume}
        trainer = trained(model, tmp_path, loss=loss, callbacks=[LowersScale(loss)], **options)
        assert loss.scale == 5.0 + trainer.state.global_step
        found.append(state_of(trainer))
    assert_bit_equal(*found)


@pytest.mark.parametrize("changed", [{"mask_labels": True}, {"mask_duplicates": False}, {"guide": True}, {"scale": 7.0}])
def test_a_bank_with_other_keys_or_scores_is_refused(tiny_encoder, changed: dict[str, Any]) -> None:
    model = tiny_encoder(tied=True)
    if "guide" in changed:
        changed = {"guide": tiny_encoder(tied=True, seed=1), "margin": 0.0}
    saved = ContAccumLoss(model, bank_size=8, **({"margin": 0.0} if "guide" in changed else {})).criterion.state_dict()
    (name,) = set(changed) - {"margin"}
    with pytest.raises(ValueError, match=f"the saved bank is of {name}="):
        ContAccumLoss(model, bank_size=8, **changed).criterion.load_state_dict(saved)
