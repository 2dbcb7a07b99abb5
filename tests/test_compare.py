"""`compare`: from a table to a verdict; killed anywhere it goes on to the same figures."""

from __future__ import annotations

import html
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("bm25s", reason="needs contaccum[mine]")

from commands import Commands, commands
from compared import OPTIONS, table
from conftest import write_beir
from contaccum import compare
from contaccum.cli import app
from contaccum.common.errors import FailedRunsError
from contaccum.comparison.compare import BEFORE, WORDS
from contaccum.comparison.source import Columns, Prepared, prepared
from contaccum.comparison.watch import Watch, Work
from contaccum.report.folders import read_run_folder

__all__ = ["commands"]


@pytest.fixture(scope="module")
def finished(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[str]]:
    folder, lines = tmp_path_factory.mktemp("compare"), list[str]()
    return folder, compare(table(folder), model=model_folder, output=folder / "out", **OPTIONS, say=lines.append), lines


def test_all_are_judged_on_the_same_and_the_page_says_which_to_use(finished: tuple[Path, Any, list[str]]) -> None:
    folder, found, lines = finished
    names = [row.name for row in found.summary.rows]
    assert names == ["gradaccum", "gradcache", "contaccum", BEFORE, WORDS]
    queries = [set(row.per_query("MRR@10")) for row in found.summary.rows]
    assert all(one == queries[0] and len(one) == 30 for one in queries)
    metrics = {row.name: row.metrics["MRR@10"] for row in found.summary.rows}
    assert metrics["contaccum"] != metrics[BEFORE]  # it was trained
    assert [row.negatives_per_query for row in found.summary.rows[:2]] == [3, 15]
    configs = [row.config for row in found.summary.rows if row.trained]
    assert all(c["n_total"] == 16 and c["n_local"] == 4 and c["tied"] and c["similarity"] == "cosine" for c in configs)
    page = found.page.read_text(encoding="utf-8")
    assert found.headline in page.replace("&#x27;", "'")
    for name in names:
        assert f'<th scope="row">{name}</th>' in page
    assert "dev-mrr-10" in {file.stem for file in (folder / "out" / "report-plots").iterdir()}
    assert any(line.startswith("columns: query = 'Question', positive = 'answer' (by name; not used: id)") for line in lines)
    assert not list((folder / "out").glob("cells/*/run/checkpoints"))
    assert json.loads((folder / "out" / "results.json").read_text())["headline"] == "MRR@10"
    assert found.as_json()["headline"] == found.headline
    assert found.as_json()["metric"] == "MRR@10"
    assert "255 rows x 1 epoch, 16 samples an update, 4 of them in memory at once, 16 tokens of a text, lr 0.01" in found.training[1]
    assert all(html.escape(line) in page for line in found.training), "the page says what was trained"
    assert found.command is not None
    assert html.escape(found.command) in page.replace("<span>", "").replace("</span>", "")  # of options, not broken within


def test_run_again_nothing_is_trained_and_the_figures_are_the_same(finished: tuple[Path, Any, list[str]], model_folder: str) -> None:
    folder, found, _ = finished
    results = {path: path.stat().st_mtime_ns for path in folder.glob("out/cells/*/result.json")}
    assert len(results) == 5
    again = compare(folder / "pairs.csv", model=model_folder, output=folder / "out", **OPTIONS, say=lambda line: None)
    assert {path: path.stat().st_mtime_ns for path in results} == results
    assert again.as_json() == found.as_json()
    with pytest.raises(ValueError, match="was begun with n_total=16, not 8"):
        compare(folder / "pairs.csv", model=model_folder, output=folder / "out", **{**OPTIONS, "n_total": 8})


