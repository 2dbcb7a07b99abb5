"""Readers and `prepare`: what real and made files hold comes out, and whatever cannot be read is a DataError that leaves nothing behind."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import pickle
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from contaccum.data import beir, download, dpr, files, json_array, pairs
from contaccum.data.files import read_jsonl
from contaccum.data.ids import BITMAP_IDS, SeenIds
from contaccum.data.prepare import prepare
from contaccum.data.rows import Tally
from contaccum.data.scores import read_scores
from contaccum.data.training import load_training_set
from contaccum.errors import DataError

SHARED = Path(__file__).parents[2] / "shared" / "data"


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"needs the sample data {name!r} beside the checkout, in shared/data")
    return SHARED / name


BARE = '{"question": "q", "positive_ctxs": []}'


def passage(text: str, title: str = "", key: str = "1") -> dict:
    return {"title": title, "text": text, "passage_id": key}


def dpr_record(question: str = "who", positives: int = 1, negatives: int = 1, hard: int = 1) -> dict:
    return {
        "question": question,
        "answers": ["an answer"],
        "positive_ctxs": [passage(f"positive {i}", "T") for i in range(positives)],
        "negative_ctxs": [passage(f"negative {i}") for i in range(negatives)],
        "hard_negative_ctxs": [passage(f"hard {i}") for i in range(hard)],
    }


def write(path: Path, content: str | bytes) -> Path:
    """`content` at `path`, compressed by its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(raw))
    return path


