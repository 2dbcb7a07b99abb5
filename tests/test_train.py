"""The train command as users run it: real processes, real files, kill and resume, clear lines for mistakes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from contaccum.adapters.trainer import ContAccumTrainer
from contaccum.common.sizes import parse_bytes
from contaccum.data.training_set import load_training_set, with_hard_negatives
from contaccum.methods.config import TrainConfig, load_config, with_bank
from contaccum.methods.table import METHODS, split_update
from contaccum.training.logfile import read_log
from contaccum.training.run import train

SHARED = Path(__file__).parents[2] / "shared"


def options(data: str, model: str, output: Path, **changes: Any) -> dict[str, Any]:
    base = {"data": data, "model": model, "output": str(output), "pooling": "mean", "similarity": "cosine", "lr": 3e-3, "epochs": 2}
    sizes = {"n_total": 8, "n_local": 4, "bank": 20, "max_seq_length": 32, "save_every": 4, "checkpoints_at_end": True}
    return base | sizes | changes


def command(arguments: dict[str, Any], *flags: str) -> list[str]:
    words = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        words += [option if value else f"--no-{option[2:]}"] if isinstance(value, bool) else [option, str(value)]
    return [sys.executable, "-m", "contaccum", "train", *words, *flags]


def run(words: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=300, **kwargs)


def final_state(output: Path) -> dict[str, Any]:
    """Weights, optimizer, bank and log of a finished run, as comparable values."""
    checkpoint = max((output / "checkpoints").iterdir(), key=lambda p: int(p.name.split("-")[1]))
    weights = {f"{f.parent.name}.{k}": v for f in (output / "model").rglob("*.safetensors") for k, v in load_file(f).items()}
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    (bank,) = torch.load(checkpoint / "contaccum_state.pt", weights_only=True)
    return {
        **weights,
        **{f"optimizer.{i}.{k}": v for i, values in optimizer.items() for k, v in values.items()},
        **{f"bank.{k}": v for k, v in bank.items()},
        "log": (output / "log.jsonl").read_text(),
    }


def assert_bit_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    differ = [k for k in a if not (torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k])]
    assert differ == []


@pytest.mark.parametrize("method", ["contaccum", "gradcache", "prebatch"])
def test_kill_and_resume_is_bit_equal(method: str, jsonl, model_folder, tmp_path) -> None:
    """Killed at the first sign of the second checkpoint, most likely in the middle of writing it; dropout on, negatives drawn."""
    arguments = options(jsonl(64, negatives=3), model_folder, tmp_path / "whole", method=method, epochs=3, keep_checkpoints=1)
    whole = run(command(arguments))
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"
    process = subprocess.Popen(command(arguments | {"output": str(killed)}), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (killed / "checkpoints" / "checkpoint-8").exists():
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "model").exists()
    resumed = run(command({"output": str(killed)}, "--resume", "--json"))
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1])["resumed_at_update"] in (4, 8)
    assert len(read_log(killed / "log.jsonl")) == 24
    assert_bit_equal(final_state(tmp_path / "whole"), final_state(killed))


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_trains_and_leaves_a_run_folder(method: str, jsonl, model_folder, tmp_path) -> None:
    config = TrainConfig(**options(jsonl(64, negatives=1), model_folder, tmp_path / "run", method=method, epochs=4))
    summary = train(config)
    lines = read_log(tmp_path / "run" / "log.jsonl")
    assert [line["update"] for line in lines] == list(range(1, 33))
    negatives = {"dpr": 15, "gradcache": 15, "gradaccum": 7, "contaccum-no-past": 15, "prebatch-no-past": 15, "contaccum-gradcache": 55}
    assert summary["negatives_per_query"] == lines[-1]["negatives_per_query"] == negatives.get(method, 47)
    settled = lines[6:]  # the bank is full
    assert sum(line["loss"] for line in settled[-8:]) < sum(line["loss"] for line in settled[:8])
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["method"] == method
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 42
    assert SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu").encode_query(["w1 w2"]).shape == (1, 16)


def test_yaml_with_overrides(jsonl, model_folder, tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("lr: 2e-5\nn_total: 16\nmethod: gradaccum\nscale: 2\n")
    config = load_config(file, {"n_total": 32})
    assert (config.lr, config.n_total, config.method, config.scale) == (2e-5, 32, "gradaccum", 2.0)


def test_paper_settings_are_the_defaults() -> None:
    config = TrainConfig()
    assert (config.lr, config.warmup_updates, config.max_grad_norm, config.adam_eps, config.weight_decay) == (2e-5, 1237, 2.0, 1e-8, 0.0)
    assert (config.n_total, config.max_seq_length, config.pooling, config.similarity, config.epochs) == (128, 256, "cls", "dot", 40)


def test_hard_negatives_are_drawn_again_each_epoch_and_the_same_again(jsonl) -> None:
    table, draw = with_hard_negatives(load_training_set(jsonl(20, negatives=5)), 1, seed=3)
    assert draw is not None
    epochs = []
    for epoch in (0, 1, 0):
        draw.epoch = epoch
        epochs.append([row["negative"] for row in table])
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]


def test_rows_without_negatives_are_left_out_and_counted(tmp_path, model_folder, capsys) -> None:
    file = tmp_path / "some.jsonl"
    rows = [{"query": f"w{i}", "positive": f"w{i} w1", "negatives": ["w9"] * (i % 2)} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    train(TrainConfig(**options(str(file), model_folder, tmp_path / "run", epochs=1)))
    assert "20 of 40 rows have fewer than 1 hard negatives and are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "n_total", "n_local", "processes", "expected"),
    [
        ("dpr", 128, 8, 1, (128, 1, None)),
        ("dpr", 128, 8, 2, (64, 1, None)),
        ("gradaccum", 128, 8, 1, (8, 16, None)),
        ("contaccum", 128, 8, 4, (8, 4, None)),
        ("contaccum", 8, 8, 1, (8, 1, None)),
        ("gradcache", 128, 8, 2, (64, 1, 8)),
    ],
)
def test_batch_arithmetic(method: str, n_total: int, n_local: int, processes: int, expected: tuple) -> None:
    batches = split_update(METHODS[method], n_total, n_local, processes)
    assert (batches.per_process, batches.accumulation, batches.mini) == expected


@pytest.mark.parametrize(("text", "expected"), [("11GB", 11 * 10**9), ("10.5 GiB", int(10.5 * 2**30)), ("500m", 5 * 10**8), ("7", 7)])
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("method", "rows", "processes", "expected"),
    [
        ("contaccum", 10_000, 1, 8 * 16),
        ("contaccum", 160, 1, 10),
        ("contaccum", 64, 1, 4),
        ("contaccum", 64, 2, 8),  # both processes' micro-batches enter at once
        ("contaccum-gradcache", 64, 1, 16),
    ],
)
def test_automatic_bank_is_eight_updates_a_sixteenth_of_the_rows_or_a_micro_batch(method, rows, processes, expected) -> None:
    batches = split_update(METHODS[method], 16, 4, processes)
    assert with_bank(TrainConfig(n_total=16), batches.micro_batch * processes, rows).bank == expected
    assert with_bank(TrainConfig(n_total=16, bank=7), batches.micro_batch * processes, rows).bank == 7


@pytest.mark.parametrize(("method", "correction"), [("contaccum", "mean+zero-sum"), ("contaccum-no-past", None), ("gradaccum", None)])
def test_defaults_are_resolved_written_said_and_resumed(method: str, correction, jsonl, model_folder, tmp_path, capsys) -> None:
    arguments = options(jsonl(64), model_folder, tmp_path / "run", method=method, bank="auto")
    train(TrainConfig(**arguments))
    printed = capsys.readouterr().err
    assert ("note: bank=4, for updates of 8 and 64 rows" in printed) == METHODS[method].bank
    assert "Computing" not in printed  # the trainer's own bar
    config = load_config(tmp_path / "run" / "config.yaml", {})
    assert (config.bank, config.drift_correction) == (4 if METHODS[method].bank else 0, correction)
    assert config.warmup_updates < 24  # as many as there are, not the 1,237 of the defaults
    whole = final_state(tmp_path / "run")
    for made in ("summary.json", "model", "checkpoints/checkpoint-16"):  # as if it had been killed
        (tmp_path / "run" / made).rename(tmp_path / made.replace("/", "-"))
    assert train(TrainConfig(**arguments), resume=True)["resumed_at_update"] == 12
    assert_bit_equal(whole, final_state(tmp_path / "run"))


def test_the_papers_way_by_name(tmp_path) -> None:
    file = tmp_path / "config.yaml"
    for text, expected in (("none", None), ("null", None), ("mean", "mean"), ("auto", "auto")):
        file.write_text(f"drift_correction: {text}\n")
        assert load_config(file, {}).drift_correction == expected
    assert load_config(None, {"drift_correction": "none"}).drift_correction is None  # as the command line gives it
    assert (TrainConfig().bank, TrainConfig().drift_correction) == ("auto", "auto")


MISTAKES = {
    "method": ({"method": "moco"}, "method 'moco' is unknown; choose one of dpr, gradaccum, gradcache"),
    "multiple": ({"n_total": 10}, "n_total=10 is not a multiple of n_local=4; use n_local=2, or n_total=8"),
    "bank": ({"bank": 65}, "bank=65 is larger than the training set of 64 rows"),
    "data": ({"data": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
    "model": ({"model": "nowhere"}, "no model can be read from nowhere"),
    "model's path": ({"model": "/nowhere"}, "no model can be read from /nowhere: there is no such folder or file"),
    "tokenizer": ({"tokenizer": "/nowhere"}, "no tokenizer can be read from /nowhere: there is no such folder or file"),
    "no updates": ({"max_updates": 0}, "max_updates=0 must be above 0; leave it out for no limit"),
    "no rows": ({"limit": 0}, "limit=0 must be above 0; leave it out for no limit"),
    "learning rate": ({"lr": float("inf")}, "lr=inf is not a finite number; give one, or leave it out"),
    "weight decay": ({"weight_decay": float("nan")}, "weight_decay=nan is not a finite number"),
    "epsilon": ({"adam_eps": -1.0}, "adam_eps=-1.0 must be above 0"),
    "fewer negatives": ({"hard_negatives": -1}, "hard_negatives=-1 is negative; use 0 or more"),
    "seed": ({"seed": -1}, "seed=-1 is negative"),
    "large seed": ({"seed": 2**32}, "seed=4294967296 is too large; use one below 4294967296"),
    "memory": ({"memory": "much"}, "memory 'much' is not a size; write it as 11GB"),
    "precision": ({"precision": "fp8"}, "precision='fp8' is unknown; choose one of fp32, bf16, fp16"),
    "negatives": ({"hard_negatives": 2}, "no row has 2 hard negatives"),
    "negative": ({"bank": -1}, "bank=-1 is negative"),
    "bank's name": ({"bank": "large"}, "bank='large' is not a number of tuples; give one, or auto"),
    "correction": ({"drift_correction": "both"}, "drift_correction='both' is unknown; choose one of auto, mean+zero-sum, mean, none"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_before_anything_is_lost(name: str, jsonl, model_folder, tmp_path) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        train(TrainConfig(**options(jsonl(64), model_folder, tmp_path / "run") | changes))
    assert [file.suffix for file in tmp_path.iterdir()] == [".jsonl"]
    assert "\n" not in str(caught.value)


def test_missing_columns_are_named_with_file_and_line(tmp_path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"query": "a", "positive": "b"}\n{"question": "a", "positive": "b"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: no text under 'query'; fields there: question, positive"):
        load_training_set(file)
    file.write_text('{"query": "a", "positive": "b"}\n{"query": "a", \n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: not JSON"):
        load_training_set(file)


def test_jsonl_keeps_answers_and_single_negatives(tmp_path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"query": "q", "positive": "p", "negative": "n", "answers": ["a"]}\n{"query": "q", "positive": "p"}\n')
    assert load_training_set(file)[:] == {"query": ["q"] * 2, "positive": ["p"] * 2, "negatives": [["n"], []], "answers": [["a"], []]}


def test_command_line_says_one_line_and_exits_with_2(jsonl, model_folder, tmp_path) -> None:
    printed = run(command(options(jsonl(64), model_folder, tmp_path / "run", method="moco")))
    assert printed.returncode == 2
    assert "error: method 'moco' is unknown" in printed.stderr
    assert "Traceback" not in printed.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        (["train", "--lr", "abc"], "error: Invalid value for '--lr': "),
        (["train", "--learning", "3"], "error: No such option"),  # and which, with or without a colon
        (["trian"], "error: No such command 'trian'"),
        (["reproduce", "memory", "--scale", "tiny", "--output", "/proc/run"], "error: /proc/run"),
    ],
)
def test_what_cannot_be_parsed_or_made_is_one_line(given: list[str], printed: str) -> None:
    done = run([sys.executable, "-m", "contaccum", *given])
    assert done.returncode == 2
    assert done.stderr.startswith(printed)
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupt_is_one_line(jsonl, model_folder, tmp_path) -> None:
    words = command(options(jsonl(64), model_folder, tmp_path / "run", epochs=1000))
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and so would this one
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        while not (tmp_path / "run" / "log.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed.splitlines()[-1].endswith("error: interrupted")
    assert "Traceback" not in printed


def test_a_run_folder_that_cannot_be_made_is_named(jsonl, model_folder, tmp_path) -> None:
    file = jsonl(64)
    with pytest.raises(ValueError, match=r"run cannot be made: .*jsonl is not a folder that can be written to; use another --output"):
        train(TrainConfig(**options(file, model_folder, Path(file) / "run")))


def test_a_run_folder_is_never_overwritten_nor_resumed_changed(jsonl, model_folder, tmp_path) -> None:
    arguments = options(jsonl(64), model_folder, tmp_path / "run", epochs=1)
    train(TrainConfig(**arguments))
    with pytest.raises(ValueError, match="is not empty; use --resume"):
        train(TrainConfig(**arguments))
    with pytest.raises(ValueError, match=r"was started with lr=0.003, not 0.1; resume it unchanged"):
        train(TrainConfig(**arguments | {"lr": 0.1}), resume=True)
    with pytest.raises(ValueError, match="is finished: its model is in"):
        train(TrainConfig(**arguments), resume=True)
    with pytest.raises(ValueError, match="holds no run to resume"):
        train(TrainConfig(**arguments | {"output": str(tmp_path / "other")}), resume=True)


def test_full_disk_while_saving_loses_nothing(jsonl, model_folder, tmp_path) -> None:
    """A limit on file sizes stands for the full disk: the second checkpoint cannot be written, the first remains and is resumed."""
    arguments = options(jsonl(64), model_folder, tmp_path / "run", epochs=3, keep_checkpoints=1)
    script = (
        "import resource, contaccum.adapters.trainer as t, contaccum.cli\n"
        "save = t.ContAccumTrainer._save_checkpoint\n"
        "def full(self, *args):\n"
        "    if self.state.global_step == 8: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "    save(self, *args)\n"
        "t.ContAccumTrainer._save_checkpoint = full\n"
        "contaccum.cli.main()\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    printed = run([sys.executable, "-c", script, *command(arguments)[3:]])
    assert printed.returncode == 2
    assert "error: could not save" in printed.stderr
    assert "Traceback" not in printed.stderr
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-4"]
    resumed = run(command({"output": str(tmp_path / "run")}, "--resume"))
    assert resumed.returncode == 0, resumed.stderr
    assert len(read_log(tmp_path / "run" / "log.jsonl")) == 24


def test_acl_trains_from_the_compressed_beir_folder(tmp_path) -> None:
    if not (SHARED / "data" / "acl").exists():
        pytest.skip("the acl collection is not beside this checkout")
    config = TrainConfig(
        data=str(SHARED / "data" / "acl"),
        model=str(SHARED / "models" / "minilm-l3"),
        output=str(tmp_path / "run"),
        limit=64,
        bank=32,
        n_total=16,
        n_local=8,
        max_seq_length=32,
        epochs=1,
        lr=1e-4,
        save_every=0,
    )
    assert train(config)["updates"] == 4


def test_memory_limit_says_when_it_cannot_be_enforced(jsonl, model_folder, tmp_path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here: the limit is enforced")
    train(TrainConfig(**options(jsonl(32), model_folder, tmp_path / "run", epochs=1, memory="11GB")))
    assert "note: the memory limit cannot be enforced: there is no CUDA device here" in capsys.readouterr().err


def test_gradient_checkpointing_reaches_the_towers_and_changes_nothing(jsonl, model_folder, tmp_path, monkeypatch) -> None:
    recomputed = []
    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", lambda *args, **kw: recomputed.append(1) or checkpoint(*args, **kw))
    for name, checkpointing in {"plain": False, "checkpointed": True}.items():
        assert not recomputed
        train(TrainConfig(**options(jsonl(), model_folder, tmp_path / name, epochs=1, gradient_checkpointing=checkpointing)))
    assert recomputed
    plain, checkpointed = (final_state(tmp_path / name) for name in ("plain", "checkpointed"))
    assert plain["log"] == checkpointed["log"]


def test_workers_tokenise_where_the_tokenizer_was_told_to_use_threads(jsonl, model_folder, tmp_path) -> None:
    """Its threads do not follow into a forked worker, which would wait for them."""
    words = command(options(jsonl(), model_folder, tmp_path / "run", workers=1, epochs=1))
    done = run(words, env={**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr


def test_workers_make_the_next_update_while_this_one_is_computed(jsonl, model_folder, tmp_path, monkeypatch) -> None:
    """The trainer takes an update's micro-batches at once: what is not made by then is waited for."""
    made, micro_batches, seen = tmp_path / "made", 16, []
    collate, training_step = SentenceTransformerDataCollator.__call__, ContAccumTrainer.training_step

    def counted(self, *arguments, **keywords):
        with open(made, "a") as file:
            file.write("x")
        return collate(self, *arguments, **keywords)

    def waited(self, *arguments, **keywords):
        if not seen:  # until nothing more is made
            before = -1
            while len(made.read_text()) > before:
                before = len(made.read_text())
                time.sleep(1)
            seen.append(before)
        return training_step(self, *arguments, **keywords)

    monkeypatch.setattr(SentenceTransformerDataCollator, "__call__", counted)
    monkeypatch.setattr(ContAccumTrainer, "training_step", waited)
    sizes = {"n_total": 2 * micro_batches, "n_local": 2, "bank": 0, "method": "gradaccum"}
    train(TrainConfig(**options(jsonl(96), model_folder, tmp_path / "run", workers=1, max_updates=3, save_every=0, **sizes)))
    assert seen[0] >= 2 * micro_batches