def test_seeds_and_methods_are_added_to_what_is_there(model_folder: str, tmp_path: Path) -> None:
    file, options = table(tmp_path, 120), {**OPTIONS, "model": model_folder, "output": tmp_path / "out", "say": lambda line: None}
    compare(file, **options, methods=["gradaccum"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/cells/*/result.json")}
    found = compare(file, **options, methods=["gradaccum", "contaccum"], seeds=[42, 43])
    assert [[run.seed for run in row.runs] for row in found.summary.rows if row.trained] == [[42, 43], [42, 43]]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    changed = {"gradaccum": {"method": "gradaccum", "lr": 1.0}}
    with pytest.raises(ValueError, match=r"was begun with lr=None, not 1\.0"):
        compare(file, **options, configurations=changed)


def test_data_that_has_changed_is_refused(finished: tuple[Path, Any, list[str]], model_folder: str, tmp_path: Path) -> None:
    folder, _, _ = finished
    shutil.copytree(folder / "out" / "data", tmp_path / "data")
    data = prepared(folder / "pairs.csv", tmp_path / "data", Columns())
    assert data.rows == 255
    other = tmp_path / "pairs.csv"
    shutil.copy2(folder / "pairs.csv", other)
    with pytest.raises(ValueError, match=r"pairs\.csv has changed since .* was begun; use another --output"):
        prepared(other, tmp_path / "data", Columns())
    (tmp_path / "more").mkdir()
    shutil.copy(other, tmp_path / "more" / "pairs.csv")
    content = prepared(tmp_path / "more" / "pairs.csv", tmp_path / "made", Columns())
    with open(tmp_path / "more" / "pairs.csv", "a") as lines:
        lines.write("999,one more,and its answer\n")
    with pytest.raises(ValueError, match="has changed"):
        prepared(tmp_path / "more" / "pairs.csv", tmp_path / "made", Columns())
    assert content.passages == 300


def test_an_output_within_the_data_s_folder_is_no_change(tmp_path: Path) -> None:
    queries = [f"query {i}" for i in range(60)]
    data = write_beir(tmp_path / "beir", queries, [f"text {i}" for i in range(60)], train=range(60))
    first = prepared(data, data / "out" / "data", Columns())
    assert prepared(data, data / "out" / "data", Columns()) == first


def test_the_winner_is_trained_on_everything(finished: tuple[Path, Any, list[str]], tmp_path: Path) -> None:
    from contaccum.comparison.outcome import command

    folder, found, _ = finished
    options = dict(found.summary.rows[2].config) | {"method": "contaccum"}
    kept = {name: options[name] for name in ("model", "method", "tied", "pooling", "similarity", "n_total", "n_local", "epochs", "lr")}
    words = command(Prepared(str(folder / "out" / "data"), 1, 1, 1), kept | {"max_seq_length": 16}, tmp_path / "final").split()
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "final" / "summary.json").read_text())["updates"] == -(-300 // 16)


@pytest.mark.parametrize(
    ("words", "free", "code", "message"),
    [
        (["--quiet"], 10**12, 1, "failed: contaccum-seed42, "),
        (["--json"], 10**12, 1, "failed: contaccum-seed42, "),
        ([], 0, 2, "no room is left on the disk ({}/out); make room and give the same command again"),
    ],
)
def test_a_failed_run_is_an_error_however_quiet(
    words: list[str],
    free: int,
    code: int,
    message: str,
    model_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commands: Commands,
) -> None:
    """Its process cannot start; BM25 comes to its end. Without room its log says nothing."""
    monkeypatch.setattr("contaccum.common.errors.shutil.disk_usage", lambda place: SimpleNamespace(free=free))
    run = "contaccum.experiments.processes.run_apart"
    usual = importlib.import_module("contaccum.experiments.processes").run_apart
    monkeypatch.setattr(run, lambda folder, **options: "BM25" in folder.name and usual(folder, **options))
    given = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    common = ["compare", table(tmp_path, 120), "--model", model_folder, "--output", tmp_path / "out", "--methods", "contaccum"]
    said = commands.refused(*common, *given, *words, code=code)
    assert said.startswith(message.format(tmp_path))


def figures(output: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text())["metrics"] for path in output.glob("cells/*/result.json")}


@pytest.mark.parametrize(
    "cut", [pytest.param("data", marks=pytest.mark.slow), "first update", pytest.param("judging", marks=pytest.mark.slow)]
)
def test_killed_and_started_again_gives_the_same_figures(
    cut: str, finished: tuple[Path, Any, list[str]], model_folder: str, tmp_path: Path
) -> None:
    folder, _, _ = finished
    words = ["compare", str(folder / "pairs.csv"), "--model", model_folder, "--output", str(tmp_path / "out")]
    words += [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    signs = {"data": "request.json", "first update": "cells/*/run/config.yaml", "judging": "cells/*/run/vectors"}
    child = subprocess.Popen(
        [sys.executable, "-m", "contaccum", *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    end = time.monotonic() + 120
    while not list((tmp_path / "out").glob(signs[cut])):
        assert child.poll() is None or cut == "judging", "it ended before it could be killed"
        assert time.monotonic() < end
        if child.poll() is not None:
            break
        time.sleep(0.005)
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert figures(tmp_path / "out") == figures(folder / "out")


def test_a_baseline_can_stand_in_any_report(finished: tuple[Path, Any, list[str]]) -> None:
    folder, _, _ = finished
    run = read_run_folder(folder / "out" / "cells" / "BM25-seed0" / "run")
    assert not run.trained
    assert run.config["method"] == "BM25-seed0"
    assert run.evaluation is not None


def test_a_seed_given_twice_is_one_run(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list[str]()

    def note(cells: Any, *_: Any) -> list[str]:
        names.extend(cell.name for cell in cells)
        return names

    monkeypatch.setattr("contaccum.comparison.compare._run", note)
    with pytest.raises(FailedRunsError):
        compare(table(tmp_path), model=model_folder, output=tmp_path / "out", **OPTIONS, seeds=[3, 3], say=lambda line: None)
    assert len(set(names)) == len(names)


def interrupted(folder: Path, updates: int, checkpoint: int | None = None, finished: bool = False) -> Work:
    run = folder / "run"
    run.mkdir(parents=True)
    log(run, updates)
    if checkpoint is not None:
        saved = run / "checkpoints" / f"checkpoint-{checkpoint}"
        saved.mkdir(parents=True)
        (saved / "trainer_state.json").write_text(json.dumps({"global_step": checkpoint, "log_history": []}))
    if finished:
        (run / "summary.json").write_text("{}")
    return Work(folder.name, folder, 100)


def log(run: Path, updates: int) -> None:
    (run / "log.jsonl").write_text("".join(json.dumps({"update": i, "loss": 1.0}) + "\n" for i in range(1, updates + 1)))


def test_the_bar_goes_on_where_the_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates before the newest checkpoint are done; those after it, and all of a run without one, are done again."""
    begun = list[dict[str, Any]]()
    bar = SimpleNamespace(disable=True, close=lambda: None, n=0, set_postfix_str=lambda text, refresh: None)
    monkeypatch.setattr("tqdm.tqdm", lambda **options: begun.append(options) or bar)
    work = [
        interrupted(tmp_path / "saved", 70, checkpoint=60),
        interrupted(tmp_path / "unsaved", 40),
        interrupted(tmp_path / "trained", 100, finished=True),
        Work("new", tmp_path / "new", 100),
    ]
    watch = Watch(work, 8)
    with watch:
        assert (begun[0]["initial"], begun[0]["total"]) == (160, 400)
        assert [len(watch.lines(one)) for one in work] == [60, 0, 100, 0]
        for one, updates in zip(work, (65, 3, 100, 2), strict=True):
            (one.folder / "run").mkdir(parents=True, exist_ok=True)
            if one.name != "trained":
                log(one.folder / "run", updates)
        assert [len(watch.lines(one)) for one in work] == [65, 3, 100, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "give --model"),
        ({"methods": ["gradacum"]}, "method 'gradacum' is unknown"),
        ({"n_total": -1}, "n_total=-1 must be above 0"),
        ({"n_total": 16, "n_local": 5}, "not a multiple of n_local=5"),
        ({"minutes": float("nan")}, "minutes=nan must be"),
        ({"seeds": [-1]}, "seed=-1 is negative"),
        ({"memory": "11GB"}, "is a GPU's"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path, model_folder: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("contaccum.comparison.compare._gpu", lambda: False)
    with pytest.raises(ValueError, match=message):
        compare(table(tmp_path), **{"model": model_folder, **OPTIONS, **options}, output=tmp_path / "out", say=lambda line: None)