def jsonl(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "sets" / "out"


def assert_refused(source, out: Path, message: str, **options) -> None:
    """A DataError of one line that matches, and nothing left behind."""
    with pytest.raises(DataError, match=message) as caught:
        prepare(source, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())


# DPR


def test_genuine_dpr_records_keep_their_counts(out: Path) -> None:
    path = shared("dpr-sample") / "biencoder-nq-dev-sample.json"
    records = [record for _, record in dpr.read_dpr(path)]
    truth = json.loads(path.read_text(encoding="utf-8"))
    assert [len(record.positives) for record in records] == [len(r["positive_ctxs"]) for r in truth] == [5, 6, 3, 1, 7]
    assert [len(record.negatives) for record in records] == [len(r["negative_ctxs"]) for r in truth] == [50] * 5
    assert [len(record.hard_negatives) for record in records] == [len(r["hard_negative_ctxs"]) for r in truth] == [96, 95, 98, 100, 94]
    assert records[0].positives[0].id == truth[0]["positive_ctxs"][0]["passage_id"]
    prepare(shared("dpr-sample"), out)
    rows = load_training_set(out, "dev")
    assert rows["query"][:] == [r["question"] for r in truth]
    assert rows["answers"][:] == [r["answers"] for r in truth]
    assert rows["positive"][0] == truth[0]["positive_ctxs"][0]["title"] + " " + truth[0]["positive_ctxs"][0]["text"]
    assert rows["negatives"][3] == [ctx["title"] + " " + ctx["text"] for ctx in truth[3]["hard_negative_ctxs"]]


def test_squad_wiki_prepares_and_reads_back(out: Path) -> None:
    folder = shared("squad-wiki")
    summary = prepare(folder, out)
    assert {split: counts.rows for split, counts in summary.splits.items()} == {"train": 6499, "dev": 1500, "test": 2571}
    assert "mine" in summary.splits["train"].notes[0]  # its negatives are still to be mined, so none were required
    for split, counts in summary.splits.items():
        truth = json.loads(lzma.decompress((folder / f"biencoder-squad-{split}.json.xz").read_bytes()))
        rows = load_training_set(out, split)
        assert len(rows) == counts.rows == len(truth)
        assert rows["query"][:] == [record["question"].replace("’", "'") for record in truth]


def test_squad_wiki_passages_stream() -> None:
    path = shared("squad-wiki") / "passages.tsv.xz"
    with lzma.open(path, "rt", encoding="utf-8", newline="") as lines:
        truth = list(csv.reader(lines, delimiter="\t"))[1:]
    assert [(key, text, title) for key, title, text in dpr.read_passages(path)] == [tuple(row) for row in truth]
    assert len(truth) == 105_123


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("indent", [None, 4])
def test_a_dpr_array_read_in_small_pieces_equals_json_load(tmp_path: Path, monkeypatch, suffix: str, indent: int | None) -> None:
    monkeypatch.setattr(json_array, "CHUNK_BYTES", 7)
    records = [dpr_record(f'q{i} “é” 😀 \\ " \n', i % 3, i % 2, i % 4) | {"score": -1.5e-7, "flags": [True, None]} for i in range(40)]
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    found = list(json_array.read_array(write(tmp_path / f"a.json{suffix}", "\ufeff" + text)))
    assert [record for _, record in found] == records
    lines = text.splitlines()
    if indent:
        assert all(lines[line - 1].strip() == "{" for line, _ in found)


def test_dpr_rows_follow_dpr(tmp_path: Path, out: Path) -> None:
    records = [
        dpr_record("what’s it", positives=2),
        dpr_record("no positive", positives=0),
        dpr_record("no negative", negatives=0, hard=0),
        dpr_record("plain negatives only", negatives=2, hard=0),
        dpr_record("  "),
    ]
    del records[3]["hard_negative_ctxs"]
    records[0]["positive_ctxs"][0]["title"] = None
    path = write(tmp_path / "biencoder-x-train.json.gz", json.dumps(records))
    summary = prepare(path, out)
    rows = load_training_set(out)
    assert rows["query"][:] == ["what's it", "plain negatives only"]
    assert rows["positive"][:] == ["positive 0", "T positive 0"]
    assert rows["negatives"][:] == [["hard 0"], ["negative 0", "negative 1"]]
    assert summary.splits["train"].dropped == {"without a positive": 1, "without a negative": 1, "with a blank query": 1}
    assert (summary.splits["train"].negatives_min, summary.splits["train"].negatives_mean, summary.splits["train"].negatives_max) == (
        1,
        1.5,
        2,
    )
    kept = prepare(path, out.with_name("all"), require_negatives=False, max_negatives=1)
    assert kept.splits["train"].dropped == {"without a positive": 1, "with a blank query": 1}
    assert load_training_set(out.with_name("all"))["negatives"][:] == [["hard 0"], [], ["negative 0"]]


def test_required_negatives_that_no_record_has(tmp_path: Path, out: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps([dpr_record(negatives=0, hard=0)]))
    assert prepare(path, out).splits["train"].rows == 1
    assert_refused(path, out.with_name("sub") / "out", "no usable record .1 without a negative", require_negatives=True)


def test_splits_by_option_and_two_candidates(tmp_path: Path, out: Path) -> None:
    for name in ("biencoder-nq-train.json", "biencoder-nq-adv-hn-train.json", "biencoder-nq-dev.json", "biencoder-nq-dev.json.part"):
        write(tmp_path / "in" / name, json.dumps([dpr_record(name)]))
    assert_refused(tmp_path / "in", out, "both biencoder-nq-adv-hn-train.json and biencoder-nq-train.json; choose with --train")
    train = tmp_path / "in" / "biencoder-nq-train.json"
    summary = prepare(None, out, files={"train": train, "test": train})
    assert list(summary.splits) == ["train", "test"]
    assert load_training_set(out, "test")["query"][0] == train.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("  \n ", "is empty"),
        ("[]", "holds no records"),
        ('{"question": "q"}', "begins with '{'"),
        ('[\n{"question": "q",\n"answers": [,]}]', r"line 3: not JSON \(Expecting value"),
        ('[\n{"question": "q"\n', r"line 3: not JSON .*cut off"),
        ('[{"question": "q}]', "line 1: not JSON .Unterminated"),
        ("[1]", "line 1: a JSON object is needed"),
        ("[\n\n" + BARE, "line 3: the file ends within the array"),
        (f"[{BARE} {BARE}]", "line 1: ',' or ']' is needed"),
        (f"[{BARE},]", "line 1: a JSON object is needed, not ']'"),
        (f"[{BARE}] x", "after the end of the array"),
        ('[\n{"question": 5}]', "line 2: no text under 'question'; fields there: question"),
        ('[{"question": "q"}]', "no 'positive_ctxs'; fields there: question"),
        ('[{"question": "q", "positive_ctxs": {}}]', "must be a list of passages"),
        ('[{"question": "q", "positive_ctxs": ["p"]}]', "must be an object with 'title' and 'text'"),
        ('[{"question": "q", "positive_ctxs": [{"title": "t"}]}]', "no text under 'text'; fields there: title"),
        ('[{"question": "q", "answers": [1], "positive_ctxs": []}]', "'answers' must be a list of texts"),
        ('[{"question": "\\ud800", "positive_ctxs": []}]', "half of a surrogate pair"),
        ('[{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]", "not JSON that can be read"),
        ('[{"a": ' + "1" * 5000 + "}]", "not JSON that can be read"),
        ('[\n{"question": "caf\u00e9"}]'.encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
    ],
)
def test_a_bad_dpr_file_is_refused(tmp_path: Path, out: Path, content: str | bytes, message: str) -> None:
    assert_refused(write(tmp_path / "a.json", content), out, message, format="dpr")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_damaged_or_cut_archive_is_refused(tmp_path: Path, out: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.json{suffix}", json.dumps([dpr_record(f"{i} {hash(str(i))}") for i in range(999)]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert_refused(path, out, "line|cannot be read")
    path.write_bytes(whole[:60] + b"\xff\x00\xff" + whole[63:])
    assert_refused(path, out, "line|cannot be read")
    path.write_bytes(b"no archive")
    assert_refused(path, out, "line|cannot be read")


# Passages


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_passages_are_csv_with_tabs(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"p.tsv{suffix}", 'id\ttext\ttitle\n1\t"a ""quoted""\nline\tand tab"\tT\n2\tplain "quotes" stay\t\n')
    assert list(dpr.read_passages(path)) == [("1", "T", 'a "quoted"\nline\tand tab'), ("2", "", 'plain "quotes" stay')]
    with_long = write(tmp_path / f"q.tsv{suffix}", "1\t" + "x" * 200_000 + "\tT\n")  # beyond csv's own limit
    assert len(next(dpr.read_passages(with_long))[2]) == 200_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no passages"),
        ("id\ttext\ttitle\n", "holds no passages"),
        ("1\ttext\n", "line 1: .* 2 fields"),
        ('1\t"a\nb"\tT\n2\ttext\n', "line 3: .* 2 fields"),
        ("7\ta\tT\n8\tb\tT\n7\tc\tT\n", "line 3: the id '7' stands there a second time"),
        ("x7\ta\tT\nx7\tc\tT\n", "line 2: the id 'x7' stands there a second time"),
        ("1\tcaf\xe9\tT\n".encode("latin-1"), "line 1: byte 0xe9 is not UTF-8"),
        ('1\t"open\tT\n' + "x" * 2**24, "line 1: .*quotation mark left open"),
    ],
)
def test_bad_passages_are_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(dpr.read_passages(write(tmp_path / "p.tsv", content)))


