"""Small files of every layout that `prepare` reads, and what is refused, for tests of the data."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contaccum.common.errors import DataError
from contaccum.data.prepare import prepare
from contaccum.data.readers import files

SHARED = Path(__file__).parents[2] / "shared" / "data"
TRIPLETS = [{"q": f"question {i}, “so”", "a": f"answer\n{i}", "n": f"wrong {i}", "m": f"bad {i}"} for i in range(3)]
SCORES = {
    1: {10: 9.0, 11: 5.0, 20: 2.0, 21: 2.5, 22: 1.0, 24: -3.0},  # lowest positive 5: negatives up to 2 are kept; 23 has no score
    2: {12: 1.0, 20: -1.0, 25: -1.9},  # nothing is 3 below
    4: {20: 0.0, 21: 0.0},  # the positive has no score
    9: {1: 0.0},
}


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"needs the sample data {name!r} beside the checkout, in shared/data")
    return SHARED / name


def out_folder(tmp_path: Path) -> Path:
    return tmp_path / "sets" / "out"


def assert_refused(source, out: Path, message: str, **options) -> None:
    """A DataError of one line that matches, and nothing left behind."""
    with pytest.raises(DataError, match=message) as caught:
        prepare(source, out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())


def write(path: Path, content: str | bytes) -> Path:
    """`content` at `path`, compressed by its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(raw))
    return path


def jsonl(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def as_csv(records: list[dict], delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


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


def write_pairs(path: Path, records: list[dict]) -> Path:
    kind = files.bare_suffix(path)
    if kind == ".parquet":
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(records), path)
        return path
    return write(path, jsonl(records) if "json" in kind else as_csv(records, "," if kind == ".csv" else "\t"))


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


def assert_one_line(error: pytest.ExceptionInfo[BaseException]) -> None:
    assert "\n" not in str(error.value)
