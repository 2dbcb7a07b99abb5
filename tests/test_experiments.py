"""Every experiment of the paper end to end at scale tiny, in real processes; resumed, failed and judged; figures that hold their data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from contaccum.cli import app
from contaccum.experiments import processes
from contaccum.experiments.figures import mass_per_passage
from contaccum.experiments.grid import DATASETS, SCALES
from contaccum.experiments.pretrain import shown
from contaccum.experiments.request import EXPERIMENTS, Request, planned
from contaccum.experiments.runner import reproduce
from contaccum.experiments.tables import table_of
from contaccum.methods.table import METHODS
from contaccum.report.tables import as_markdown, plain_table

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of all."""
    result = {}
    for name in EXPERIMENTS:
        seeds = (0, 1) if name == "simmass" else (0,)
        result[name] = reproduce(Request(name, folder / name, scale="tiny", seeds=seeds, jobs=0), say=lambda line: None)
    return result


def results(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name / "results.json").read_text())


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_ends_with_results_table_and_figure(found, folder: Path, name: str) -> None:
    assert found[name]["failed"] == []
    result = results(folder, name)
    assert result["experiment"] == name
    assert result["provenance"]["versions"]["torch"]
    groups = list(dict.fromkeys(cell.group for cell in planned(Request(name, folder / name, scale="tiny"))))
    assert [row["group"] for row in result["rows"]] == groups
    assert (folder / name / "table.md").read_text() == as_markdown(plain_table(found[name]["table"]))
    assert len((folder / name / "table.md").read_text().splitlines()) == 2 + len(groups)
    names = ["results.json", "table.md", f"{name}.png", f"{name}.svg"]
    assert found[name]["files"] == [folder / name / file for file in names]
    assert all(file.stat().st_size > 100 for file in found[name]["files"])


def test_the_papers_cells_keep_the_papers_bank(tmp_path: Path) -> None:
    """Whatever the default is: only cells that say so are corrected."""
    for name, scale in ((name, scale) for name in EXPERIMENTS for scale in SCALES):
        for cell in planned(Request(name, tmp_path, scale=scale)):
            if cell.kind != "train" or not METHODS[cell.options["method"]].bank:
                continue
            ours = "mean+zero-sum" if "zero-sum" in cell.group else "mean" if re.search(" mean(,|$)", cell.group) else None
            assert cell.options["drift_correction"] == ours, cell.group
            assert isinstance(cell.options["bank"], int)


def test_speed_has_a_large_bank_that_bank_size_has_not(tmp_path: Path) -> None:
    for scale in ("small", "paper"):
        speed, quality = (planned(Request(name, tmp_path, scale=scale)) for name in ("speed", "bank-size"))
        assert 8192 in {cell.facts["bank"] for cell in speed}
        assert 8192 not in {cell.facts["bank"] for cell in quality}
    assert {(cell.options["rounds"], cell.options["updates"]) for cell in planned(Request("speed", tmp_path, scale="small"))} == {(3, 1)}


def test_a_way_that_ran_out_of_memory_is_told_and_not_drawn() -> None:
    def way(name: str, seconds: float | None) -> dict[str, Any]:
        ratio = None if seconds is None else 2.0
        return {"way": name, "seconds": seconds, "time_over_gradaccum": ratio, "failed": "out of memory" if seconds is None else None}

    times = {8: (0.1, 0.3, None), 16: (0.2, None, None)}
    rows = [
        {"group": f"N_total = {n}", "facts": {"N_total": n, "bank": 16}, "ways": [way(name, s) for name, s in zip("abc", of, strict=True)]}
        for n, of in times.items()
    ]
    assert line_data(EXPERIMENTS["speed"].draw(rows, "")) == {"a": ([8, 16], [0.1, 0.2]), "b": ([8], [0.3])}
    assert table_of(rows)[1:] == [
        ["N_total = 8", "100.0 ms (x2.00)", "300.0 ms (x2.00)", "out of memory"],
        ["N_total = 16", "200.0 ms (x2.00)", "out of memory", "out of memory"],
    ]