@given(st.lists(st.one_of(st.integers(0, BITMAP_IDS + 5).map(str), st.sampled_from(["", "0", "00", "07", "7", "²", "a", "-1"]))))
def test_seen_ids_is_a_set(keys: list[str]) -> None:
    seen, truth = SeenIds(), set()
    for key in keys:
        assert seen.add(key) == (key not in truth)
        truth.add(key)


# BEIR


def beir_folder(folder: Path, **replaced: str | bytes) -> Path:
    contents: dict[str, str | bytes] = {
        "corpus.jsonl": jsonl([{"_id": f"d{i}", "title": "T" if i else "", "text": f"text {i}"} for i in range(4)]),
        "queries.jsonl.gz": jsonl([{"_id": f"q{i}", "text": f"query {i}"} for i in range(3)]),
        "qrels/train.tsv": "query-id\tcorpus-id\tscore\nq0\td0\t1\nq0\td1\t2\nq1\td2\t0\nq1\td3\t1\n",
        "qrels/test.tsv.xz": "query-id\tcorpus-id\tscore\r\nq2\td1\t1\r\n",
    }
    for name, content in (contents | replaced).items():
        write(folder / name, content)
    return folder


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
        ("qrels/train.tsv", "q0\td0\t1\nq0\td0\t1\n", "line 2: 'q0' and 'd0' stand there a second time"),
        ("qrels/train.tsv", "", "is empty"),
        ("qrels/train.tsv", "query-id\tcorpus-id\tscore\n", "is empty"),
        ("qrels/train.tsv", "q\xe9\td0\t1\n".encode("latin-1"), "line 1: byte 0xe9 is not UTF-8"),
        ("corpus.jsonl", "", "is empty"),
        ("corpus.jsonl", '{"_id": "d0", "text": "a"}\n{"_id": "d0", "text": "b"}\n', "line 2: the id 'd0' stands there a second time"),
        ("corpus.jsonl", '{"_id": "d0", "text": "a"}\n{"_id": \n', r"corpus.jsonl, line 2: not JSON .Expecting value at column"),
        ("corpus.jsonl", '{"_id": "d0"}\n', "line 1: no text under 'text'; fields there: _id"),
        ("corpus.jsonl", '{"_id": "d0", "text": "\\udfff"}\n', "half of a surrogate pair"),
        ("corpus.jsonl", '"text"\n', "line 1: a JSON object is needed, not str"),
    ],
)
def test_a_bad_beir_folder_is_refused(tmp_path: Path, out: Path, name: str, content: str | bytes, message: str) -> None:
    assert_refused(beir_folder(tmp_path / "in", **{name: content}), out, message)


