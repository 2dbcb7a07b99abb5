"""MS MARCO: hard negatives well below the lowest positive by the cross-encoder's scores, whose pickle is read and never run."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from contaccum.data.prepare import prepare
from contaccum.data.readers.scores import read_scores
from contaccum.data.training_set import load_training_set
from data_files import SCORES, assert_refused, jsonl, out_folder, write

out = pytest.fixture(out_folder)

HARD_NEGATIVES = [
    {"qid": 1, "pos": [10, 11], "neg": {"bm25": [20, 21, 22, 10, 23], "dense": [24, 20]}},
    {"qid": 2, "pos": [12], "neg": {"bm25": [20, 25], "dense": []}},
    {"qid": 3, "pos": [], "neg": {"bm25": [20]}},
    {"qid": 4, "pos": [13], "neg": {"bm25": [20], "dense": [21]}},
]


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
    prepare(folder, out, system=("dense", "bm25"), margin=2.0)
    assert load_training_set(out)["negatives"][:] == [["p24", "p20", "p21", "p22"]] * 2 + [["p20", "p25"]]  # in turn, each once
    prepare(folder, out.with_name("one"), system=("dense", "bm25"), max_negatives=1)
    assert load_training_set(out.with_name("one"))["negatives"][:] == [["p24"]] * 2
    assert_refused(folder, out.with_name("sub") / "out", "no negatives of splade; it has those of bm25, dense", system=("splade",))


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