def test_metrics_are_those_of_the_cells_run_files(found, folder: Path) -> None:
    from contaccum.retrieval.run_metrics import evaluate_run

    for row in found["main"]["rows"]:
        (cell,) = [c for c in planned(Request("main", folder / "main", scale="tiny")) if c.group == row["group"]]
        run = folder / "main" / "cells" / cell.name / "run"
        judged = evaluate_run(run / "test.trec", qrels=folder / "main" / "data" / "harvest", split="test", metrics=["MRR@10"])
        assert row["mean"]["MRR@10"] == pytest.approx(judged["metrics"]["MRR@10"])
        assert 0 < row["mean"]["MRR@10"] <= 1
    assert len({row["mean"]["MRR@10"] for row in found["main"]["rows"]}) > 3, "all methods alike: nothing was varied"


def line_data(figure: Any) -> dict[str, tuple[list[float], list[float]]]:
    (axes,) = figure.axes
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_bars_are_the_means(found) -> None:
    rows = found["main"]["rows"]
    figure = EXPERIMENTS["main"].draw(rows, "MRR@10")
    (axes,) = figure.axes
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([100 * row["mean"]["MRR@10"] for row in rows])


def test_lines_of_bank_size_are_the_means(found) -> None:
    drawn = line_data(EXPERIMENTS["bank-size"].draw(found["bank-size"]["rows"], "MRR@10"))
    scale = SCALES["tiny"]
    assert set(drawn) == {f"N_total = {total}" for total in scale.totals}
    for row in found["bank-size"]["rows"]:
        x, y = drawn[f"N_total = {row['facts']['N_total']}"]
        assert y[x.index(row["facts"]["bank"])] == pytest.approx(100 * row["mean"]["MRR@10"])


def test_curves_of_gradnorm_are_the_diagnostics(found, folder: Path) -> None:
    drawn = line_data(EXPERIMENTS["gradnorm"].draw(found["gradnorm"]["rows"], ""))
    for row in found["gradnorm"]["rows"]:
        (cell,) = [c for c in planned(Request("gradnorm", folder, scale="tiny")) if c.group == row["group"]]
        lines = (folder / "gradnorm" / "cells" / cell.name / "run" / "diagnostics.jsonl").read_text().splitlines()
        ratios = [json.loads(line)["grad_norm_ratio"] for line in lines]
        assert drawn[row["group"]][1] == pytest.approx(ratios)
    stops = {
        json.loads((folder / "gradnorm" / "cells" / f"query-bank-off-at-{share}-seed0" / "cell.json").read_text())["options"][
            "query_bank_stop_share"
        ]
        for share in ("25", "50", "75")
    }
    assert stops == {0.25, 0.5, 0.75}


def test_the_figure_of_memory_is_its_bytes(found) -> None:
    rows = found["memory"]["rows"]
    drawn = line_data(EXPERIMENTS["memory"].draw(rows, ""))
    keys = {"vectors, predicted": "predicted_bytes", "bank, seen": "bank_bytes", "whole score matrix": "matrix_bytes"}
    assert set(drawn) == set(keys)
    for name, key in keys.items():
        assert dict(zip(*drawn[name], strict=True)) == pytest.approx({r["facts"]["bank"]: r["values"][key] / 1e6 for r in rows})


def test_the_figure_of_simmass_is_the_mean_over_seeds_and_their_spread(found) -> None:
    figure = EXPERIMENTS["simmass"].draw(found["simmass"]["rows"], "")
    drawn, bands = line_data(figure), figure.axes[0].collections
    assert len(bands) == len(found["simmass"]["rows"])
    for row, band in zip(found["simmass"]["rows"], bands, strict=True):
        one, other = (mass_per_passage(d["sim_mass"]) for d in row["diagnostics"])
        ages = sorted(set(one) & set(other))
        assert drawn[row["group"]] == (ages, pytest.approx([(one[age] + other[age]) / 2 for age in ages]))
        edges = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices}
        assert {(age, round(values[age], 6)) for values in (one, other) for age in ages} <= edges


