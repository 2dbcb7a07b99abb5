"""The planner's choices: the largest that fits, shown on the command line, kept by training, checked by runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from conftest import tiny_config
from contaccum.cli import app
from contaccum.cli.plan import text
from contaccum.memory.plan import plan, planned
from contaccum.memory.planner import Measured, Plan, Planner
from contaccum.memory.prediction.predict import Predictor
from contaccum.memory.trials import faster, verified
from contaccum.methods.config import TrainConfig
from contaccum.training.trial import measure, try_in_process, write_model, write_texts
from plan_models import middling

MINILM = Path(__file__).parents[2] / "shared" / "models" / "minilm-l3"


# Choices ---------------------------------------------------------------------------------------------------------------


def asked(memory: str | None, **options: Any) -> TrainConfig:
    model = middling(num_hidden_layers=4)
    return TrainConfig(**{"model": model, "n_total": 96, "bank": 64, "max_seq_length": 64, "memory": memory, **options})


def test_choices_are_monotone_in_memory_and_the_largest_that_fit() -> None:
    chosen = []
    predictor = Predictor(asked("1GB"))
    for megabytes in (110, 150, 200, 300, 400, 600, 1000):
        found = plan(asked(f"{megabytes}MB"), alternatives=False)
        room = Planner(predictor, megabytes * 10**6).room
        assert found.prediction.peak_bytes <= room
        sizes = [n for n in range(1, 97) if 96 % n == 0]
        larger = [n for n in sizes if n > found.config.n_local][:1]
        assert all(predictor.predict(replace(found.config, n_local=n)).peak_bytes > room for n in larger)
        chosen.append((not found.config.gradient_checkpointing, found.config.n_local))
    assert chosen == sorted(chosen)
    assert len(set(chosen)) > 4
    assert chosen[-1] == (True, 96)


def test_what_would_buy_more_is_said() -> None:
    found = plan(asked("200MB"))
    bought = {alternative.options: alternative.n_local for alternative in found.more}
    assert bought["--gradient-checkpointing"] > found.config.n_local
    printed = json.loads(json.dumps({**found.as_dict(), "model": ""}))
    assert printed["n_local"] * printed["micro_batches"] == printed["n_total"] == 96
    assert sum(printed["parts"].values()) == printed["allocated_bytes"] <= printed["peak_bytes"] <= 0.95 * printed["memory_bytes"]
    assert plan(asked("1GB")).more == []


def test_bert_base_gets_the_papers_micro_batch_in_11_gb() -> None:
    found = plan(TrainConfig(model=BertConfig(), memory="11GB", hard_negatives=1), alternatives=False)
    assert (found.config.n_local, found.micro_batches, found.bank) == (8, 16, 1024)
    assert 109e6 * 4 * 2 < found.prediction.parts["parameters"] < 111e6 * 4 * 2


BAD = {
    "memory": ({"memory": "80MB"}, "memory 80MB is too small: .* needs 0.0. GB, more than 95% of 0.08 GB; "),
    "no memory": ({"memory": None}, "give --memory"),
    "dpr": ({"memory": "90MB", "method": "dpr"}, "memory 90MB is too small: dpr with n_local=96.*use gradaccum or contaccum"),
    "n_total": ({"n_total": 0}, "n_total=0"),
    "length": ({"max_seq_length": 65}, "--max-seq-length 65 is longer than the 64 positions"),
    "precision": ({"precision": "int8"}, "precision='int8' is unknown; choose one of"),
    "bank": ({"bank": -1}, "bank=-1 is negative"),
    "query bank": ({"query_bank": 999}, "query_bank_size=999 must lie between 0 and bank_size=64"),
    "method": ({"method": "magic"}, "method 'magic' is unknown"),
    "no size": ({"memory": "much"}, "memory 'much' is not a size; write it as 11GB"),
    "model": ({"model": "no/such/folder"}, "no model can be read from no/such/folder"),
    "correction": ({"drift_correction": "both"}, "drift_correction='both' is unknown; choose one of auto, "),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as printed:
        plan(asked(**{"memory": "1GB", **options}))
    assert "\n" not in str(printed.value)


def test_a_given_micro_batch_is_judged() -> None:
    assert plan(asked("1GB"), n_local=8).config.n_local == 8
    with pytest.raises(ValueError, match=r"n_local=96 needs .* GB, more than 95% of 0.20 GB; n_local=\d+ fits"):
        plan(asked("200MB"), n_local=96)
    with pytest.raises(ValueError, match="n_total=96 is not a multiple of n_local=40; use n_local=32, or n_total=80"):
        plan(asked("1GB"), n_local=40)


def test_shorter_queries_take_less() -> None:
    config = asked("1GB", n_local=32)
    predictor = Predictor(config)
    long, short = (predictor.predict(config, query_tokens=tokens).parts["activations"] for tokens in (64, 16))
    assert 0.55 * long < short < 0.7 * long


# Command line and training ---------------------------------------------------------------------------------------------


def call(*words: object) -> None:
    app([str(word) for word in words], standalone_mode=False)


def test_command_line(capsys: pytest.CaptureFixture[str], model_folder: str) -> None:
    common = ("plan", "--model", model_folder, "--max-seq-length", "32", "--n-total", "32", "--bank", "16")
    call(*common, "--memory", "500MB", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert (printed["n_local"], printed["bank"], printed["hard_negatives"]) == (32, 16, 1)
    call(*common, "--memory", "500MB")
    out = capsys.readouterr().out
    assert "n = 32, K = 1, bank = 16" in out
    assert "speed is not predicted" in out
    call(*common[:-2], "--memory", "500MB", "--drift-correction", "none", "--json")
    assert json.loads(capsys.readouterr().out)["bank"] == 8 * 32


@pytest.mark.skipif(not MINILM.exists(), reason=f"{MINILM.name} is not among the shared models")
def test_a_model_folder_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    call("plan", "--model", MINILM, "--memory", "2GB", "--max-seq-length", "128", "--n-local", "16", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert 1.0e9 < printed["peak_bytes"] < 1.5e9


@pytest.mark.parametrize(("bank", "resolved"), [(16, 16), ("auto", 16)])  # 48 rows: the micro-batch of 16 decides
def test_train_plans_n_local_and_resumes_with_it(model_folder: str, jsonl: Any, tmp_path: Path, bank: int | str, resolved: int) -> None:
    from contaccum.methods.config import AUTO, load_config

    options = {"data": jsonl(48), "model": model_folder, "output": tmp_path / "run", "n_total": 16, "bank": bank, "max_seq_length": 32}
    options |= {"n_local": "auto", "memory": "500MB", "max_updates": 4, "save_every": 2, "diagnose_every": 0}
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))] + ["--checkpoints-at-end"]
    call("train", *arguments)
    stored = load_config(tmp_path / "run" / "config.yaml", {})
    assert (stored.n_local, stored.bank, stored.drift_correction) == (16, resolved, "mean+zero-sum")
    for made in ("summary.json", "model", "checkpoints/checkpoint-4"):  # as if it had been killed
        shutil.move(tmp_path / "run" / made, tmp_path / made.replace("/", "-"))
    call("train", *arguments, "--resume")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_at_update"] == 2

    config = load_config(None, {"n_local": "auto"})
    assert config.n_local == AUTO
    with pytest.raises(ValueError, match="n_local=auto needs a memory"):
        planned(config, 0)
    with pytest.raises(ValueError, match="whole_updates"):
        planned(replace(config, whole_updates=True), 0)
    with pytest.raises(ValueError, match="n_local='many' is not of type int"):
        load_config(None, {"n_local": "many"})


# Runs ------------------------------------------------------------------------------------------------------------------


def test_measuring_runs_the_training_command_on_full_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """Here without a GPU, so without peaks."""
    config = TrainConfig(model=tiny_config(), n_total=8, n_local=4, bank=16, max_seq_length=32, hard_negatives=1)
    measured = measure(config, query_tokens=16, updates=2)
    assert measured.n_local == 4
    assert measured.samples_per_second > 0


def test_made_up_texts_fill_the_length(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_model(tmp_path, tiny_config())
    write_texts(tmp_path / "texts.jsonl", 6, 2, 16, 32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [len(tokenizer(row["query"])["input_ids"]) for row in rows] == [16, 15] * 3
    assert {len(tokenizer(text)["input_ids"]) for row in rows for text in row["negatives"]} == {31, 32}
    assert all(max(tokenizer(row["positive"])["input_ids"]) < tiny_config().vocab_size for row in rows)


def test_verification_goes_down_or_up_to_the_largest_that_runs() -> None:
    """A GPU is made up: it runs what it can hold."""
    config = asked("300MB")
    for room in (3, 24, 48):
        tried = []

        def attempt(config: TrainConfig, *args: Any, room: int = room, tried: list[int] = tried) -> Measured | None:
            tried.append(config.n_local)
            return Measured(config.n_local, config.gradient_checkpointing, 1, 1, 1.0) if config.n_local <= room else None

        planner = Planner(Predictor(config), 300_000_000, try_out=attempt)
        found = planner.largest(config)
        assert found is not None
        checked = verified(Plan(found.config, 300_000_000, found.prediction), planner)
        largest = max(n for n in planner.sizes(config) if n <= room and n <= max(tried))
        assert checked.config.n_local == checked.measured.n_local == largest
        assert checked.prediction == planner.predict(checked.config).prediction
        assert len(tried) == len(set(tried)) <= 5


@pytest.mark.parametrize("quickest", ["plain", "checkpointing", "graphs"])
def test_the_fastest_of_what_was_tried_is_the_plan(quickest: str) -> None:
    def attempt(config: TrainConfig, room: int, query_tokens: int | None) -> Measured:
        name = "checkpointing" if config.gradient_checkpointing else "graphs" if config.cuda_graphs else "plain"
        rate = 9.0 if name == quickest else {"plain": 2.0, "checkpointing": 3.0, "graphs": 4.0}[name]
        return Measured(config.n_local, config.gradient_checkpointing, 1, 1, rate, config.cuda_graphs)

    said: list[str] = []
    planner = Planner(Predictor(asked("200MB")), 200_000_000, try_out=attempt, say=said.append)
    fit = planner.largest(asked("200MB"))
    assert fit is not None
    plain = verified(Plan(fit.config, 200_000_000, fit.prediction), planner)
    found = faster(plain, planner)
    assert (found.config.gradient_checkpointing, found.config.cuda_graphs) == (quickest == "checkpointing", quickest == "graphs")
    assert found.measured is not None
    assert found.measured.samples_per_second == 9.0
    assert found.prediction == planner.predict(found.config).prediction
    n = plain.config.n_local
    larger = max(measured.n_local for measured in (found.measured, *found.slower))
    assert larger > n
    names = {"plain": f"n = {n}", "graphs": f"n = {n} and CUDA graphs", "checkpointing": f"n = {larger} and gradient checkpointing"}
    printed = text(found).splitlines()
    assert [line.split(":")[0] for line in printed if line.startswith("measured")] == [f"measured with {names[quickest]}"]
    assert [line.split(":")[0] for line in printed if line.startswith("slower")] == [
        f"slower with {names[name]}" for name in names if name != quickest
    ]
    assert ("--cuda-graphs" in printed[-1], "--gradient-checkpointing" in printed[-1]) == (
        quickest == "graphs",
        quickest == "checkpointing",
    )
    assert len(found.as_dict()["slower"]) == 2
    assert said[0].startswith(f"tried n = {fit.config.n_local}: ")
    assert [line.split(":")[0] for line in said if "graphs" in line] == [f"tried {names['graphs']}"]


def test_what_cannot_be_tried_beside_a_plan_is_said() -> None:
    def attempt(config: TrainConfig, *args: Any) -> Measured | None:
        if config.cuda_graphs:
            raise RuntimeError("measuring failed: no graphs today")
        return Measured(config.n_local, config.gradient_checkpointing, 1, 1, 1.0) if not config.gradient_checkpointing else None

    planner = Planner(Predictor(asked("200MB")), 200_000_000, try_out=attempt)
    fit = planner.largest(asked("200MB"))
    assert fit is not None
    plan = verified(Plan(fit.config, 200_000_000, fit.prediction), planner)
    with pytest.warns(UserWarning, match="which may be faster, could not be tried") as warned:
        assert faster(plan, planner) == plan
    printed = [str(w.message) for w in warned if "could not be tried" in str(w.message)]  # libraries warn of things of their own
    assert ["no graphs today" in line for line in printed] == [True, False]
    assert "and gradient checkpointing" in printed[1]


def test_a_plan_tells_the_command_that_trains_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_model(tmp_path, BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=128, vocab_size=70))
    options = ["--model", str(tmp_path), "--max-seq-length", "64", "--n-total", "32", "--drift-correction", "none", "--tied", "--no-verify"]
    call("plan", "--memory", "150MB", *options)
    printed = capsys.readouterr().out.strip().splitlines()[-1]
    assert printed.startswith(f"to train so: contaccum train --model {tmp_path} --tied ")
    train_options = printed.removeprefix("to train so: contaccum train ").removesuffix(" ...").split()
    assert "--bank" not in train_options  # as large as it is by itself
    config = TrainConfig(model=str(tmp_path), tied=True, max_seq_length=64, n_total=32, drift_correction=None, hard_negatives=1)
    parsed = dict(zip(*[iter(x for x in train_options if x != "--tied")] * 2, strict=True))
    expected = plan(replace(config, memory="150MB"), alternatives=False).config
    assert parsed == {
        "--model": str(tmp_path),
        "--max-seq-length": "64",
        "--n-total": "32",
        "--n-local": str(expected.n_local),
        "--drift-correction": "none",
        "--hard-negatives": "1",
        "--memory": "150MB",
    }


@pytest.mark.gpu
def test_plan_is_verified_on_this_gpu(tmp_path: Path) -> None:
    write_model(tmp_path, BertConfig(num_hidden_layers=2))
    config = TrainConfig(model=str(tmp_path), memory="2GB", n_total=64, bank=64, max_seq_length=128, hard_negatives=0)
    found = plan(config, try_out=try_in_process, alternatives=False)
    assert found.measured is not None
    assert found.measured.peak_bytes <= 0.95 * 2e9
