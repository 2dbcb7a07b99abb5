"""Whatever a file's bytes are and however long its lines: rows or a DataError."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contaccum.common.errors import DataError
from contaccum.data.prepare import prepare
from contaccum.data.readers import beir, dpr, files
from contaccum.data.readers import csv_jsonl_parquet as pairs
from contaccum.data.readers.files import read_jsonl
from contaccum.data.readers.rows import Tally
from contaccum.data.readers.scores import read_scores
from contaccum.data.training_set import load_training_set
from data_files import SCORES, as_csv, dpr_record, jsonl, out_folder, passage, write, write_pairs

out = pytest.fixture(out_folder)


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


# Long lines


def test_a_long_line_is_a_record(tmp_path: Path, out: Path) -> None:
    long = "word " * 6_000_000  # 30 MB
    path = write_pairs(tmp_path / "a.jsonl", [{"query": "q", "positive": long}, {"query": "r", "positive": "p"}])
    prepare(path, out)
    assert [len(text) for text in load_training_set(out)["positive"]] == [len(long), 1]
    record = dpr_record() | {"positive_ctxs": [passage(long)]}
    read, _ = dpr.read_dpr(write(tmp_path / "a.json", json.dumps([record, dpr_record()])))
    assert read.positives[0].text == long


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "p.tsv"])
def test_a_line_that_is_too_long_is_refused(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 2**20)
    first = {"a.json": "[", "a.jsonl": "", "a.csv": "query,positive", "p.tsv": "id\ttext\ttitle"}[name]
    path = write(tmp_path / name, first + '\n{"question": "' + "x" * 3 * 2**20 + '"}]')
    with pytest.raises(DataError, match="a record of more than 1 MB"):
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
    assert "a record of more than 256 MB" in message
    assert int(peak_mb) < 1000, peak_mb
    assert not (tmp_path / "out").exists()


# Fuzzing

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