def test_error_bars_are_the_deviations() -> None:
    rows = [
        {"group": name, "facts": {"bank": bank, "N_total": 8}, "mean": {"MRR@10": mean}, "deviation": {"MRR@10": deviation}}
        for name, bank, mean, deviation in (("a", 0, 0.5, 0.01), ("b", 8, 0.25, 0.03))
    ]
    (axes,) = EXPERIMENTS["main"].draw(rows, "MRR@10").axes
    segments = [segment for collection in axes.collections for segment in collection.get_segments()]
    assert sorted(tuple(round(x, 6) for x, _ in segment) for segment in segments) == [(22.0, 28.0), (49.0, 51.0)]
    figure = EXPERIMENTS["bank-size"].draw(rows, "MRR@10")
    (band,) = figure.axes[0].collections
    assert {(0, 49.0), (0, 51.0), (8, 22.0), (8, 28.0)} <= {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices}


def test_mass_by_age_is_per_passage_and_relative() -> None:
    measured = [{"by_age": [{"age_updates": 0, "mass": 0.2, "passages": 4}, {"age_updates": 1, "mass": 0.2, "passages": 8}]}]
    assert mass_per_passage(measured) == {0: 1.0, 1: 0.5}
    measured[0]["by_age"] += [{"age_updates": 2, "mass": 0.4, "passages": 16}, {"age_updates": 3, "mass": 0.4, "passages": 1}]
    assert mass_per_passage(measured) == {0: 1.0, 1: 0.5, 2: 0.5}, "too few passages of an age tell nothing"


def test_seeds_are_averaged_and_shown(found, folder: Path) -> None:
    row = found["simmass"]["rows"][0]
    assert row["seeds"] == [0, 1]
    assert len(row["diagnostics"]) == 2
    assert all(d["sim_mass"] for d in row["diagnostics"])


def test_memory_is_as_predicted(found) -> None:
    for row in found["memory"]["rows"]:
        values = row["values"]
        assert values["vector_bytes"] == values["predicted_bytes"] == row["facts"]["bank"] * 3 * 32 * 4
        assert values["bank_bytes"] >= values["vector_bytes"]


def test_pre_training_is_judged_before_and_after_fine_tuning_from_its_model(found, folder: Path) -> None:
    from contaccum.retrieval.run_metrics import evaluate_run

    rows = {row["group"]: row for row in found["pretrain"]["rows"]}
    samples = set()
    for cell in planned(Request("pretrain", folder / "pretrain", scale="tiny")):
        spent, row = folder / "pretrain" / "cells" / cell.name, rows[cell.group]
        if cell.kind == "pretrain":
            before = yaml.safe_load((spent / "pretraining" / "config.yaml").read_text())
            assert (before["method"], before["lr"]) == (cell.options["method"], 1e-3)
            assert before["data"] == str(folder / "pretrain" / "data" / "documents")
            assert row["seconds"] > 0
            assert f"{row['cpu_seconds']:,.0f}" in {line[0]: line for line in found["pretrain"]["table"]}[cell.group]
            samples.add(before["max_updates"] * before["n_total"])
        tuned = yaml.safe_load((spent / "run" / "config.yaml").read_text())
        start = folder / "pretrain" / "data" / "encoder" if cell.kind == "fine-tune" else spent / "pretraining" / "model"
        assert (tuned["method"], tuned["model"]) == ("gradcache", str(start))
        for when, run in (("zero-shot", "untrained" if cell.kind == "fine-tune" else "pretraining"), ("fine-tuned", "run")):
            judged = evaluate_run(spent / run / "test.trec", qrels=folder / "pretrain/data/harvest", split="test", metrics=["MRR@10"])
            assert row["mean"][f"{when} MRR@10"] == pytest.approx(judged["metrics"]["MRR@10"])
    assert samples == {32}, "not as many samples for each"


