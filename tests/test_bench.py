"""The bench: rows for every case, out of memory included, and towers left as they were."""

from __future__ import annotations

import json
import os
import platform
import shlex
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmark_files import load_benchmark
from contaccum import ContAccumLoss, DualBankInfoNCE
from contaccum.cli import main
from contaccum.cli.bench import table
from contaccum.experiments import bench
from contaccum.experiments.bench import Case, measure, measure_cases, operations
from contaccum.experiments.grid import SIZES
from contaccum.experiments.workloads import VARIANTS, OfficialLoss, Workload, fill_bank, random_features, random_lengths
from contaccum.towers.speed import UNPADDED, compile_towers, encoders
from contaccum.training.diagnostics import Diagnostics

SMALL = Workload(n_total=8, n_local=4, bank=16, query_tokens=6, passage_tokens=12)
ONCE = {"rounds": 1, "updates": 1, "device": "cpu"}


def test_ways_take_turns_on_one_model(monkeypatch) -> None:
    monkeypatch.setattr(bench, "_bf16_peak", lambda: 1e12)
    ways = ["gradaccum", "contaccum", "contaccum (default)", "gradcache"]
    rows = measure("tiny", SMALL, ways, **ONCE)
    assert [row["way"] for row in rows] == ways
    assert rows[0]["time_over_gradaccum"] == 1.0
    for row in rows:
        assert row["samples_per_second"] == pytest.approx(8 / row["seconds"])
        assert 0 < row["peak_share"] < 1


def test_the_papers_bank_and_ours_are_measured_apart(tiny_encoder) -> None:
    corrections = {
        name: VARIANTS[name].build(tiny_encoder(), SMALL).criterion.drift_correction for name in VARIANTS if "contaccum" in name[:9]
    }
    assert corrections == {"contaccum": None, "contaccum (default)": DualBankInfoNCE().drift_correction}


def test_filling_a_bank_is_not_timed(tiny_encoder, tmp_path) -> None:
    """`benchmarks/diagnostics.py --every 1` fills it when the first update is due already."""
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=16)
    diagnostics = Diagnostics(tmp_path / "diagnostics.jsonl", loss, every=1)
    fill_bank(loss, model, SMALL)
    assert len(loss.criterion.bank) == 16
    assert diagnostics.watch._marks == []


