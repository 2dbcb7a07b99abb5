"""`prepare`: the output is whole or absent, the command tells its counts, and rows can be held out."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contaccum.common.errors import DataError
from contaccum.data.held_out import split_rows
from contaccum.data.prepare import prepare
from contaccum.data.readers import beir
from contaccum.data.training_set import as_table, load_training_set
from data_files import TRIPLETS, assert_refused, out_folder, write, write_pairs

out = pytest.fixture(out_folder)


def test_what_does_not_exist_is_refused(tmp_path: Path, out: Path) -> None:
    assert_refused(tmp_path / "none.jsonl", out, "does not exist")
    assert_refused(tmp_path / "none", out, "does not exist")
    assert_refused("nobody/nothing", out, "neither a file that exists nor a data set")
    assert_refused(None, out, "does not exist", train=tmp_path / "none.json")
    for options in ({"format": "word"}, {"max_negatives": -1}, {"margin": float("nan")}):
        with pytest.raises(ValueError, match="use"):
            prepare(tmp_path, out, **options)


def test_an_output_that_exists_is_kept(tmp_path: Path, out: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [{"query": "q", "positive": "p"}])
    out.mkdir(parents=True)
    prepare(path, out)  # an empty folder is as good as none
    with pytest.raises(DataError, match="exists and is not an empty folder"):
        prepare(path, out)
    assert len(load_training_set(out)) == 1
    assert json.loads((out / "prepare.json").read_text())["splits"]["train"]["rows"] == 1
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_rows_beyond_one_batch_are_all_written(tmp_path: Path, out: Path, monkeypatch) -> None:
    monkeypatch.setattr("contaccum.data.prepared.FLUSH_CHARACTERS", 1000)
    records = [{"query": f"q{i}", "positive": "p" * (i % 70)} for i in range(1, 3000)]
    prepare(write_pairs(tmp_path / "a.jsonl", records), out)
    assert load_training_set(out)["query"][:] == [r["query"] for r in records if r["positive"]]


def test_columns_with_usual_names_need_not_be_named(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.csv", "id,Question,answer\n" + "".join(f"{i},what {i}?,that {i}\n" for i in range(3)))
    prepare(path, out)
    assert load_training_set(out)["positive"][:] == ["that 0", "that 1", "that 2"]
    assert "columns: query = 'Question', positive = 'answer' (by name" in capsys.readouterr().err


def test_the_command_prints_counts_and_refuses_in_one_line(tmp_path: Path, out: Path) -> None:
    from contaccum.cli import app

    path = write_pairs(tmp_path / "a.csv", TRIPLETS)
    arguments = ["prepare", str(path), "--query-column", "q", "--positive-column", "a", "--negative-column", "n", "--output"]
    result = CliRunner().invoke(app, [*arguments, str(out)])
    assert result.exit_code == 0, result.output
    assert re.search(r"train +3 +0 +1, 1.0, 1", result.stdout)
    assert "question 0" in result.stdout
    result = CliRunner().invoke(app, [*arguments, str(out.with_name("json")), "--json"])
    assert json.loads(result.stdout)["splits"]["train"]["rows"] == 3
    done = command("prepare", str(path), "--output", str(out.with_name("bad")))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "columns there: q, a, n, m" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not out.with_name("bad").exists()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "contaccum", *arguments], capture_output=True, text=True, check=False)


def test_held_out_rows_are_a_test_split_and_a_folder_to_judge_by(tmp_path: Path, out: Path) -> None:
    file = tmp_path / "faq.csv"
    with open(file, "w", newline="", encoding="utf-8") as rows:
        csv.writer(rows).writerows([("q", "a"), *((f"question {i // 2}", f"answer {i}") for i in range(200))])
    prepare(file, out, query_column="q", positive_column="a", hold_out=0.2)
    train, dev, test = (load_training_set(out, split) for split in ("train", "dev", "test"))
    assert (len(train), len(dev), len(test)) == (120, 40, 40)
    for one, other in ((train, dev), (train, test), (dev, test)):
        assert not set(one["query"]) & set(other["query"])
    queries, corpus = beir.read_texts(out / "beir" / "queries.jsonl"), beir.read_texts(out / "beir" / "corpus.jsonl")
    assert sorted(corpus.values()) == sorted(f"answer {i}" for i in range(200))
    judged = beir.read_qrels(out / "beir" / "qrels" / "test.tsv")
    found = {(queries[query], corpus[passage]) for query, grades in judged.items() for passage in grades}
    assert found == set(zip(test["query"], test["positive"], strict=True))


def test_rows_that_all_appear_several_times_are_held_out_by_groups() -> None:
    table = as_table({"query": [f"q{i // 3}" for i in range(90)], "positive": [f"p{i // 3}" for i in range(90)], "answers": [[]] * 90})
    parts = split_rows(table, {"test": 9, "dev": 4})
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 75, "test": 9, "dev": 6}


@pytest.mark.parametrize(("share", "message"), [(1.5, "hold_out=1.5 must be a share"), (0.2, "the source has one")])
def test_hold_out_mistakes(tmp_path: Path, out: Path, share: float, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"query": "q", "positive": "p"}\n')
    with pytest.raises(ValueError, match=message):
        prepare(None, out, train=file, test=file, hold_out=share)
    assert not out.exists()


def test_a_csv_to_train_on_is_sent_to_prepare(tmp_path: Path) -> None:
    (tmp_path / "faq.csv").write_text("q,a\n")
    with pytest.raises(DataError, match=r"faq.csv is no .jsonl file; contaccum prepare"):
        load_training_set(tmp_path / "faq.csv")