def test_pre_training_on_as_many_samples_as_are_asked_for(tmp_path: Path) -> None:
    cells = planned(Request("pretrain", tmp_path, scale="tiny", pretraining_samples=64))
    assert {cell.options["max_updates"] * cell.options.get("n_total", 8) for cell in cells if cell.kind == "pretrain"} == {64}
    with pytest.raises(ValueError, match="samples 9 fill no update of 16; give 16 or more"):
        Request("pretrain", tmp_path, scale="tiny", pretraining_samples=9).check()
    with pytest.raises(ValueError, match="has no meaning for main"):
        Request("main", tmp_path, pretraining_samples=64).check()


def test_pre_training_shows_the_headline_of_every_data_set() -> None:
    for name, dataset in DATASETS.items():
        metrics = ("Top@1", "Top@5", "Top@20", "Top@100") if dataset.form == "dpr" else dataset.metrics
        assert dataset.headline in shown(metrics), name


def test_finished_cells_are_not_run_again(found, folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in (folder / "main").rglob("result.json")}
    said: list[str] = []
    again = reproduce(Request("main", folder / "main", scale="tiny"), say=said.append)
    assert {file: file.stat().st_mtime_ns for file in (folder / "main").rglob("result.json")} == before
    assert again["rows"] == found["main"]["rows"]
    assert f"{len(before)} finished before" in said[0]


def test_a_failed_cell_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    request = Request("simmass", tmp_path, scale="tiny", seeds=(0, 1))
    reproduce(replace(request, jobs=0), say=lambda line: None)
    first, second, *_ = [tmp_path / "cells" / cell.name for cell in planned(request)]
    (first / "result.json").unlink()
    (second / "result.json").unlink()
    (first / "run" / "summary.json").unlink()
    (first / "run" / "config.yaml").write_text("lr: nonsense\n")
    said: list[str] = []
    found = reproduce(request, say=said.append)
    assert found["failed"] == [first.name]
    assert [(row["group"], row["seeds"]) for row in found["rows"]] == [("contaccum", [1]), ("contaccum mean", [0, 1])], "not in order"
    assert any("nonsense" in line for line in said)


MEMORY_CELL = {"kind": "memory", "seed": 0, "options": {"bank": 16, "n": 4, "width": 8, "hard_negatives": 1}}


def written(folder: Path, cell: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "cell.json").write_text(json.dumps(cell))
    return folder


def test_a_cell_that_fails_or_cannot_be_started_does_not_hold_up_the_grid(tmp_path: Path) -> None:
    folders = [(name, written(tmp_path / name, MEMORY_CELL)) for name in "abc"]
    (tmp_path / "a" / "cell.json").write_text(json.dumps({**MEMORY_CELL, "options": {}}))
    (tmp_path / "b" / "cell.log").mkdir()
    ended = {name: good for name, good, _ in processes.in_processes(folders, 2)}
    assert ended == {"a": False, "b": False, "c": True}
    assert "KeyError" in (tmp_path / "a" / "cell.log").read_text()
    assert (tmp_path / "c" / "cell.log").read_text() == ""
    assert json.loads((tmp_path / "c" / "result.json").read_text())["predicted_bytes"] == 16 * 3 * 8 * 4


def test_a_finished_cell_of_other_options_is_not_taken_for_this_one(found: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"was computed with lr=0\.001, not 0\.5; use another --output"):
        reproduce(Request("main", folder / "main", scale="tiny", settings=(("lr", 0.5),)), say=lambda line: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "small"}, "was begun with scale='tiny', not 'small'"),
        ({"dataset": "acl"}, "was begun with dataset='harvest', not 'acl'"),
        ({"model": "other"}, "was begun with model=None, not 'other'"),
        ({"data": Path("/elsewhere")}, "was begun with data=None, not '/elsewhere'"),
        ({"settings": (("weight_decay", 0.5),)}, "was begun with settings={}, not {'weight_decay': 0.5}"),
    ],
)
def test_a_folder_of_another_request_is_refused(changes: dict[str, Any], message: str, found: dict[str, Any], folder: Path) -> None:
    """With cells that are not there yet, so that none is finished with other options."""
    request = Request("main", folder / "main", **{"scale": "tiny", "seeds": (7,), **changes})
    with pytest.raises(ValueError, match=re.escape(message)):
        reproduce(request, say=lambda line: None)


