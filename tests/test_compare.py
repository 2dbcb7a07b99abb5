"""`compare`: from a table to a verdict; killed anywhere it goes on to the same figures."""

from __future__ import annotations

import csv
import html
import importlib
import json
import os
import random
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
from conftest import rows, write_beir
from contaccum import compare
from contaccum.cli import app
from contaccum.common.errors import DataError, FailedRunsError
from contaccum.comparison.compare import BEFORE, WORDS
from contaccum.comparison.sizing import Sizes, Speed, sizes
from contaccum.comparison.source import Columns, Prepared, prepared
from contaccum.data.readers.beir import read_qrels, read_texts
from contaccum.data.training_set import load_training_set
from contaccum.report.folders import read_run_folder

__all__ = ["commands"]

OPTIONS: dict[str, Any] = {"n_total": 16, "n_local": 4, "epochs": 1, "lr": 1e-2, "max_seq_length": 16, "minutes": 0}


def table(folder: Path, count: int = 300, seed: int = 0) -> Path:
    """A CSV whose columns have usual names, with a number beside them."""
    file = folder / "pairs.csv"
    with open(file, "w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(["id", "Question", "answer"])
        writer.writerows([i, f"{row['query']} n{i}", f"{row['positive']} n{i}"] for i, row in enumerate(rows(count, seed=seed)))
    return file


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


class TestSource:
    def test_no_text_of_a_held_out_pair_is_trained_on(self, tmp_path: Path) -> None:
        chance = random.Random(0)
        file = tmp_path / "faq.jsonl"
        lines = [{"question": f"how {i} {i % 7}?", "answer": f"answer {chance.randrange(250)}"} for i in range(600)]
        lines += [
            {"question": f"HOW  {i} {i % 7}?", "answer": f"another {i}"} for i in range(0, 600, 5)
        ]  # the same question, written apart
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = prepared(file, tmp_path / "data", Columns())
        parts = {split: load_training_set(data.folder, split) for split in ("train", "dev", "test")}
        assert sum(map(len, parts.values())) == 720
        plain = {
            split: {" ".join(text.lower().split()) for name in ("query", "positive") for text in part[name]}
            for split, part in parts.items()
        }
        assert not plain["train"] & plain["test"]
        assert not plain["train"] & plain["dev"]
        assert not plain["dev"] & plain["test"]
        assert 50 <= len(parts["test"]) <= 80

    def test_the_collection_is_everything_and_answers_are_where_they_belong(self, tmp_path: Path) -> None:
        data = prepared(table(tmp_path), tmp_path / "data", Columns())
        corpus, queries = read_texts(data.beir / "corpus.jsonl"), read_texts(data.beir / "queries.jsonl")
        assert len(corpus) == data.passages == 300
        test = load_training_set(data.folder, "test")
        qrels = read_qrels(data.beir / "qrels" / "test.tsv")
        judged = {(queries[query], corpus[doc]) for query, grades in qrels.items() for doc in grades}
        assert judged == set(zip(test["query"], test["positive"], strict=True))

    def test_splits_of_the_source_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "beir"
        (folder / "qrels").mkdir(parents=True)
        (folder / "corpus.jsonl").write_text(
            "".join(json.dumps({"_id": f"d{i}", "title": "T", "text": f"text {i}"}) + "\n" for i in range(90))
        )
        (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": f"q{i}", "text": f"query {i}"}) + "\n" for i in range(80)))
        for split, numbers in (("train", range(60)), ("test", range(60, 80))):
            (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td{i}\t1\n" for i in numbers))
        data = prepared(folder, tmp_path / "data", Columns())
        assert set(load_training_set(data.folder, "test")["query"]) == {f"query {i}" for i in range(60, 80)}
        assert (data.rows, data.queries, data.passages) == (57, 20, 90)  # 3 for the curve; ten passages belong to no row

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (["query,positive", "one,two"], "1 rows are too few"),
            (["query,positive", *["same,same"] * 40], "40 rows are too few, or share too many texts"),
            (["query,positive", *[f"question {i},the one answer" for i in range(40)]], "share too many texts"),
            (["a,b", "1,2", "3,4"], "a.csv: none of its columns"),
            (["a,b", "1,word", "3,other"], "only b of its columns"),
            (["text", *[f"word {i}" for i in range(9)]], "two columns of texts are needed"),
            ([f"{'a long first question ' * 5},{'and its answer ' * 9}", "c,d"], "the first line must name the columns"),
            (["query,positive", *[f"q{i}," for i in range(20)]], "no usable record"),
            (["query,positive"], "is empty"),
        ],
    )
    def test_what_cannot_be_compared_is_refused_in_one_line(
        self, lines: list[str], message: str, tmp_path: Path, model_folder: str
    ) -> None:
        file = tmp_path / "a.csv"
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(DataError, match=message) as refused:
            compare(file, model=model_folder, output=tmp_path / "out", say=lambda line: None)
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "out").exists()

    def test_empty_cells_are_left_out_and_counted(self, tmp_path: Path) -> None:
        file = table(tmp_path)
        file.write_text(file.read_text() + "300,,no question\n301,no answer,\n302,  ,blank\n")
        data = prepared(file, tmp_path / "data", Columns())
        assert "train: left out 2 rows with a blank query" in data.lines
        assert "train: left out 1 row with a blank positive" in data.lines

    @pytest.mark.parametrize("mark", [";", "\t"])
    def test_a_csv_by_semicolons_or_tabs_is_read(self, mark: str, tmp_path: Path) -> None:
        file = tmp_path / "a.csv"
        file.write_text(f"Frage{mark}Antwort\n" + "".join(f"was, wie {i}{mark}so, und {i}\n" for i in range(60)))
        data = prepared(file, tmp_path / "data", Columns())
        assert data.passages == 60
        assert load_training_set(data.folder, "test")["query"][0].startswith("was, wie ")

    def test_a_json_array_of_pairs_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "a.json"
        file.write_text(json.dumps([{"question": f"what {i}", "answer": f"that {i}"} for i in range(60)], indent=1))
        assert prepared(file, tmp_path / "data", Columns()).passages == 60

    def test_columns_that_are_not_there_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no column ask; columns there: id, Question, answer"):
            prepared(table(tmp_path), tmp_path / "data", Columns(query="ask"))

    def test_one_column_cannot_be_both(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="column 'answer' is chosen twice"):
            prepared(table(tmp_path), tmp_path / "data", Columns(query="answer", positive="answer"))

    @pytest.mark.parametrize(
        ("names", "query", "positive", "negatives"),
        [
            (["anchor", "positive", "negative"], "anchor", "positive", ("negative",)),
            (["Query Text", "hard_negative_1", "passage"], "Query Text", "passage", ("hard_negative_1",)),
            (["title", "text", "query"], "query", "text", ()),
            (["erste", "zweite"], "erste", "zweite", ()),
            (["document", "erste"], "erste", "document", ()),
            (["kind", "erste", "zweite"], "erste", "zweite", ()),
        ],
    )
    def test_columns_are_guessed(self, names: list[str], query: str, positive: str, negatives: tuple[str, ...], tmp_path: Path) -> None:
        from contaccum.data.guess import guess_columns

        file = tmp_path / "a.jsonl"
        blanks = {"kind": "-"}  # one word
        lines = [{name: f"{name}{blanks.get(name, ' ')}{i}" for name in names} for i in range(5)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        guess = guess_columns(str(file))
        assert (guess.columns.query, guess.columns.positive, guess.columns.negatives) == (query, positive, negatives)


def fake(count: int, passages: int = 0) -> Prepared:
    return Prepared("nowhere", count, 500, passages or count)


def chosen(data: Prepared, seconds_per_text: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Sizes:
    monkeypatch.setattr(
        "contaccum.comparison.sizing._probe", lambda *_: Speed(6 * seconds_per_text, 2 * seconds_per_text, seconds_per_text)
    )
    given = {"n_total": None, "n_local": None, "epochs": None, "tokens": 128, "fixed_tokens": False, "minutes": 10.0, **options}
    return sizes(data, None, ["gradaccum", "gradcache", "contaccum"], 1, **given)


def test_too_few_rows_are_refused_before_anything_is_trained(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\d+ rows are left to train on, too few to compare methods; give 32 or more"):
        compare(table(tmp_path, 12), model=model_folder, output=tmp_path / "out", say=lambda line: None)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="n_total=512 is more than the"):
        compare(table(tmp_path), **{**OPTIONS, "n_total": 512}, model=model_folder, output=tmp_path / "out", say=lambda line: None)


def test_sizes_fit_the_rows_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    quick = chosen(fake(4300), 1e-4, monkeypatch)
    assert (quick.n_total, quick.n_local, quick.epochs, quick.limit, quick.passages) == (32, 8, 1.0, None, None)
    assert chosen(fake(20_000), 1e-5, monkeypatch).n_total == 128
    assert chosen(fake(60_000), 1e-5, monkeypatch).epochs == 1.0
    small = chosen(fake(300), 1e-4, monkeypatch)
    assert (small.n_total, small.n_local) == (16, 8)
    slow = chosen(fake(1_000_000), 0.02, monkeypatch)
    assert slow.epochs == 1.0
    assert slow.tokens == 64
    assert slow.passages is not None
    assert slow.limit is not None
    assert 1000 <= slow.limit < 10_000
    assert chosen(fake(1_000_000), 0.02, monkeypatch, minutes=None).limit is None
    assert slow.limit < chosen(fake(1_000_000), 0.02, monkeypatch, minutes=60.0).limit


def test_three_runs_on_two_cores_take_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    size = chosen(fake(1000, passages=1), 1e-2, monkeypatch, epochs=1)
    rest = 12 + 1e-2 + 6 * 700 * 1e-2  # beginning, judging and the curve
    assert size.expected_seconds == pytest.approx(2 * (6e-2 * 1000 + rest))  # gradaccum and contaccum; GradCache beside them


def test_a_seed_given_twice_is_one_run(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list[str]()

    def note(cells: Any, *_: Any) -> list[str]:
        names.extend(cell.name for cell in cells)
        return names

    monkeypatch.setattr("contaccum.comparison.compare._run", note)
    with pytest.raises(FailedRunsError):
        compare(table(tmp_path), model=model_folder, output=tmp_path / "out", **OPTIONS, seeds=[3, 3], say=lambda line: None)
    assert len(set(names)) == len(names)


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
