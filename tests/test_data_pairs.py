"""Pairs: any table gives rows, by its usual columns or those named; a bad table is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from contaccum.data.prepare import prepare
from contaccum.data.training_set import load_training_set
from data_files import TRIPLETS, assert_refused, out_folder, write, write_pairs

QA = {"query_column": "q", "positive_column": "a", "negative_column": ("n", "m")}

out = pytest.fixture(out_folder)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.csv", "a.csv.xz", "a.tsv", "a.parquet"])
def test_pairs_come_from_any_table(tmp_path: Path, out: Path, name: str) -> None:
    summary = prepare(write_pairs(tmp_path / name, TRIPLETS), out, **QA)
    assert summary.format == "pairs"
    rows = load_training_set(out)
    assert rows["query"][:] == [record["q"] for record in TRIPLETS]
    assert rows["positive"][:] == [record["a"] for record in TRIPLETS]
    assert rows["negatives"][:] == [[record["n"], record["m"]] for record in TRIPLETS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_usual_columns_need_no_option(tmp_path: Path, out: Path, name: str) -> None:
    records = [
        {"query": "q", "positive": "p", "negatives": ["n1", "n2"], "negative_1": "n3", "answers": ["x"]},
        {"query": "q2", "positive": None, "negatives": [], "negative_1": None, "answers": []},
        {"query": "q3", "positive": "p3", "negatives": None, "negative_1": "", "answers": None},
    ]
    summary = prepare(write_pairs(tmp_path / name, records), out)
    assert [tuple(row.values()) for row in load_training_set(out)] == [("q", "p", ["n1", "n2", "n3"], ["x"]), ("q3", "p3", [], [])]
    assert summary.splits["train"].dropped == {"with a blank positive": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_wrong_column_name_lists_those_there(tmp_path: Path, out: Path, name: str) -> None:
    path = write_pairs(tmp_path / name, TRIPLETS)
    assert_refused(path, out, "no column question; columns there: q, a, n, m", **{**QA, "query_column": "question"})
    assert_refused(path, out, "no column wrong; columns there: q, a, n, m", **{**QA, "negative_column": ("wrong",)})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "query,positive\n", "is empty"),
        ("a.csv", "query,positive,query\n", "each once"),
        ("a.csv", 'query,positive\nq,"a\nb"\nq\n', "line 4: 1 fields, but 2 columns: query, positive"),
        ("a.csv", 'query,positive\nq,"a" b\n', "line 2: not CSV"),
        ("a.csv", 'query,positive\nq,"open\n', "line 2: not CSV"),
        ("a.csv", "query,positive\nq,caf\xe9\n".encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"query": "q", "positive": "p"}\n{"query": "q", "positive": 3}\n', "line 2: 'positive' must be a text, not 3"),
        ("a.jsonl", '{"query": "q", "positive": "p", "negatives": [[]]}\n', "line 1: 'negatives' must be a text"),
        ("a.parquet", "no parquet", "not Parquet that can be read"),
        ("a.docx", "word", "the ending '.docx' is not one of .jsonl"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, out: Path, name: str, content: str | bytes, message: str) -> None:
    assert_refused(write(tmp_path / name, content), out, message)


def test_a_folder_of_tables_is_read_by_datasets(tmp_path: Path, out: Path, monkeypatch) -> None:
    write_pairs(tmp_path / "in" / "train.jsonl", TRIPLETS)
    write_pairs(tmp_path / "in" / "validation.jsonl", TRIPLETS[:1])
    summary = prepare(tmp_path / "in", out, **QA)
    assert {split: counts.rows for split, counts in summary.splits.items()} == {"train": 3, "dev": 1}
    again = prepare(out, out.with_name("again"), max_negatives=1)  # what `prepare` or `save_to_disk` wrote
    assert {split: counts.rows for split, counts in again.splits.items()} == {"train": 3, "dev": 1}
    assert load_training_set(out.with_name("again"))["negatives"][:] == [[record["n"]] for record in TRIPLETS]