def test_a_qrels_file_twice_is_refused(tmp_path: Path, out: Path) -> None:
    assert_refused(beir_folder(tmp_path / "in", **{"qrels/train.tsv.gz": "q0\td0\t1\n"}), out, "both train.tsv and train.tsv.gz")


# MS MARCO

HARD_NEGATIVES = [
    {"qid": 1, "pos": [10, 11], "neg": {"bm25": [20, 21, 22, 10, 23], "dense": [24, 20]}},
    {"qid": 2, "pos": [12], "neg": {"bm25": [20, 25], "dense": []}},
    {"qid": 3, "pos": [], "neg": {"bm25": [20]}},
    {"qid": 4, "pos": [13], "neg": {"bm25": [20], "dense": [21]}},
]
SCORES = {
    1: {10: 9.0, 11: 5.0, 20: 2.0, 21: 2.5, 22: 1.0, 24: -3.0},  # lowest positive 5: negatives up to 2 are kept; 23 has no score
    2: {12: 1.0, 20: -1.0, 25: -1.9},  # nothing is 3 below
    4: {20: 0.0, 21: 0.0},  # the positive has no score
    9: {1: 0.0},
}


def msmarco_folder(folder: Path, negatives: list[dict] = HARD_NEGATIVES, scores: object = SCORES, protocol: int = 4) -> Path:
    write(folder / "corpus.jsonl", jsonl([{"_id": str(i), "title": "", "text": f"p{i}"} for i in range(10, 30)]))
    write(folder / "queries.jsonl", jsonl([{"_id": str(i), "text": f"q{i}"} for i in range(1, 6)]))
    write(folder / "qrels" / "train.tsv", "query-id\tcorpus-id\tscore\n1\t10\t1\n")
    write(folder / "qrels" / "dev.tsv", "query-id\tcorpus-id\tscore\n5\t14\t1\n")
    write(folder / "msmarco-hard-negatives.jsonl.gz", jsonl(negatives))
    content = scores if isinstance(scores, bytes) else pickle.dumps(scores, protocol)
    write(folder / "cross-encoder-ms-marco-MiniLM-L-6-v2-scores.pkl.gz", content)
    return folder


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_msmarco_keeps_negatives_well_below_the_lowest_positive(tmp_path: Path, out: Path, protocol: int) -> None:
    summary = prepare(msmarco_folder(tmp_path / "in", protocol=protocol), out)
    assert summary.format == "msmarco"
    assert [tuple(row.values()) for row in load_training_set(out)] == [
        ("q1", "p10", ["p20", "p22"], []),
        ("q1", "p11", ["p20", "p22"], []),
    ]
    assert summary.splits["train"].dropped == {
        "without a positive": 1,
        "without a negative 3 below the positive": 1,
        "without a cross-encoder score": 1,
    }
    assert summary.splits["train"].notes == ["2 of 7 hard negatives score at least 3 below their positive"]
    assert load_training_set(out, "dev")["positive"][:] == ["p14"]


def test_msmarco_options(tmp_path: Path, out: Path) -> None:
    folder = msmarco_folder(tmp_path / "in")
    prepare(folder, out, systems=("dense", "bm25"), margin=2.0)
    assert load_training_set(out)["negatives"][:] == [["p24", "p20", "p21", "p22"]] * 2 + [["p20", "p25"]]  # in turn, each once
    prepare(folder, out.with_name("one"), systems=("dense", "bm25"), max_negatives=1)
    assert load_training_set(out.with_name("one"))["negatives"][:] == [["p24"]] * 2
    assert_refused(folder, out.with_name("sub") / "out", "no negatives of splade; it has those of bm25, dense", systems=("splade",))


