"""`mine`: splits are filled in order, files whole or absent, a mistake is one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from contaccum.cli import app
from contaccum.common.errors import DataError
from contaccum.data.answers import has_answer
from contaccum.data.mine import mine
from contaccum.data.negatives import Chooser
from contaccum.data.readers.collections import encoded_texts
from contaccum.data.training_set import as_table, load_training_set
from mining import CAPITALS, prepared_files

SHARED = Path(__file__).parents[2] / "shared"

prepared = pytest.fixture(prepared_files)


# Files


def test_mining_fills_the_split_asked_for_and_carries_the_others_over(prepared: Path) -> None:
    summary = mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    train = load_training_set(prepared / "out")
    for row in train:
        assert row["negatives"]
        assert set(row["negatives"]) < set(CAPITALS)  # title and text, as the positives
        assert not any(has_answer(row["answers"], text) for text in row["negatives"])
    for split in ("dev", "test"):
        assert load_training_set(prepared / "out", split)[:] == load_training_set(prepared / "prepared", split)[:]
    assert [summary[name] for name in ("rows", "rows_without_negatives", "passages")] == [2, 0, 6]
    assert summary["negatives"] == sum(len(texts) for texts in train["negatives"]) == 2 * summary["negatives_per_row"]
    assert summary["seconds"] > 0
    assert summary["peak_bytes"] > 2**20
    assert json.loads((prepared / "out" / "mine.json").read_text())["rows"] == 2
    assert sorted(path.name for path in prepared.iterdir()) == ["out", "passages.tsv", "prepared"]


def test_several_splits_are_mined_and_order_is_kept(prepared: Path) -> None:
    summary = mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out", splits=("dev", "train"))
    assert summary["rows"] == 3
    before, after = load_training_set(prepared / "prepared"), load_training_set(prepared / "out")
    assert after["query"][:] == before["query"][:]
    assert after["positive"][:] == before["positive"][:]
    assert load_training_set(prepared / "out", "dev")["negatives"][0] == after["negatives"][1] != ["old"]


def test_jsonl_without_a_collection_mines_among_its_positives(jsonl: Callable, tmp_path: Path) -> None:
    source = jsonl(40)
    summary = mine(source, None, tmp_path / "out", per_query=3)
    positives = set(load_training_set(source)["positive"])
    mined = load_training_set(tmp_path / "out")
    assert summary["passages"] == len(positives)
    assert 0 < summary["negatives"] <= 120
    assert all(row["positive"] not in row["negatives"] and set(row["negatives"]) <= positives for row in mined)


def test_a_beir_folder_is_training_set_and_collection(tmp_path: Path) -> None:
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{i}", "title": text.split(" ", 1)[0], "text": text.split(" ", 1)[1]} for i, text in enumerate(CAPITALS)]
    (beir / "corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (beir / "queries.jsonl").write_text(json.dumps({"_id": "q0", "text": "capital of France"}) + "\n")
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq0\td2\t1\n")
    mine(beir, None, tmp_path / "out", splits=("test",))
    for row in load_training_set(tmp_path / "out", "test"):
        assert row["negatives"] == [CAPITALS[1], CAPITALS[3], CAPITALS[4]]
    with pytest.raises(DataError, match="no split 'train'; it has test"):
        mine(beir, None, tmp_path / "other")


def texts_of(file: Path) -> list[str]:
    return [text for _, text in encoded_texts(file, need_ids=False)]


def test_jsonl_collections_need_a_text_and_may_have_a_title(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"text": "one"}\n\n{"title": "T", "text": "two"}\n')
    assert texts_of(file) == ["one", "T two"]
    file.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match="line 2: no text under 'text'"):
        texts_of(file)
    file.write_text("")
    with pytest.raises(DataError, match="is empty"):
        texts_of(file)
    with pytest.raises(DataError, match="is not a collection"):
        texts_of(file.rename(tmp_path / "c.docx"))


def test_existing_output_is_refused_and_an_empty_folder_is_not(prepared: Path) -> None:
    (prepared / "out").mkdir()
    mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    before = sorted(path.name for path in (prepared / "out").rglob("*"))
    with pytest.raises(ValueError, match="out exists and is not an empty folder; choose another --output or remove it"):
        mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert sorted(path.name for path in (prepared / "out").rglob("*")) == before


def test_failed_mining_leaves_nothing(prepared: Path) -> None:
    (prepared / "passages.tsv").write_text("id\ttext\ttitle\n1\ta text\ta title\n2\tonly a text\n")
    with pytest.raises(DataError, match="line 3"):
        mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert sorted(path.name for path in prepared.iterdir()) == ["passages.tsv", "prepared"]


def test_a_failure_while_negatives_are_written_leaves_nothing(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: Chooser, query: str, candidates: object) -> list[str]:
        if "Italy" in query:
            raise KeyboardInterrupt
        return ["a passage"]

    monkeypatch.setattr(Chooser, "__call__", choose)
    with pytest.raises(KeyboardInterrupt):
        mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert sorted(path.name for path in prepared.iterdir()) == ["passages.tsv", "prepared"]


def test_killed_mining_leaves_no_output_under_its_name(prepared: Path) -> None:
    endless = prepared / "endless.jsonl"  # a collection without an end keeps the process at work until it is killed
    os.mkfifo(endless)
    held_open = os.open(endless, os.O_RDWR)
    arguments = [prepared / "prepared", "--collection", endless, "--output", prepared / "out"]
    process = subprocess.Popen([sys.executable, "-m", "contaccum", "mine", *map(str, arguments)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(prepared.glob(".out.*/passages.arrow")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    os.close(held_open)
    assert list(prepared.glob(".out.*/passages.arrow"))  # it was at work
    assert not (prepared / "out").exists()
    mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert len(load_training_set(prepared / "out")) == 2


# Command line


def test_command_prints_json(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [prepared / "prepared", "--collection", prepared / "passages.tsv", "--output", prepared / "out", "--per-query", 2, "--json"]
    app(["mine", *map(str, words)], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["negatives"] == 4
    assert load_training_set(prepared / "out")[0]["negatives"] == [CAPITALS[2], CAPITALS[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "magic"], "method='magic' is unknown; choose one of bm25, dense, existing"),
        (["--method", "dense"], "needs the folder or name of a trained model"),
        (["--splits", "valid"], "has no split 'valid'; it has train, dev, test"),
        (["--splits", "dev,dev"], "none twice"),
        (["--match", "fuzzy"], "match='fuzzy' is unknown; choose one of string, regex"),
        (["--stopwords", "xx"], "stopwords='xx' is no language that bm25s knows; use en, de, fr, ... or none"),
        (["--per-query", "0"], "per_query=0 asks for no negatives"),
        (["--depth", "5"], "depth=5 passages cannot give per_query=10 negatives"),
        (["--collection", "missing.tsv"], "missing.tsv does not exist"),
        (["--margin", "nan"], "margin=nan is not a finite number"),
    ],
)
def test_command_refuses_bad_options_in_one_line(options: list[str], message: str, prepared: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        app(["mine", str(prepared / "prepared"), "--output", str(prepared / "out"), *options], standalone_mode=False)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in prepared.iterdir()) == ["passages.tsv", "prepared"]


# The real thing


@pytest.mark.slow
def test_squad_wiki(tmp_path: Path) -> None:
    folder = SHARED / "data" / "squad-wiki"
    if not folder.exists():
        pytest.skip(f"{folder} is missing: put the squad-wiki files there")
    from contaccum.data.readers.dpr import training_rows
    from contaccum.data.readers.rows import Tally

    rows = list(training_rows(folder / "biencoder-squad-train.json.xz", Tally()))
    as_table({name: [row[name] for row in rows] for name in rows[0]}).save_to_disk(str(tmp_path / "squad"))
    summary = mine(tmp_path / "squad", folder / "passages.tsv.xz", tmp_path / "mined")
    assert [summary[name] for name in ("rows", "rows_without_negatives", "passages")] == [6499, 0, 105123]
    assert summary["negatives_per_row"] > 9.9
    for row in load_training_set(tmp_path / "mined"):
        assert row["answers"]
        assert not any(has_answer(row["answers"], text) or text == row["positive"] for text in row["negatives"])
