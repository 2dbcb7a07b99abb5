"""The planner: what it predicts equals what is recorded, and what it chooses is the largest that fits."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, PretrainedConfig

from conftest import tiny_config
from contaccum.config import TrainConfig
from contaccum.plan import Measured, Plan, Planner, plan, planned
from contaccum.plan.allocator import MIB, CachingAllocator, OutOfBudget
from contaccum.plan.cuda import CudaSemantics
from contaccum.plan.loss import accept_arrivals, bank_loss, record_loss
from contaccum.plan.measure import measure, verified, write_model, write_texts
from contaccum.plan.predict import Predictor
from contaccum.plan.towers import DROP, Encoder, can_checkpoint, inputs, record, record_passes
from contaccum.plan.trace import AffineTrace, Recorder, Trace, _sorted_releases, fit
from contaccum.plan.update import Simulation

ROOT = Path(__file__).parents[1]
MINILM = ROOT.parent / "shared" / "models" / "minilm-l3"
TOKENS = 24


def middling(**changes: Any) -> BertConfig:
    """Large enough that blocks of 512 bytes do not decide."""
    shape = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    return BertConfig(**{**shape, "max_position_embeddings": 64, **changes})


# The allocator ---------------------------------------------------------------------------------------------------------


def test_allocator_rounds_and_reserves_as_pytorch_documents() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(513)  # from the same segment
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    allocator.allocate(3 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(15 * MIB)  # 17 MiB are free in the segment of 20
    assert allocator.reserved == 22 * MIB
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 38 * MIB


def test_allocator_takes_the_smallest_block_that_fits_and_joins_neighbours() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.release(block)
    allocator.allocate(15 * MIB)  # the three as one
    assert (allocator.reserved, allocator.allocated) == (20 * MIB, 20 * MIB)


def test_allocator_gives_free_segments_back_before_it_gives_up() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    held = allocator.allocate(40 * MIB)
    allocator.release(held)
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 50 * MIB
    assert allocator.peak_reserved == 50 * MIB
    with pytest.raises(OutOfBudget):
        allocator.allocate(20 * MIB)


# What is saved ---------------------------------------------------------------------------------------------------------


def saved_by_hooks(encoder: Encoder, samples: int) -> int:
    """Bytes that autograd saves in a real forward pass: each storage once, without parameters, buffers and inputs."""
    features = inputs(samples, TOKENS)
    known = {t.untyped_storage()._cdata for t in [*encoder.parameters(), *encoder.buffers(), *features.values()]}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        embedding = encoder(dict(features))["sentence_embedding"]
    assert embedding.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def poolerless(config: BertConfig, precision: str, semantics: Any) -> Encoder:
    """BERT's own pooler saves its output for nobody; a hook sees that, a recording of what stays does not."""
    encoder = Encoder(config, "cls", precision, False, semantics)
    encoder.model.pooler = None
    return encoder


@pytest.mark.parametrize("semantics", [nullcontext, CudaSemantics])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_saved_bytes_are_affine_and_predicted_exactly(attention: str, precision: str, semantics: Any) -> None:
    """Predicted from batches of 2, 3 and 4 without data; saved by real passes of 1, 2, 3 and 6."""
    config = middling()
    config._attn_implementation = attention
    encoder = poolerless(config, precision, semantics)
    saved = {n: saved_by_hooks(encoder, n) for n in (1, 2, 3, 6)}
    assert saved[3] - saved[2] == saved[2] - saved[1] > 0
    with (mode := FakeTensorMode()):
        fake = poolerless(config, precision, semantics)
    trace = fit({n: record_passes(fake, n, TOKENS, mode) for n in (2, 3, 4)}, "it")
    for n, bytes_saved in saved.items():
        sizes = trace.sizes(n)
        assert sum(sizes[i] for i in trace.alive_after(DROP)) == bytes_saved, n