def running() -> dict[int, int]:
    """Processes that have not ended -> their parents."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                found[int(process.name)] = int(parent)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_cell_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    """Killed alone, and run again: no other process writes to the folder."""
    words = [sys.executable, "-m", "contaccum", "reproduce", "simmass", "--scale", "tiny", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = tmp_path / "out" / "cells" / "contaccum-seed0" / "cell.log"
    until = time.monotonic() + 120
    while not log.exists() and time.monotonic() < until:
        time.sleep(0.05)
    servers = {pid for pid, parent in running().items() if parent == process.pid}
    assert servers
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while servers & running().keys() and time.monotonic() < until:
        time.sleep(0.1)
    assert not servers & running().keys()


def test_a_killed_grid_goes_on(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "contaccum", "reproduce", "simmass", "--scale", "tiny", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    first = tmp_path / "out" / "cells" / "contaccum-seed0" / "result.json"
    until = time.monotonic() + 120
    while not first.exists() and time.monotonic() < until:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    stamp = first.stat().st_mtime_ns
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert first.stat().st_mtime_ns == stamp
    assert len(results(tmp_path, "out")["rows"]) == 2
    assert done.stdout.splitlines()[-1].split() == [
        str(tmp_path / "out" / n) for n in ("results.json", "table.md", "simmass.png", "simmass.svg")
    ]


def test_dry_run_lists_the_cells_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["reproduce", "main", "--scale", "tiny", "--dry-run", "--output", str(tmp_path / "out")], standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == [cell.name for cell in planned(Request("main", tmp_path, scale="tiny"))]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dataset", ["acl", "squad-wiki"])
def test_other_data_sets(dataset: str, tmp_path: Path) -> None:
    if not (SHARED / "data" / dataset).exists():
        pytest.skip(f"the data set {dataset} is not here")
    data = SHARED / "data" / dataset
    request = Request("ablation", tmp_path, dataset, data, "tiny", jobs=0, only=("no past encoder",))
    found = reproduce(request, say=lambda line: None)
    assert found["failed"] == []
    numbers = {row["facts"]["hard negatives"] for row in found["rows"]}
    assert numbers == ({0, 1} if dataset == "squad-wiki" else {0})
    assert all(metric.startswith("Top@") for metric in found["rows"][0]["mean"]) == (dataset == "squad-wiki")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "experiment 'nothing' is unknown"),
        (["main", "--dataset", "x"], "dataset 'x' is unknown"),
        (["main", "--scale", "x"], "scale 'x' is unknown"),
        (["main", "--seeds", "a"], "--seeds 'a' must be"),
        (["main", "--seeds", "0,,1"], "--seeds '0,,1' must be"),
        (["memory", "--set", "bank=99"], "--set bank has no meaning for memory"),
        (["speed", "--model", "nowhere"], "--model has no meaning for speed"),
        (["gradnorm", "--set", "tied=true"], "--set tied=true has one tower"),
        (["simmass", "--set", "diagnose_every=0"], "--set diagnose_every=0 leaves simmass nothing"),
        (["main", "--set", "lr"], "--set 'lr' must be NAME=VALUE"),
        (["main", "--set", "lr=fast"], "lr='fast' is not"),
        (["main", "--set", "lr=["], "holds a value that cannot be read"),
        (["main", "--set", "method=dpr"], "--set method is the experiment's own"),
        (["main", "--set", "drift_correction=mean"], "--set drift_correction would change nothing"),
        (["main", "--dataset", "acl"], "acl needs --data"),
        (["main", "--only", "nobody"], "--only 'nobody' names no cell"),
        (["main", "--set", "bank=auto"], "--set bank=auto is no bank of the paper's"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        app(["reproduce", *words, "--output", str(tmp_path / "out")], standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no experiment; use another --output"):
        reproduce(Request("memory", tmp_path, scale="tiny", jobs=0), say=lambda line: None)
    assert [file.name for file in tmp_path.iterdir()] == ["table.md"]
