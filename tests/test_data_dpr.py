"""DPR's files: records and passages come out as they are there, and whatever cannot be read is a DataError that leaves nothing behind."""

from __future__ import annotations

import csv
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contaccum.common.errors import DataError
from contaccum.data.prepare import prepare
from contaccum.data.readers import dpr, json_array
from contaccum.data.readers.ids import BITMAP_IDS, SeenIds
from contaccum.data.training_set import load_training_set
from data_files import assert_refused, dpr_record, out_folder, shared, write

BARE = '{"question": "q", "positive_ctxs": []}'

out = pytest.fixture(out_folder)


# Records


def test_genuine_dpr_records_keep_their_counts(out: Path) -> None:
    path = shared("dpr-sample") / "biencoder-nq-dev-sample.json"
    records = list(dpr.read_dpr(path))
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


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("indent", [None, 4])
def test_a_dpr_array_read_record_by_record_equals_json_load(tmp_path: Path, suffix: str, indent: int | None) -> None:
    records = [dpr_record(f'q{i} “é” 😀 \\ " \n', i % 3, i % 2, i % 4) | {"score": -1.5e-7, "flags": [True, None]} for i in range(40)]
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    found = list(json_array.read_array(write(tmp_path / f"a.json{suffix}", "\ufeff" + text)))
    assert [record for _, record in found] == records
    assert found[2][0].endswith(", record 3")


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
    summary = prepare(None, out, train=train, test=train)
    assert list(summary.splits) == ["train", "test"]
    assert load_training_set(out, "test")["query"][0] == train.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("  \n ", "is empty"),
        ("[]", "holds no records"),
        ('{"question": "q"}', "begins with '{'"),
        ('[\n{"question": "q",\n"answers": [,]}]', "after record 0: not JSON"),
        ('[\n{"question": "q"\n', "not JSON .*cut off"),
        ("[1]", "record 1: a JSON object is needed"),
        ("[\n\n" + BARE, "after record 1: not JSON .*cut off"),
        (f"[{BARE} {BARE}]", "not JSON"),
        (f"[{BARE},]", "not JSON"),
        (f"[{BARE}] x", "not JSON"),
        ('[\n{"question": 5}]', "record 1: no text under 'question'; fields there: question"),
        ('[{"question": "q"}]', "no 'positive_ctxs'; fields there: question"),
        ('[{"question": "q", "positive_ctxs": {}}]', "must be a list of passages"),
        ('[{"question": "q", "positive_ctxs": ["p"]}]', "must be an object with 'title' and 'text'"),
        ('[{"question": "q", "positive_ctxs": [{"title": "t"}]}]', "no text under 'text'; fields there: title"),
        ('[{"question": "q", "answers": [1], "positive_ctxs": []}]', "'answers' must be a list of texts"),
        ('[{"a": ' + "1" * 5000 + "}]", "not JSON that can be read"),
        ('[\n{"question": "caf\u00e9"}]'.encode("latin-1"), "not JSON"),
    ],
)
def test_a_bad_dpr_file_is_refused(tmp_path: Path, out: Path, content: str | bytes, message: str) -> None:
    assert_refused(write(tmp_path / "a.json", content), out, message, format="dpr")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_damaged_or_cut_archive_is_refused(tmp_path: Path, out: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.json{suffix}", json.dumps([dpr_record(f"{i} {hash(str(i))}") for i in range(999)]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert_refused(path, out, "record|line|cannot be read")
    path.write_bytes(whole[:60] + b"\xff\x00\xff" + whole[63:])
    assert_refused(path, out, "record|line|cannot be read")
    path.write_bytes(b"no archive")
    assert_refused(path, out, "record|line|cannot be read")


# Passages


def test_squad_wiki_passages_stream() -> None:
    path = shared("squad-wiki") / "passages.tsv.xz"
    with lzma.open(path, "rt", encoding="utf-8", newline="") as lines:
        truth = list(csv.reader(lines, delimiter="\t"))[1:]
    assert [(key, text, title) for key, title, text in dpr.read_passages(path)] == [tuple(row) for row in truth]
    assert len(truth) == 105_123


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
        ("1\ttext\n", "line 1: .*there are 2"),
        ('1\t"a\nb"\tT\n2\ttext\n', "line 3: .*there are 2"),
        ("7\ta\tT\n8\tb\tT\n7\tc\tT\n", "line 3: the id '7' appears a second time"),
        ("x7\ta\tT\nx7\tc\tT\n", "line 2: the id 'x7' appears a second time"),
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