@pytest.mark.parametrize("names", ["nothing", "tensorboard, nothing"])
def test_a_logger_that_is_not_there_is_one_line(names: str, jsonl, model_folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="report_to=nothing is not installed, or not known; pip install nothing"):
        train(TrainConfig(**options(jsonl(32), model_folder, tmp_path / "run", report_to=names)))
    assert not (tmp_path / "run").exists()


def test_tensorboard_through_report_to(jsonl, model_folder, tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    train(TrainConfig(**options(jsonl(32), model_folder, tmp_path / "run", epochs=1, report_to="tensorboard", log_every=1)))
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


@pytest.mark.gpu
def test_memory_limit_is_enforced_on_cuda(jsonl, model_folder, tmp_path) -> None:
    arguments = options(jsonl(64), model_folder, tmp_path / "run", memory="30MB", n_total=64, n_local=64, method="dpr", max_seq_length=64)
    printed = run(command(arguments), env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "0"})
    assert printed.returncode == 1
    assert "out of memory" in printed.stderr
    assert "use a smaller --n-local" in printed.stderr


def test_the_log_says_how_many_negatives_were_left_out(jsonl, model_folder, tmp_path) -> None:
    """All that are more similar than the positive minus 3, and a cosine is at most 1: every one."""
    asked = {"margin": 1.99, "directions": "query_to_doc, doc_to_query", "similarity": "cosine", "epochs": 1}
    train(TrainConfig(**options(jsonl(64, negatives=1), model_folder, tmp_path / "run", **asked)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["left_out_per_query"] > 7  # two micro-batches of 4 with hard negatives, and what the bank held by then
    assert lines[-1]["left_out_per_query"] == lines[-1]["negatives_per_query"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"directions": "doc_to_query"}, "directions=('doc_to_query',) must be a tuple, each once, with 'query_to_doc'"),
        ({"directions": "query_to_doc,sideways"}, "directions='sideways' is unknown"),
        ({"margin_strategy": "relative"}, "margin_strategy='relative' has no effect without a margin"),
    ],
)
def test_comparisons_that_cannot_be_are_refused_at_once(values, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(data="x", output="y", **values).check()


@pytest.mark.parametrize("kept", [True, False])
def test_a_finished_run_has_its_model_and_no_checkpoints_unless_they_are_kept(kept: bool, jsonl, model_folder, tmp_path) -> None:
    train(TrainConfig(**options(jsonl(32), model_folder, tmp_path / "run", epochs=1, checkpoints_at_end=kept)))
    assert (tmp_path / "run" / "checkpoints").exists() is kept
    assert (tmp_path / "run" / "model").exists()
