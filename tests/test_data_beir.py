"""BEIR folders: a row for each relevant pair; a folder that does not fit together is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contaccum.data.prepare import prepare
from contaccum.data.readers import beir
from contaccum.data.readers.beir import read_entries, read_judgements
from contaccum.data.training_set import load_training_set
from data_files import assert_refused, beir_folder, out_folder, shared

out = pytest.fixture(out_folder)


def test_acl_prepares_and_reads_back(out: Path) -> None:
    summary = prepare(shared("acl"), out)
    assert {split: counts.rows for split, counts in summary.splits.items()} == {"train": 58_787, "dev": 1_000, "test": 3_000}
    direct = load_training_set(shared("acl"), "test")
    assert load_training_set(out, "test")[:] == direct[:]
    assert len({key for key, _, _ in beir.read_collection(shared("acl"))}) == 64_787


def test_a_beir_folder_becomes_a_row_per_relevant_pair(tmp_path: Path, out: Path) -> None:
    summary = prepare(beir_folder(tmp_path / "in"), out)
    assert summary.format == "beir"
    assert list(zip(*(load_training_set(out)[name][:] for name in ("query", "positive")), strict=True)) == [
        ("query 0", "text 0"),
        ("query 0", "T text 1"),
        ("query 1", "T text 3"),
    ]
    assert summary.splits["train"].dropped == {"judged not relevant": 1}
    assert load_training_set(out, "test")["query"][:] == ["query 2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("qrels/train.tsv", "q0\td0\t1\nq0\tnone\t1\n", "line 2: names the document 'none'"),
        ("qrels/train.tsv", "none\td0\t1\n", "line 1: names the query 'none'"),
        ("qrels/train.tsv", "q0\td0\t1\nq0 d1 1\n", "line 2: query-id, corpus-id and a whole number"),
        ("qrels/train.tsv", "q0\td0\tx\n", "line 1: .* whole number"),
        ("qrels/train.tsv", "q0\td0\t1\nq0\td0\t2\n", "line 2: 'q0' and 'd0' appear a second time, judged otherwise"),
        ("qrels/train.tsv", "", "is empty"),
        ("qrels/train.tsv", "query-id\tcorpus-id\tscore\n", "is empty"),
        ("qrels/train.tsv", "q\xe9\td0\t1\n".encode("latin-1"), "line 1: byte 0xe9 is not UTF-8"),
        ("corpus.jsonl", "", "is empty"),
        ("corpus.jsonl", '{"_id": "d0", "text": "a"}\n{"_id": "d0", "text": "b"}\n', "line 2: the id 'd0' appears a second time"),
        ("corpus.jsonl", '{"_id": "d0", "text": "a"}\n{"_id": \n', r"corpus.jsonl, line 2: not JSON .Expecting value at column"),
        ("corpus.jsonl", '{"_id": "d0"}\n', "line 1: no text under 'text'; fields there: _id"),
        ("corpus.jsonl", '{"_id": "d0", "text": "\\udfff"}\n', "half of a surrogate pair"),
        ("corpus.jsonl", '"text"\n', "line 1: a JSON object is needed, not str"),
    ],
)
def test_a_bad_beir_folder_is_refused(tmp_path: Path, out: Path, name: str, content: str | bytes, message: str) -> None:
    assert_refused(beir_folder(tmp_path / "in", **{name: content}), out, message)


def test_of_a_few_lines_with_one_id_the_first_counts_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "corpus.jsonl"
    entries = [{"_id": f"d{i}", "text": f"text {i}"} for i in range(400)]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in [*entries, {"_id": "d7", "text": "other"}, entries[3]]))
    for _ in range(2):
        assert [text for _, _, text in read_entries(file)] == [f"text {i}" for i in range(400)]
    said = capsys.readouterr().err
    assert said == f"note: {file}, line 401: the id 'd7' appears a second time; the first of the texts is taken, as for 1 more\n"


def test_a_judgement_that_is_repeated_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    file.write_text("q0\td0\t1\nq0\td1\t0\nq0\td0\t1\n")
    assert [(found.document, found.score) for found in read_judgements(file)] == [("d0", 1), ("d1", 0)]


def test_a_qrels_file_twice_is_refused(tmp_path: Path, out: Path) -> None:
    assert_refused(beir_folder(tmp_path / "in", **{"qrels/train.tsv.gz": "q0\td0\t1\n"}), out, "both train.tsv and train.tsv.gz")