def test_out_of_memory_is_a_row_and_the_others_go_on(monkeypatch) -> None:
    official = OfficialLoss.forward

    def forward(self, features, labels=None):
        if len(features[0]["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return official(self, features, labels)

    monkeypatch.setattr(OfficialLoss, "forward", forward)
    rows = measure("tiny", SMALL, ["official contaccum", "gradaccum"], rounds=2, updates=1, device="cpu")
    assert [row["failed"] for row in rows] == ["out of memory", None]
    assert rows[0]["seconds"] is None
    assert "out of memory" in table(rows)[1]
    assert len(rows[1]["all_seconds"]) == 2


def test_towers_that_cannot_be_compiled_are_a_row_and_the_others_go_on(monkeypatch) -> None:
    def broken(graph, inputs):
        raise TypeError("no shape for this kernel")

    monkeypatch.setattr(bench, "compile_towers", partial(compile_towers, backend=broken))
    cases = [Case("gradaccum", replace(SMALL, compile=True)), Case("gradaccum", SMALL)]
    rows = bench.measure_cases("tiny", cases, rounds=1, updates=1, device="cpu")
    assert rows[0]["failed"].startswith("not compiled (BackendCompilerFailed: ")
    assert rows[1]["failed"] is None
    assert rows[1]["seconds"] > 0


def test_fast_towers_are_plain_again_after_their_turn(monkeypatch) -> None:
    seen: list[tuple[bool, bool, str]] = []
    models = []
    build, update = bench.random_encoder, bench.make_update

    def remember(size, tokens):
        models.append(build(size, tokens))
        return models[-1]

    def look(model, *rest):
        encoder = next(encoders(model))
        layer = encoder.encoder.layer[0]
        seen.append((layer._compiled_call_impl is not None, layer.gradient_checkpointing, encoder.config._attn_implementation))
        update(model, *rest)

    monkeypatch.setattr(bench, "random_encoder", remember)
    monkeypatch.setattr(bench, "make_update", look)
    monkeypatch.setattr(bench, "compile_towers", partial(compile_towers, backend="eager"))
    fast = Workload(**{**vars(SMALL), "compile": True, "unpad": True, "lengths": "varied", "checkpointing": True})
    measure_cases("tiny", [Case("contaccum", fast), Case("gradaccum", SMALL)], **ONCE)
    assert seen == [(True, True, UNPADDED)] * 3 + [(False, False, "sdpa")] * 3
    assert all("forward" not in vars(encoder) and not encoder.is_gradient_checkpointing for encoder in encoders(models[0]))


@pytest.mark.parametrize("way", ["gradaccum", "gradcache", "CachedMultipleNegativesRankingLoss"])
def test_every_pass_is_in_half_precision_that_of_the_backward_too(way, monkeypatch) -> None:
    """As in a trainer, where accelerate wraps the model's forward; only then is GradCache's second pass as fast as it can be."""
    seen, build = [], bench.random_encoder

    def watched(size, tokens):
        model = build(size, tokens)
        dense = next(encoders(model)).encoder.layer[0].intermediate.dense
        dense.register_forward_hook(lambda module, given, found: seen.append(found.dtype))
        return model

    monkeypatch.setattr(bench, "random_encoder", watched)
    measure("tiny", Workload(**{**vars(SMALL), "precision": "bf16"}), [way], **ONCE)
    assert seen
    assert set(seen) == {torch.bfloat16}


def test_varied_lengths_are_the_same_for_every_way_and_padded_to_the_longest() -> None:
    work = Workload(**{**vars(SMALL), "lengths": "varied", "n_total": 64})
    lengths = random_lengths(work, 0)
    assert torch.equal(lengths, random_lengths(work, 0))
    assert not torch.equal(lengths, random_lengths(work, 1))
    assert (lengths.amin(0).tolist(), lengths.amax(0).tolist()) == ([1, 3, 3], [6, 12, 12])
    column = random_features(torch.nn.Module.__new__(_OnCPU), "document", lengths[:4, 1])
    assert column["attention_mask"].sum(1).tolist() == lengths[:4, 1].tolist()
    assert column["input_ids"].shape[1] == lengths[:4, 1].max()


class _OnCPU(torch.nn.Module):
    device = torch.device("cpu")


def test_operations_are_six_per_weight_and_token_and_a_third_more_by_gradcache() -> None:
    layers, width, _ = SIZES["bert-base"]
    work = Workload(n_total=2, query_tokens=32, passage_tokens=256)
    tokens, squares = 2 * (32 + 512), 2 * (32**2 + 2 * 256**2)
    expected = 6 * 12 * layers * width**2 * tokens + 12 * layers * width * squares
    assert operations("bert-base", Case("contaccum", work), 0) == expected
    assert operations("bert-base", Case("gradcache", work), 0) == pytest.approx(4 / 3 * expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": "some"}, "lengths 'some' is unknown; choose one of fixed, varied"),
        ({"n_local": 3}, "n_total=8 is not a multiple of n_local=3"),
        ({"n_total": 0}, "n_total=0 must be at least 1"),
        ({"hard_negatives": -1}, "hard_negatives=-1 must be at least 0"),
    ],
)
def test_mistakes_are_one_clear_line(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        measure("tiny", Workload(**{**vars(SMALL), **changes}), ["gradaccum"], **ONCE)


def test_command_writes_rows_with_their_provenance(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "rows.json"
    words = "--model tiny --n-total 4 --n-local 2 --bank 8 --query-tokens 4 --passage-tokens 8 --rounds 1 --updates 1 --unpad"
    monkeypatch.setattr("sys.argv", ["contaccum", "bench", *words.split(), "--variants", "gradaccum", "--output", str(file)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    content = json.loads(file.read_text())
    assert content["rows"][0]["unpad"] is True
    assert content["provenance"]["versions"]["torch"]
    assert "fp32 unpadded" in capsys.readouterr().out


def test_a_shared_file_says_what_figures_depend_on_and_names_nobody(tmp_path, monkeypatch, capsys) -> None:
    def run(words: list[str], file: Path) -> str:
        monkeypatch.setattr("sys.argv", ["contaccum", *words, "--share", str(file)])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return file.read_text()

    private = tmp_path / "somebody"
    private.mkdir()
    words = "bench --model tiny --n-total 8 --n-local 4 --bank 16 --query-tokens 6 --passage-tokens 12 --rounds 1 --updates 1"
    variants = ["--variants", "gradaccum,contaccum (default)", "--output", str(private / "all.json")]
    text = run([*words.split(), *variants], private / "share.json")
    posted = json.loads(text)
    assert [row["way"] for row in posted["rows"]] == ["gradaccum", "contaccum (default)"]
    assert posted["versions"]["torch"] == version("torch")
    assert not any(name in text for name in (str(tmp_path), "somebody", platform.node(), os.path.expanduser("~")))
    again = run(shlex.split(posted["command"])[1:], tmp_path / "again.json")
    assert json.loads(again)["command"] == posted["command"], "the command measures the same"

    monkeypatch.setattr("sys.argv", ["other_gpus.py", str(private / "share.json")])
    capsys.readouterr()
    load_benchmark("other_gpus").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {9}