def test_attention_on_cuda_saves_no_scores() -> None:
    """Twice as long texts: the mask's bias grows fourfold, everything else at most twofold."""
    config = middling(num_hidden_layers=1, max_position_embeddings=512)
    short, long = (record(config, tokens).saved_bytes(4) for tokens in (128, 256))
    bias = 4 * 4 * 128 * 128  # bytes, samples, rows, columns
    assert 2 * short < long <= 2 * short + 2 * bias
    config._attn_implementation = "eager"
    assert record(config, 256).saved_bytes(4) > long + 4 * 4 * 2 * 256 * 256


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "qwen"])
@pytest.mark.parametrize(("precision", "checkpointing"), [("fp32", True), ("bf16", False), ("fp16", True)])
def test_every_family_can_be_recorded(family: str, checkpointing: bool, precision: str) -> None:
    config = tiny_config(family)
    tower = record(config, TOKENS, "lasttoken" if family == "qwen" else "mean", precision, checkpointing and can_checkpoint(config))
    assert tower.saved_bytes(5) > 0
    assert len({number for _, number in tower.passes.kept}) >= len(tower.trainable) - 1  # a tower may leave one unused


def test_checkpointing_and_half_precision_save_memory() -> None:
    config = middling(num_hidden_layers=6)
    saved = {(p, c): record(config, TOKENS, "cls", p, c).saved_bytes(64) for p in ("fp32", "bf16") for c in (False, True)}
    assert saved["fp32", True] < 0.2 * saved["fp32", False]
    assert saved["bf16", False] < 0.95 * saved["fp32", False]


def test_uneven_growth_is_refused() -> None:
    def trace(size: int) -> Trace:
        return Trace((size,), ((0,),))

    assert fit({2: trace(5), 3: trace(7), 4: trace(9)}, "it") == AffineTrace((1,), (2,), ((0,),), ())
    with pytest.raises(ValueError, match="it does not grow evenly"):
        fit({2: trace(5), 3: trace(7), 4: trace(10)}, "it")
    with pytest.raises(ValueError, match="it does not grow evenly"):
        fit({2: trace(5), 3: Trace((7, 1), ((0, 1),)), 4: trace(9)}, "it")


def test_releases_at_one_place_have_one_order() -> None:
    """Autocast drops its cache in the order of addresses; a gradient's place stays where it is."""
    assert _sorted_releases([0, 1, ~1, ~0, 2, ~2]) == (0, 1, ~0, ~1, 2, ~2)
    assert _sorted_releases([0, 1, 2, ~2, ~1, ~0], {4}) == (0, 1, 2, ~2, ~0, ~1)


def test_a_recording_without_data_is_one_with_data() -> None:
    """Only where several gradients meet does a tensor without data take one more buffer for their sum."""
    peaks = {}
    for name, mode in (("fake", FakeTensorMode()), ("real", nullcontext())):
        with mode:
            encoder = Encoder(middling(), "cls", "fp32", False)
        trace = record_passes(encoder, 4, TOKENS, mode)
        peaks[name] = _peak(trace)
    assert peaks["real"] <= peaks["fake"] <= 1.02 * peaks["real"]


def _peak(trace: Trace) -> int:
    live = peak = 0
    for event in (event for segment in trace.segments for event in segment):
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        peak = max(peak, live)
    return peak


# Bank and optimizer ----------------------------------------------------------------------------------------------------

BANKS = {
    "plain": {},
    "hard negatives": {"hard_negatives": 2},
    "positives only": {"hard_negatives": 2, "cache_hard_negatives": False},
    "paper": {"drift_correction": None, "hard_negatives": 1},
    "mean": {"drift_correction": "mean"},
    "bfloat16": {"bank_dtype": "bfloat16", "hard_negatives": 1},
    "fewer queries": {"query_bank": 7},
    "no queries": {"method": "prebatch"},
    "no keys": {"mask_duplicates": False},
    "cosine": {"similarity": "cosine"},
    "no bank": {"method": "gradaccum"},
}


@pytest.mark.parametrize("options", BANKS.values(), ids=BANKS.keys())
def test_bank_bytes_are_the_banks(options: dict[str, Any]) -> None:
    config = TrainConfig(bank=40, **options)
    h, d, n = config.hard_negatives or 0, 24, 6
    loss = bank_loss(config)
    for _ in range(9):  # filled, and beyond
        columns = [torch.randn(n, d, requires_grad=True) for _ in range(2 + h)]
        loss.compute_loss_from_embeddings(columns, keys=[torch.randint(99, (n,)) for _ in columns]).backward()
    bank = loss.criterion.bank
    assert len(bank) == (40 if config.method != "gradaccum" else 0)
    assert record_loss(config, n, d).bank_bytes == bank.nbytes


