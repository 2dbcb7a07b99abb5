"""Folders that are damaged or hostile: vectors, saved data sets and runs to report. One clear line, nothing written, nothing unpickled."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from commands import Commands, commands
from conftest import rows
from contaccum.common.errors import DataError
from contaccum.common.outputs import write_json
from contaccum.data.mine import mine
from contaccum.data.prepare import prepare
from contaccum.data.readers.json_array import read_array
from contaccum.data.training_set import load_training_set
from contaccum.report.folders import read_run_folder
from contaccum.retrieval.search import search
from contaccum.retrieval.shards import id_array, write_array, write_shard
from data_files import assert_one_line, write, write_pairs
from report_runs import make_run, write_lines

__all__ = ["commands"]


# Vectors


def vectors(folder: Path, values: np.ndarray, ids: list[str], **fields: object) -> Path:
    folder.mkdir()
    entry = write_shard(folder, 0, values, ids, "")
    manifest = {"model_checksum": "m", "normalized": False, "dim": values.shape[1], "dtype": str(values.dtype), "source": "none"}
    write_json(folder / "manifest.json", {**manifest, "complete": True, "shards": [vars(entry)], **fields})
    return folder


@pytest.mark.parametrize("index", [None, "Flat"])
@pytest.mark.parametrize("what", ["passage", "query"])
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_vector_that_is_no_vector_is_not_searched(odd: float, what: str, index: str | None, tmp_path: Path) -> None:
    if index is not None:
        pytest.importorskip("faiss", reason="needs contaccum[search]")
    passages, queries = (np.random.default_rng(seed).standard_normal((count, 8)).astype("float16") for seed, count in ((0, 50), (1, 5)))
    (passages if what == "passage" else queries)[3, 2] = odd
    folders = vectors(tmp_path / "p", passages, [f"d{i}" for i in range(50)]), vectors(tmp_path / "q", queries, [f"q{i}" for i in range(5)])
    with pytest.raises(DataError, match=f"the vector of {what} 3 .from 0. is not finite"):
        search(*folders, tmp_path / "out" / "r.trec", index=index, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": "x"}, "is damaged"),
        ({"dim": None}, "is damaged"),
        ({"dim": -8}, "is damaged"),
        ({"dim": 1e400}, "is damaged"),
        ({"dtype": "object"}, "is damaged"),
        ({"dtype": 7}, "is damaged"),
        ({"shards": None}, "is damaged"),
        ({"shards": []}, "is damaged"),
        ({"shards": [{"number": 0, "count": "5", "vectors_sha256": "", "ids_sha256": "", "texts_sha256": ""}]}, "is damaged"),
        ({"shards": [{"number": "../../evil", "count": 5, "vectors_sha256": "", "ids_sha256": "", "texts_sha256": ""}]}, "is damaged"),
        ({"shards": [[1]]}, "is damaged"),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_manifest_of_wrong_types(fields: dict, message: str, verify: bool, tmp_path: Path) -> None:
    passages = np.ones((5, 8), "float16")
    queries = vectors(tmp_path / "q", passages, list("abcde"))
    with pytest.raises(DataError, match=message) as error:
        search(vectors(tmp_path / "p", passages, list("abcde"), **fields), queries, tmp_path / "r.trec", verify=verify, progress=False)
    assert_one_line(error)


@pytest.mark.parametrize(
    "ids", [id_array(list("abcd")), id_array(list("abcdef")), np.array([1.0] * 5), np.array(list("abcde")), np.zeros((5, 2))]
)
def test_ids_that_are_not_those_of_the_vectors(ids: np.ndarray, tmp_path: Path) -> None:
    passages = np.ones((5, 8), "float16")
    folder, queries = (vectors(tmp_path / name, passages, list("abcde")) for name in "pq")
    write_array(folder / "shard-00000.ids.npy", ids)
    with pytest.raises(DataError, match=r"is not the file that .*manifest.json describes"):
        search(folder, queries, tmp_path / "r.trec", verify=False, progress=False)


def test_a_passage_that_is_there_twice_is_not_found_twice(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 4)).astype("float16")
    folders = vectors(tmp_path / "p", values, ["a", "b", "b"]), vectors(tmp_path / "q", values[:1], ["q1"])
    with pytest.raises(DataError, match="p holds a passage of query 'q1' twice; encode again into another folder"):
        search(*folders, tmp_path / "r.trec", verify=False, progress=False)
    assert not (tmp_path / "r.trec").exists()


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    passages = np.ones((5, 8), "float16")
    folder, queries = (vectors(tmp_path / name, passages, list("abcde")) for name in "pq")
    np.save(folder / "shard-00000.npy", np.array([Owned(str(tmp_path / "owned"))], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="is not the file"):
        search(folder, queries, tmp_path / "r.trec", verify=False, progress=False)
    assert not (tmp_path / "owned").exists()


class Owned:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_the_hostile_pickle_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Owned(str(tmp_path / "owned"))))
    assert (tmp_path / "owned").exists()


# Saved data sets


def prepared(tmp_path: Path) -> Path:
    prepare(write_pairs(tmp_path / "a.jsonl", rows(8)), tmp_path / "set")
    return tmp_path / "set"


def test_a_split_whose_name_is_a_path_is_written_nowhere(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    (folder / "train").rename(tmp_path / "evil")
    write_json(folder / "dataset_dict.json", {"splits": ["../evil"]})
    before = sorted(tmp_path.rglob("*"))
    for use in (
        lambda: prepare(folder, tmp_path / "out" / "a"),
        lambda: mine(folder, None, tmp_path / "out" / "a", splits=["../evil"], stopwords="none"),
        lambda: load_training_set(folder, "../evil"),
    ):
        with pytest.raises(DataError, match=r"'\.\./evil' cannot name a split"):
            use()
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "out"] == before


@pytest.mark.parametrize(
    "listing", ["[" * 100_000, "{}", "[]", '{"splits": "train"}', '{"splits": [1]}', '{"splits": ["gone"]}', "", "\xff"]
)
def test_a_listing_of_splits_that_is_none(listing: str, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    (folder / "dataset_dict.json").write_text(listing, encoding="latin-1")
    for use in (lambda: load_training_set(folder), lambda: prepare(folder, tmp_path / "out"), lambda: mine(folder, None, tmp_path / "out")):
        with pytest.raises(DataError) as error:
            use()
        assert_one_line(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\x00\xff" * 99, b'{"features": [["x"]], "_data_files": [7]}'])
def test_a_damaged_table(name: str, content: bytes, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    (folder / "train" / name).write_bytes(content)
    for use in (lambda: load_training_set(folder), lambda: prepare(folder, tmp_path / "out")):
        if name == "dataset_info.json" and content == b"{}":
            use()  # it need not say anything
            continue
        with pytest.raises(DataError) as error:
            use()
        assert_one_line(error)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("column", "buffer"), [("query", 1), ("positive", 2), ("negatives", 1)])
def test_a_table_whose_offsets_or_texts_are_damaged(
    column: str, buffer: int, tmp_path: Path, commands: Commands, model_folder: str
) -> None:
    """Arrow maps it without a look; the first row that is read can be whole."""
    folder = prepared(tmp_path)
    file = folder / "train" / "data-00000-of-00001.arrow"
    overwrite(file, column, buffer)
    options = ("--n-total", "2", "--n-local", "2", "--bank", "2", "--max-updates", "2", "--output", tmp_path / "out")
    for words in (("train", "--data", folder, "--model", model_folder), ("prepare", folder), ("mine", folder, "--stopwords", "none")):
        said = commands.refused(*words, *(options if words[0] == "train" else options[-2:]))
        assert f"{file} is damaged (" in said
        assert said.endswith("); prepare the data set again")
    assert not (tmp_path / "out").exists()


def overwrite(file: Path, column: str, buffer: int) -> None:
    """The last four bytes of the offsets (1) or texts (2) of a column in an Arrow file become 255: an offset of -1, or no UTF-8."""
    with pa.memory_map(str(file)) as source:
        first = source.read_buffer().address
        source.seek(0)
        found = pa.ipc.open_stream(source).read_all().column(column).chunk(0)
        values = found.buffers()[buffer]
        used = values.size if buffer == 2 else 4 * (len(found) + 1)
        end = values.address - first + used
        del found, values
    content = bytearray(file.read_bytes())
    content[end - 4 : end] = b"\xff" * 4
    file.write_bytes(content)


def test_a_damaged_split_that_is_not_used_is_not_read(tmp_path: Path) -> None:
    prepare(write_pairs(tmp_path / "a.jsonl", rows(8)), tmp_path / "set", hold_out=0.2)
    overwrite(tmp_path / "set" / "dev" / "data-00000-of-00001.arrow", "query", 1)
    assert len(load_training_set(tmp_path / "set")) == 4
    with pytest.raises(DataError, match=r"dev/data-00000-of-00001\.arrow is damaged"):
        load_training_set(tmp_path / "set", "train+dev")


def test_a_missing_text_is_not_the_word_none(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"query": "a", "positive": "b"}, {"query": None, "positive": "c"}]).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError, match="the column 'query' holds a missing value"):
        load_training_set(tmp_path / "set")


def test_a_script_in_a_folder_of_data_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "data.py", f"open({str(tmp_path / 'owned')!r}, 'w')\nimport datasets\n")
    with pytest.raises(DataError) as error:
        prepare(folder, tmp_path / "out")
    assert_one_line(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


@pytest.mark.parametrize("deep", ["[" * 100_000, '[{"a":' * 50_000, "[" * 20_000 + "]" * 20_000])
def test_an_array_without_a_bottom(deep: str, tmp_path: Path) -> None:
    """The parser's memory grows with the square of its depth: 16 GB for 100 kB."""
    with pytest.raises(DataError, match=r"holds lists in lists, more than 10,000 deep; is it the right file\?"):
        prepare(write(tmp_path / "a.json", f"[{deep}"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_brackets_in_texts_are_no_depth(tmp_path: Path) -> None:
    records = [{"question": "q", "text": "list[int, {" + "x" * 500}] * 10_000
    assert len(list(read_array(write(tmp_path / "a.json", json.dumps(records))))) == len(records)


# Reports


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluation.json", {"metrics": {"MRR@10": 5}}, "no numbers between 0 and 1 under 'metrics' but {'MRR@10': 5}"),
        ("evaluation.json", {"metrics": {"MRR@10": -0.1}}, "no numbers between 0 and 1"),
        ("evaluation.json", {"metrics": {"MRR@10": 0.5}, "per_query": {"MRR@10": {"q": 50}}}, "per query"),
        ("summary.json", {"seconds": "long"}, "seconds='long', which is no amount"),
        ("summary.json", {"peak_bytes": -5}, "peak_bytes=-5, which is no amount"),
        ("config.yaml", {"n_total": "many"}, "n_total='many' is not of type int"),
        ("config.yaml", {"lr": [1]}, "lr=.1. is not of type float"),
    ],
)
def test_figures_that_cannot_be_are_not_shown(name: str, content: dict, message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_json(run / name, content)
    with pytest.raises(DataError, match=message) as error:
        read_run_folder(run)
    assert str(run / name) in str(error.value)


@pytest.mark.parametrize(
    "log",
    [
        [{"update": "x", "loss": 1.0}],
        [{"update": 1, "loss": "low"}],
        [{"update": 1, "loss": True}],
        [{"update": 1, "loss": 1e308}],
        [{"update": 1, "loss": 10**400}],
        [{"update": 1.5, "loss": 1.0}],
        [{"update": -1, "loss": 1.0}],
        [{"update": 2, "loss": 1.0}, {"update": 1, "loss": 1.0}],
        [{"hello": "world"}],
        [{"update": 10**400, "loss": 1.0}],
        [{"update": 1, "loss": 1.0, "negatives_per_query": -7}],
        [{"update": 1, "loss": 1.0, "lr": "x"}],
    ],
)
def test_a_log_that_is_none_is_not_drawn(log: list[dict], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "log.jsonl", log)
    with pytest.raises(DataError, match=r"log.jsonl holds .*is this the log of"):
        read_run_folder(run)


@pytest.mark.parametrize("line", [{"update": 1, "MRR@10": 5}, {"update": 1, "MRR@10": "x"}, {"MRR@10": 0.5}])
def test_dev_metrics_that_cannot_be_are_not_drawn(line: dict, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "dev.jsonl", [line])
    with pytest.raises(DataError, match="metrics between 0 and 1 are needed"):
        read_run_folder(run)


def test_a_log_with_losses_that_are_not_finite_is_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "log.jsonl").write_text('{"update": 1, "loss": NaN}\n{"update": 2, "loss": null}\n' + json.dumps({"update": 3, "loss": 1.5}))
    assert [line["loss"] == line["loss"] for line in read_run_folder(run).log] == [False, False, True]


# Comparisons and experiments


@pytest.mark.parametrize("content", ["", "[1]", "[" * 100_000, '{"model": '])
@pytest.mark.parametrize("command", ["compare", "reproduce"])
def test_a_request_that_cannot_be_read(command: str, content: str, tmp_path: Path, commands: Commands, model_folder: str) -> None:
    data = write_pairs(tmp_path / "a.jsonl", rows(200))
    words = {"compare": (data, "--model", model_folder), "reproduce": ("simmass", "--scale", "tiny")}[command]
    file = write(tmp_path / "out" / "request.json", content)
    said = commands.refused(command, *words, "--output", file.parent)
    assert str(file) in said
    assert said.endswith("; use another --output")