def test_numpy_scores_equal_plain_ones(tmp_path: Path) -> None:
    plain: dict = {}
    kinds = [np.float16, np.float32, np.float64, np.dtype(">f4").type]
    scores = {1: {i: kind(i * 1.25) for i, kind in enumerate(kinds)}, 2: {"3": np.array([2.5], ">f8")[0]}}
    for protocol in range(2, 6):
        read_scores(write(tmp_path / "s.pkl", pickle.dumps(scores, protocol)), plain.__setitem__)
        assert plain == scores


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (b"", "no pickle of scores"),
        (b"\x80\x04N.", "is needed, not None"),
        (pickle.dumps({1: 2.0}), "is needed, not {1: 2.0}"),
        (pickle.dumps([SCORES]), "is needed, not "),
        (pickle.dumps({"x": {1: 2.0}}), "'x' is no identifier"),
        (pickle.dumps({1: {10: "high"}}), "the scores of query 1 are no numbers"),
        (pickle.dumps(SCORES)[:-40], "no pickle of scores"),
        (b"cos\nsystem\n(S'echo unsafe > unsafe'\ntR.", "it asks for os.system"),
        (pickle.dumps({1: {10: np.array(["x"], object)[:1]}}), "it asks for numpy"),
    ],
)
def test_a_bad_score_file_is_refused_and_never_run(tmp_path: Path, out: Path, monkeypatch, scores: bytes, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(msmarco_folder(tmp_path / "in", scores=scores), out, message)
    assert not (tmp_path / "unsafe").exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"qid": 1, "pos": [10]}, "line 1: no 'neg'; fields there: qid, pos"),
        ({"qid": 1, "pos": [10], "neg": [20]}, "line 1: of the form"),
        ({"qid": "q1", "pos": [10], "neg": {"bm25": [20]}}, "line 1: 'q1' is no identifier"),
        ({"qid": 1, "pos": [10, 11], "neg": {"bm25": [99, 20]}}, "names the document 99"),
    ],
)
def test_a_bad_hard_negative_file_is_refused(tmp_path: Path, out: Path, record: dict, message: str) -> None:
    scores = {1: {10: 9.0, 11: 9.0, 20: 0.0, 99: 0.0}}
    assert_refused(msmarco_folder(tmp_path / "in", [record], scores), out, message)


def test_msmarco_without_its_scores_says_what_is_missing(tmp_path: Path, out: Path) -> None:
    folder = msmarco_folder(tmp_path / "in")
    (folder / "cross-encoder-ms-marco-MiniLM-L-6-v2-scores.pkl.gz").unlink()
    assert_refused(folder, out, "has no cross-encoder-ms-marco-MiniLM-L-6-v2-scores.pkl")


# Pairs

TRIPLETS = [{"q": f"question {i}, “so”", "a": f"answer\n{i}", "n": f"wrong {i}", "m": f"bad {i}"} for i in range(3)]
QA = pairs.Columns("q", "a", ("n", "m"))