def test_optimizer_bytes_are_adamws() -> None:
    encoder = Encoder(middling(), "cls", "fp32", False)
    trained = [p for p in encoder.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    real = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    tower = record(middling(), TOKENS)
    assert sum(4 + 2 * size for size in tower.trainable) == real
    assert sum(tower.fixed) == sum(t.nbytes for t in [*encoder.parameters(), *encoder.buffers()])


# The whole update ------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Stands in for a SentenceTransformer with a Router."""

    def __init__(self, config: PretrainedConfig, precision: str, checkpointing: bool, tied: bool) -> None:
        super().__init__()
        self.query = Encoder(config, "cls", precision, checkpointing)
        self.document = self.query if tied else Encoder(config, "cls", precision, checkpointing)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return (self.query if features.pop("task") == "query" else self.document)(features)


def recorded_update(config: TrainConfig, samples: int, micro_steps: int, workspace: int) -> CachingAllocator:
    """Two real updates with real towers, the real loss and AdamW, recorded as they run and played to the allocator."""
    towers = Towers(config.model, config.precision, config.gradient_checkpointing, config.tied)
    loss = bank_loss(config)
    loss.model = towers
    optimizer = torch.optim.AdamW([p for p in towers.parameters() if p.requires_grad], fused=True)
    recorder = Recorder([*towers.parameters(), *towers.buffers()])
    gc.disable()
    with recorder:
        for update in range(2):
            tasks = ["query", *["document"] * (1 + (config.hard_negatives or 0))]
            batches = [[{**inputs(samples, TOKENS), "task": task} for task in tasks] for _ in range(micro_steps)]
            for batch in batches:
                value = loss([dict(features) for features in batch])
                accept_arrivals(loss.criterion.bank)
                value.backward()
                del value
                if update == 0 and batch is batches[0]:
                    loss.criterion.bank._count = 2 * config.bank
            optimizer.step()
            optimizer.zero_grad()
    gc.enable()
    if loss.criterion.bank.size:
        assert loss.criterion.bank.count == 2 * config.bank_size + 2 * micro_steps * samples, "something did not enter"
    trace = recorder.trace()
    allocator = CachingAllocator()
    for size in [workspace, workspace, *(t.nbytes for t in [*towers.parameters(), *towers.buffers()])]:
        allocator.allocate(size)
    held: dict[int, Any] = {}
    for event in trace.segments[0]:
        if event >= 0:
            held[event] = allocator.allocate(trace.sizes[event])
        else:
            allocator.release(held.pop(~event))
    return allocator


UPDATES = {
    "plain": {},
    "hard negatives": {"hard_negatives": 2},
    "bf16": {"precision": "bf16", "hard_negatives": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "tied": {"tied": True},
    "larger bank": {"bank": 300},
    "paper": {"drift_correction": None, "bank": 300},
    "one micro-step": {"method": "dpr", "n_total": 12},
}


@pytest.mark.parametrize("options", UPDATES.values(), ids=UPDATES.keys())
def test_predicted_update_is_the_recorded_one(options: dict[str, Any]) -> None:
    config = TrainConfig(**{"model": middling(num_hidden_layers=3), "n_total": 24, "bank": 64, "max_seq_length": TOKENS, **options})
    config = replace(config, n_local=12)
    update = replace(Predictor(config).update(config), workspace_bytes=0)
    predicted = Simulation(update).run().allocator
    real = recorded_update(config, 12, update.micro_steps, 0)
    assert 0.98 * real.peak_allocated <= predicted.peak_allocated <= 1.05 * real.peak_allocated
    assert 0.95 * real.peak_reserved <= predicted.peak_reserved <= 1.10 * real.peak_reserved


def test_gradients_kept_apart_cost_at_most_themselves() -> None:
    config = TrainConfig(model=middling(), n_total=4, n_local=1, bank=8, max_seq_length=TOKENS)
    predictor = Predictor(config)
    plain, apart = (predictor.predict(config, apart=apart) for apart in (False, True))
    gradients = sum(2 * size for size in predictor.update(config).queries.tower.trainable)
    assert plain.allocated_bytes <= apart.allocated_bytes <= plain.allocated_bytes + 1.3 * gradients
    assert sum(apart.parts.values()) == apart.allocated_bytes


def test_gradcache_holds_one_mini_batch() -> None:
    config = TrainConfig(model=middling(), n_total=64, n_local=8, bank=64, max_seq_length=TOKENS)
    together, cached, whole = (Predictor(config).predict(replace(config, method=m)) for m in ("contaccum", "contaccum-gradcache", "dpr"))
    assert cached.parts["activations"] < 0.6 * together.parts["activations"]
    assert whole.parts["activations"] > 7 * together.parts["activations"]


# Measured on an H200, see results/train-acl-h200.json: texts of varying length up to 128 tokens, no hard negatives.
MEASURED = ("contaccum", "contaccum-gradcache", "dpr", "gradaccum", "gradcache")


@pytest.mark.parametrize("method", MEASURED)
def test_prediction_is_close_to_what_was_measured(method: str) -> None:
    measured = json.loads((ROOT / "results" / "train-acl-h200.json").read_text())[method]["summary"]
    model = BertConfig(hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536)
    config = TrainConfig(model=model, method=method, n_total=128, n_local=8, bank=1024, max_seq_length=128, drift_correction=None)
    predicted = Predictor(config).predict(config)
    assert 0.95 <= predicted.peak_bytes / measured["peak_bytes"] <= 1.10
    assert predicted.bank_bytes == pytest.approx(measured["bank_bytes"], rel=0.01)  # rows then had ids and keys of their own


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


def test_what_would_buy_more_is_told() -> None:
    found = plan(asked("200MB"))
    bought = {alternative.options: alternative.n_local for alternative in found.more}
    assert bought["--gradient-checkpointing"] > found.config.n_local
    told = json.loads(json.dumps({**found.as_dict(), "model": ""}))
    assert told["n_local"] * told["micro_batches"] == told["n_total"] == 96
    assert sum(told["parts"].values()) == told["allocated_bytes"] <= told["peak_bytes"] <= 0.95 * told["memory_bytes"]
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
    "length": ({"max_seq_length": 65}, "--seq 65 is longer than the 64 positions"),
    "precision": ({"precision": "int8"}, "precision 'int8' is unknown; choose one of"),
    "bank": ({"bank": -1}, "bank=-1 is negative"),
    "query bank": ({"query_bank": 999}, "query_bank_size=999 must lie between 0 and bank_size=64"),
    "method": ({"method": "magic"}, "method 'magic' is unknown"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        plan(asked(**{"memory": "1GB", **options}))
    assert "\n" not in str(told.value)


def test_a_given_micro_batch_is_judged() -> None:
    assert plan(asked("1GB"), n_local=8).config.n_local == 8
    with pytest.raises(ValueError, match=r"n_local=96 needs .* GB, more than 95% of 0.20 GB; n_local=\d+ fits"):
        plan(asked("200MB"), n_local=96)
    with pytest.raises(ValueError, match="n_total=96 is not a multiple of n_local=40; use n_total=80"):
        plan(asked("1GB"), n_local=40)


def test_shorter_queries_take_less() -> None:
    config = asked("1GB", n_local=32)
    predictor = Predictor(config)
    long, short = (predictor.predict(config, query_tokens=tokens).parts["activations"] for tokens in (64, 16))
    assert 0.55 * long < short < 0.7 * long


# Command line and training ---------------------------------------------------------------------------------------------


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    from contaccum.cli import main

    monkeypatch.setattr(sys, "argv", ["contaccum", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_folder: str) -> None:
    common = ("plan", "--model", model_folder, "--seq", "32", "--n-total", "32", "--bank", "16")
    assert run_cli(monkeypatch, *common, "--memory", "500MB", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["n_local"], told["bank"], told["hard_negatives"]) == (32, 16, 1)
    assert run_cli(monkeypatch, *common, "--memory", "500MB") == 0
    out = capsys.readouterr().out
    assert "n = 32, K = 1, bank = 16" in out
    assert "speed is not predicted" in out
    assert run_cli(monkeypatch, *common[:-2], "--memory", "500MB", "--drift-correction", "none", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bank"] == 8 * 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "1MB"), "memory 1MB is too small"),
        (("--memory", "much"), "memory 'much' is not a size; write it as 11GB"),
        (("--memory", "1GB", "--model", "no/such/folder"), "no model can be read from no/such/folder"),
        (("--memory", "1GB", "--bank", "large"), "bank='large' is not of type int, nor auto"),
        (("--memory", "1GB", "--drift-correction", "both"), "drift_correction='both' is unknown; choose one of auto, mean+zero-sum, mean"),
        (("--memory", "1GB", "--n-local", "5"), "n_total=32 is not a multiple of n_local=5; use n_total=30"),
    ],
)
def test_command_line_refuses_in_one_line(monkeypatch, capsys, model_folder: str, options: tuple[str, ...], message: str) -> None:
    assert run_cli(monkeypatch, "plan", "--model", model_folder, "--seq", "32", "--n-total", "32", "--bank", "16", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.skipif(not MINILM.exists(), reason=f"{MINILM.name} is not among the shared models")
def test_a_model_folder_is_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(monkeypatch, "plan", "--model", str(MINILM), "--memory", "2GB", "--seq", "128", "--n-local", "16", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert 1.0e9 < told["peak_bytes"] < 1.5e9


@pytest.mark.parametrize(("bank", "resolved"), [(16, 16), ("auto", 16)])  # 48 rows: the micro-batch of 16 decides
def test_train_plans_n_local_and_resumes_with_it(
    monkeypatch: pytest.MonkeyPatch, model_folder: str, jsonl: Any, tmp_path: Path, bank: int | str, resolved: int
) -> None:
    from contaccum.config import AUTO, load_config

    options = {"data": jsonl(48), "model": model_folder, "output": tmp_path / "run", "n_total": 16, "bank": bank, "max_seq_length": 32}
    options |= {"n_local": "auto", "memory": "500MB", "max_updates": 4, "save_every": 2, "diagnose_every": 0}
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert run_cli(monkeypatch, "train", *arguments) == 0
    stored = load_config(tmp_path / "run" / "config.yaml", {})
    assert (stored.n_local, stored.bank, stored.drift_correction) == (16, resolved, "mean+zero-sum")
    for made in ("summary.json", "model", "checkpoints/checkpoint-4"):  # as if it had been killed
        shutil.move(tmp_path / "run" / made, tmp_path / made.replace("/", "-"))
    assert run_cli(monkeypatch, "train", *arguments, "--resume") == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_at_update"] == 2

    config = load_config(None, {"n_local": "auto"})
    assert config.n_local == AUTO
    with pytest.raises(ValueError, match="n_local=auto needs a memory"):
        planned(config, 0)
    with pytest.raises(ValueError, match="whole_updates"):
        planned(replace(config, whole_updates=True), 0)
    with pytest.raises(ValueError, match="n_local='many' is not of type int"):
        load_config(None, {"n_local": "many"})


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


def test_verification_goes_down_or_up_to_the_largest_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is made up: it runs what it can hold."""
    config = asked("300MB")
    for room in (3, 24, 48):
        tried = []

        def attempt(config: TrainConfig, *args: Any, room: int = room, tried: list[int] = tried) -> Measured | None:
            tried.append(config.n_local)
            return Measured(config.n_local, 1, 1, 1.0) if config.n_local <= room else None

        monkeypatch.setattr("contaccum.plan.measure.try_in_process", attempt)
        planner = Planner(Predictor(config), 300_000_000)
        found = planner.largest(config)
        assert found is not None
        checked = verified(Plan(found.config, 300_000_000, found.prediction), planner)
        largest = max(n for n in planner.sizes(config) if n <= room and n <= max(tried))
        assert checked.config.n_local == checked.measured.n_local == largest
        assert checked.prediction == planner.predict(checked.config).prediction
        assert len(tried) == len(set(tried)) <= 5


@pytest.mark.gpu
def test_prediction_on_this_gpu() -> None:
    config = TrainConfig(model=BertConfig(num_hidden_layers=4), n_total=32, n_local=16, bank=256, max_seq_length=128, hard_negatives=1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    predicted, measured = Predictor(config).predict(config), measure(config)
    assert 0.95 <= predicted.peak_bytes / measured.peak_bytes <= 1.10


@pytest.mark.gpu
def test_plan_is_verified_on_this_gpu(tmp_path: Path) -> None:
    write_model(tmp_path, BertConfig(num_hidden_layers=2))
    config = TrainConfig(model=str(tmp_path), memory="2GB", n_total=64, bank=64, max_seq_length=128, hard_negatives=0)
    found = plan(config, verify=True, alternatives=False)
    assert found.measured is not None
    assert found.measured.peak_bytes <= 0.95 * 2e9
