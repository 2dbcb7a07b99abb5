"""Other ways of starting two processes, and other kinds of data: `accelerate launch`, FSDP2, streams. On CPUs, over gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import Features, IterableDataset, Value
from packaging.version import Version
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformerTrainingArguments

from conftest import assert_close, rows
from contaccum import CachedContAccumLoss, ContAccumLoss, ContAccumTrainer
from test_distributed import TORCHRUN
from test_train import command, options

ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--multi_gpu"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no"]
WORKER = str(Path(__file__).with_name("fsdp_worker.py"))


def test_accelerate_launch_trains_as_torchrun_does(jsonl, model_folder, tmp_path) -> None:
    """`--multi_gpu` starts the processes, with GPUs or without; `--cpu` starts one alone."""
    found = []
    for name, launcher in (("torchrun", TORCHRUN), ("accelerate", ACCELERATE)):
        changes = {"n_local": 2, "tied": True, "max_updates": 3, "save_every": 0}
        arguments = options(jsonl(32), model_folder, tmp_path / name, **changes)
        done = subprocess.run([*launcher, *command(arguments)[1:]], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append((load_file(tmp_path / name / "model" / "model.safetensors"), (tmp_path / name / "log.jsonl").read_text()))
    (weights, log), (others, other_log) = found
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert log == other_log


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="PyTorch 2.6 has no FSDP2 on CPUs")
def test_fsdp2_equals_one_process(model_folder, tmp_path) -> None:
    for launcher, processes in (([sys.executable], 1), (TORCHRUN, 2)):
        words = [*launcher, WORKER, model_folder, str(tmp_path / f"{processes}.pt")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    found, sharded = (torch.load(tmp_path / f"{processes}.pt") for processes in (1, 2))
    assert found.keys() == sharded.keys() == {"ContAccumLoss", "CachedContAccumLoss"}
    for loss, one in found.items():
        two = sharded[loss]
        assert two["sharded"]
        assert not one["sharded"]
        assert one["banked"] == two["banked"] == 20
        assert_close(one["weights"], two["weights"])
        moved = [name for name, value in one["weights"].items() if not torch.equal(value, one["before"][name])]
        assert len(moved) > 10, "nothing was trained"


def streamed() -> Iterator[dict[str, str]]:
    for row in rows(128):
        yield {"query": row["query"], "positive": row["positive"]}


@pytest.mark.parametrize(("kind", "further"), [(ContAccumLoss, {}), (CachedContAccumLoss, {"mini_batch_size": 4})])
def test_a_stream_trains_and_resumes(kind: type[ContAccumLoss], further: dict[str, int], tiny_encoder, tmp_path) -> None:
    """Its rows are not counted: an automatic bank is 8 updates' worth."""
    model = tiny_encoder(tied=True)
    loss = kind(model, **further)
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        save_steps=6,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = IterableDataset.from_generator(streamed, features=Features({"query": Value("string"), "positive": Value("string")}))
    trainer = ContAccumTrainer(model=model, args=args, train_dataset=data, loss=loss)
    trainer.train()
    assert loss.criterion.bank.size == 8 * 4 * 2
    assert len(loss.criterion.bank) == 64
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