def as_csv(records: list[dict], delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def write_pairs(path: Path, records: list[dict]) -> Path:
    kind = files.bare_suffix(path)
    if kind == ".parquet":
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(records), path)
        return path
    return write(path, jsonl(records) if "json" in kind else as_csv(records, "," if kind == ".csv" else "\t"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.csv", "a.csv.xz", "a.tsv", "a.parquet"])
def test_pairs_come_from_any_table(tmp_path: Path, out: Path, name: str) -> None:
    summary = prepare(write_pairs(tmp_path / name, TRIPLETS), out, columns=QA)
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
    assert_refused(path, out, "no column question; columns there: q, a, n, m", columns=pairs.Columns("question", "a"))
    assert_refused(path, out, "no column wrong; columns there: q, a, n, m", columns=pairs.Columns("q", "a", ("wrong",)))


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
    summary = prepare(tmp_path / "in", out, columns=QA)
    assert {split: counts.rows for split, counts in summary.splits.items()} == {"train": 3, "dev": 1}
    again = prepare(out, out.with_name("again"), max_negatives=1)  # what `prepare` or `save_to_disk` wrote
    assert {split: counts.rows for split, counts in again.splits.items()} == {"train": 3, "dev": 1}
    assert load_training_set(out.with_name("again"))["negatives"][:] == [[record["n"]] for record in TRIPLETS]


def test_what_does_not_exist_is_refused(tmp_path: Path, out: Path) -> None:
    assert_refused(tmp_path / "none.jsonl", out, "does not exist")
    assert_refused(tmp_path / "none", out, "does not exist")
    assert_refused("nobody/nothing", out, "neither a file that exists nor a data set")
    assert_refused(None, out, "does not exist", files={"train": tmp_path / "none.json"})
    for options in ({"format": "word"}, {"max_negatives": -1}, {"margin": float("nan")}):
        with pytest.raises(ValueError, match="use"):
            prepare(tmp_path, out, **options)


# The output


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
    monkeypatch.setattr("contaccum.data.prepare.FLUSH_CHARACTERS", 1000)
    records = [{"query": f"q{i}", "positive": "p" * (i % 70)} for i in range(1, 3000)]
    prepare(write_pairs(tmp_path / "a.jsonl", records), out)
    assert load_training_set(out)["query"][:] == [r["query"] for r in records if r["positive"]]


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


# Long lines


def test_a_long_line_is_a_record(tmp_path: Path, out: Path) -> None:
    long = "word " * 6_000_000  # 30 MB
    path = write_pairs(tmp_path / "a.jsonl", [{"query": "q", "positive": long}, {"query": "r", "positive": "p"}])
    prepare(path, out)
    assert [len(text) for text in load_training_set(out)["positive"]] == [len(long), 1]
    record = dpr_record() | {"positive_ctxs": [passage(long)]}
    (_, read), _ = dpr.read_dpr(write(tmp_path / "a.json", json.dumps([record, dpr_record()])))
    assert read.positives[0].text == long


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "p.tsv"])
def test_a_line_that_is_too_long_is_refused(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 2**20)
    monkeypatch.setattr(json_array, "CHUNK_BYTES", 2**16)
    first = {"a.json": "[", "a.jsonl": "", "a.csv": "query,positive", "p.tsv": "id\ttext\ttitle"}[name]
    path = write(tmp_path / name, first + '\n{"question": "' + "x" * 3 * 2**20 + '"}]')
    with pytest.raises(DataError, match="line 2: a record of more than 1 MB"):
        list(READERS[name](path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_a_line_of_1_gb_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with open(path, "wb") as file:
        file.write(b'[\n{"question": "' if name == "a.json" else b'query,positive\n{"query": "' if name == "a.csv" else b'\n{"query": "')
        for _ in range(1024):
            file.write(b"x" * 2**20)
    script = (
        "import resource, sys\n"
        "from contaccum.data.prepare import prepare\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: prepare(sys.argv[1], sys.argv[2])\n"
        "except ValueError as error: print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path), str(tmp_path / "out")], capture_output=True, text=True, check=True)
    message, peak_mb = done.stdout.splitlines()
    assert "line 2: a record of more than 256 MB" in message
    assert int(peak_mb) < 1000, peak_mb
    assert not (tmp_path / "out").exists()


# Fuzzing: whatever the bytes, rows or a DataError


def _records(path: Path) -> Iterator:
    return pairs.training_rows(pairs.read_records(path, pairs.Columns()), pairs.Columns())


def _scores(path: Path) -> Iterator:
    read_scores(path, lambda query, scores: None)
    return iter(())


READERS: dict[str, Callable[[Path], Iterator]] = {
    "a.json": partial(dpr.training_rows, tally=Tally()),
    "a.jsonl": read_jsonl,
    "b.jsonl": _records,
    "c.jsonl": beir.read_entries,
    "a.csv": _records,
    "a.parquet": _records,
    "p.tsv": dpr.read_passages,
    "q.tsv": beir.read_judgements,
    "s.pkl": _scores,
}


def _valid(name: str, folder: Path) -> bytes:
    """A small file that the reader takes."""
    rows = [{"query": "q é", "positive": "p", "negatives": ["n"]}, {"query": "r", "positive": "s", "negatives": []}]
    contents = {
        "a.json": json.dumps([dpr_record("é"), dpr_record()], ensure_ascii=False, indent=1),
        "a.jsonl": jsonl(rows),
        "b.jsonl": jsonl(rows),
        "c.jsonl": jsonl([{"_id": "1", "title": "t", "text": "x"}, {"_id": "b", "text": "y"}]),
        "a.csv": as_csv([{"query": "q", "positive": 'a "b"\nc', "negative": "n"}] * 2),
        "p.tsv": 'id\ttext\ttitle\n1\t"a ""b"""\tT\n2\tc\t\n',
        "q.tsv": "query-id\tcorpus-id\tscore\nq0\td0\t1\nq0\td1\t-1\n",
        "s.pkl": pickle.dumps(SCORES | {7: {8: np.float32(1)}}),
    }
    if name == "a.parquet":
        return write_pairs(folder / "valid.parquet", rows).read_bytes()
    content = contents[name]
    return content if isinstance(content, bytes) else content.encode()


def refusal(reader: Callable[[Path], Iterator], path: Path) -> str | None:
    """The message of the DataError; None where the file is read. Any other error is the test's failure."""
    try:
        list(reader(path))
    except DataError as error:
        return str(error)
    return None


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` with a few pieces cut, doubled or overwritten."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 12)))
        piece = draw(st.one_of(st.just(b""), st.binary(max_size=6), st.just(bytes(content[start:end]) * 2), st.sampled_from(TOKENS)))
        content[start:end] = piece
    return bytes(content)


TOKENS = [
    b'"',
    b"\\",
    b"\\ud800",
    b"{",
    b"[",
    b"]",
    b"}",
    b",",
    b":",
    b"null",
    b"NaN",
    b"1e999",
    b"\t",
    b"\r",
    b"\n",
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
]
FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_loads_or_is_refused(tmp_path: Path, name: str) -> None:
    valid = _valid(name, tmp_path)
    path = tmp_path / name
    path.write_bytes(valid)
    assert refusal(READERS[name], path) is None  # the start is a good file
    refused = set[bool]()

    @FUZZ
    @given(st.one_of(mutated(valid), st.binary(max_size=40)))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        message = refusal(READERS[name], path)
        refused.add(message is not None)
        assert message is None or (str(path) in message and "\n" not in message)

    check()
    assert True in refused


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_mutated_archive_loads_or_is_refused(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.jsonl{suffix}", jsonl([{"query": f"q{i}", "positive": "p"} for i in range(50)]))
    valid = path.read_bytes()

    @FUZZ
    @given(mutated(valid))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        message = refusal(read_jsonl, path)
        assert message is None or (str(path) in message and "\n" not in message)

    check()


@pytest.mark.parametrize("name", ["a.json", "b.jsonl", "a.csv"])
def test_prepare_of_a_mutated_file_is_whole_or_nothing(tmp_path: Path, name: str) -> None:
    valid, path, counter = _valid(name, tmp_path), tmp_path / name, iter(range(10_000))

    @settings(FUZZ, max_examples=60)
    @given(mutated(valid))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        out = tmp_path / "sets" / str(next(counter))
        try:
            summary = prepare(path, out)
        except DataError:
            assert not out.exists()
        else:
            assert len(load_training_set(out)) == summary.splits["train"].rows

    check()
    assert all(path.name.isdigit() for path in (tmp_path / "sets").iterdir())


# Download


class RangeServer(ThreadingHTTPServer):
    """Serves `content`; sends at most `cut_after` bytes a response while `cuts` last; knows ranges or not."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), RangeHandler)
        self.content, self.cut_after, self.cuts, self.ranges, self.requests = content, 0, 0, True, list[str]()

    def file(self, name: str = "file.bin", **options: str) -> download.RemoteFile:
        return download.RemoteFile(f"http://127.0.0.1:{self.server_port}/{name}", **options)


class RangeHandler(BaseHTTPRequestHandler):
    server: RangeServer

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        total = len(self.server.content)
        if self.path == "/missing":
            self.send_error(404)
            return
        if start >= total:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{total}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(total - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        body = self.server.content[start:]
        if self.server.cuts:
            self.server.cuts -= 1
            body = body[: self.server.cut_after]
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[RangeServer]:
    monkeypatch.setattr(download, "BACKOFF_SECONDS", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with RangeServer(bytes(range(256)) * 20_000) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def digest(content: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def test_an_interrupted_transfer_goes_on_where_it_broke(tmp_path: Path, server: RangeServer) -> None:
    server.cuts, server.cut_after = 3, 1_000_000
    (path,) = download.download([server.file(checksum=digest(server.content, "md5"))], tmp_path / "new")
    assert path.read_bytes() == server.content
    assert server.requests == ["", "bytes=1000000-", "bytes=2000000-", "bytes=3000000-"]
    assert [path.name for path in path.parent.iterdir()] == ["file.bin"]
    download.download([server.file()], tmp_path / "new")
    assert len(server.requests) == 4  # what is there is not fetched again


def test_a_later_run_goes_on_with_the_part(tmp_path: Path, server: RangeServer) -> None:
    server.cuts, server.cut_after = 2 + download.ATTEMPTS, 0
    (tmp_path / "file.bin.part").write_bytes(server.content[:1234])
    with pytest.raises(DataError, match="after 1,234 bytes; run this again"):
        download.fetch(server.file(), tmp_path / "file.bin")
    assert not (tmp_path / "file.bin").exists()
    server.cuts = 0
    assert download.fetch(server.file(), tmp_path / "file.bin").read_bytes() == server.content


@pytest.mark.parametrize("have", [0, 1234, 5_120_000, 6_000_000])
@pytest.mark.parametrize("ranges", [True, False])
def test_any_part_becomes_the_whole_file(tmp_path: Path, server: RangeServer, have: int, ranges: bool) -> None:
    server.ranges = ranges
    (tmp_path / "file.bin.part").write_bytes((server.content * 2)[:have])
    download.fetch(server.file(), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == server.content


def test_a_wrong_checksum_is_refused(tmp_path: Path, server: RangeServer) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(DataError, match=r"arrived damaged .sha256 .* instead of"):
        download.fetch(server.file(checksum=digest(b"other")), path)
    assert not list(tmp_path.iterdir())
    path.write_bytes(b"put there by hand")
    with pytest.raises(DataError, match="is not the published file"):
        download.fetch(server.file(checksum=digest(server.content)), path)


def test_without_a_network_it_says_what_to_put_where(tmp_path: Path, server: RangeServer) -> None:
    path = tmp_path / "missing"
    with pytest.raises(DataError, match=r"cannot fetch http.*/missing .9 GB.: HTTP 404.* put it at .*missing and run this again"):
        download.fetch(server.file("missing", size="9 GB"), path)
    closed = download.RemoteFile("http://127.0.0.1:9/file.bin")
    with pytest.raises(DataError, match=r"cannot fetch http://127.0.0.1:9/file.bin: .*refused; fetch it elsewhere, put it at") as caught:
        download.fetch(closed, path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_beir_archive_is_unpacked_beside_the_rest(tmp_path: Path, server: RangeServer, out: Path) -> None:
    folder = beir_folder(tmp_path / "made" / "msmarco")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("corpus.jsonl", "qrels/train.tsv"):
            archive.write(folder / name, f"msmarco/{name}")
        archive.writestr("msmarco/queries.jsonl", gzip.decompress((folder / "queries.jsonl.gz").read_bytes()))
        archive.writestr("msmarco/../../outside.jsonl", "x")
        archive.writestr("../corpus.jsonl/corpus.jsonl", "x")
    server.content = content.getvalue()
    download.download([server.file("msmarco.zip")], tmp_path / "in")
    assert sorted(str(path.relative_to(tmp_path / "in")) for path in (tmp_path / "in").rglob("*") if path.is_file()) == [
        "corpus.jsonl",
        "msmarco.zip",
        "qrels/train.tsv",
        "queries.jsonl",
    ]
    assert prepare(tmp_path / "in", out).splits["train"].rows == 3
    (tmp_path / "in" / "msmarco.zip").write_bytes(server.content[:200])
    with pytest.raises(DataError, match="no whole zip archive"):
        download.download([server.file("msmarco.zip")], tmp_path / "in")


def test_every_data_set_has_its_files() -> None:
    for name in download.FILES:
        urls = [file.url for file in download.files_of(name, passages=name != "msmarco")]
        assert len(urls) == len(set(urls)) >= 3
        assert all(url.startswith("https://") for url in urls)
    with pytest.raises(ValueError, match="use one of nq, trivia, webq, trec, msmarco"):
        download.files_of("squad")


def test_the_command_downloads_then_prepares(tmp_path: Path, server: RangeServer, out: Path, monkeypatch) -> None:
    from contaccum.cli import app

    server.content = gzip.compress(json.dumps([dpr_record()]).encode())
    monkeypatch.setitem(download.FILES, "nq", (server.file("biencoder-nq-train.json.gz"),))
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "in"), "--download", "nq", "--output", str(out)])
    assert result.exit_code == 0, result.output
    assert len(load_training_set(out)) == 1


def test_held_out_rows_are_a_test_split_and_a_folder_to_judge_by(tmp_path: Path, out: Path) -> None:
    file = tmp_path / "faq.csv"
    with open(file, "w", newline="", encoding="utf-8") as rows:
        csv.writer(rows).writerows([("q", "a"), *((f"question {i // 2}", f"answer {i}") for i in range(200))])
    prepare(file, out, columns=pairs.Columns("q", "a"), hold_out=0.2)
    train, test = load_training_set(out, "train"), load_training_set(out, "test")
    assert len(train) + len(test) == 200
    assert 20 <= len(test) <= 60
    assert not set(train["query"]) & set(test["query"])
    queries, corpus = beir.read_texts(out / "beir" / "queries.jsonl"), beir.read_texts(out / "beir" / "corpus.jsonl")
    assert sorted(corpus.values()) == sorted(f"answer {i}" for i in range(200))
    judged = beir.read_qrels(out / "beir" / "qrels" / "test.tsv")
    found = {(queries[query], corpus[passage]) for query, grades in judged.items() for passage in grades}
    assert found == set(zip(test["query"], test["positive"], strict=True))


@pytest.mark.parametrize(("share", "message"), [(1.5, "hold_out=1.5 must be a share"), (0.2, "the source has one")])
def test_hold_out_mistakes(tmp_path: Path, out: Path, share: float, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"query": "q", "positive": "p"}\n')
    with pytest.raises(ValueError, match=message):
        prepare(None, out, files={"train": file, "test": file}, hold_out=share)
    assert not out.exists()


def test_a_csv_to_train_on_is_sent_to_prepare(tmp_path: Path) -> None:
    (tmp_path / "faq.csv").write_text("q,a\n")
    with pytest.raises(DataError, match=r"faq.csv is no .jsonl file; contaccum prepare"):
        load_training_set(tmp_path / "faq.csv")
