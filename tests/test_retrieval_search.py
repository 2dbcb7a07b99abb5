"""Search: exact equals brute force whatever the back end and the shards; files that changed are noticed; runs survive their files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("faiss", reason="needs contaccum[search]")

from contaccum.common.errors import DataError
from contaccum.common.outputs import whole_file, write_json
from contaccum.data.readers.queries import Query
from contaccum.retrieval import exact
from contaccum.retrieval.exact import brute_force, exact_search
from contaccum.retrieval.runs import Hit, read_run, write_dpr_results, write_run
from contaccum.retrieval.search import search
from contaccum.retrieval.shards import Vectors, write_shard


def write_vectors(folder: Path, vectors: np.ndarray, ids: list[str], shards: int = 1, **fields) -> Vectors:
    folder.mkdir(parents=True)
    parts = zip(np.array_split(vectors, shards), np.array_split(np.array(ids, dtype=object), shards), strict=True)
    entries = [write_shard(folder, number, part, list(keys), "") for number, (part, keys) in enumerate(parts)]
    manifest = {
        "model_checksum": "m",
        "normalized": False,
        "dim": vectors.shape[1],
        "dtype": str(vectors.dtype),
        "source": "none",
        **fields,
    }
    write_json(folder / "manifest.json", {**manifest, "complete": True, "shards": [vars(entry) for entry in entries]})
    return Vectors(folder)


def random_vectors(count: int, dim: int, seed: int, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(dtype)


def shuffled_ids(count: int, seed: int = 9) -> list[str]:
    """Ids whose order is not that of the rows."""
    return [f"d{number}" for number in np.random.default_rng(seed).permutation(count)]


def assert_exact(vectors: Vectors, matrix: np.ndarray, ids: list[str], queries: np.ndarray, k: int) -> None:
    scores, rows = exact_search(queries, vectors, k, "cpu")
    wanted_scores, wanted_rows = brute_force(queries, matrix, np.array([key.encode() for key in ids]), k)
    np.testing.assert_array_equal(rows, wanted_rows)
    np.testing.assert_array_equal(scores, wanted_scores)


def test_few_pairs_are_proposed_of_the_first_block_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs take eight times the memory of the scores they come from."""
    listed, pairs = [], exact._pairs
    monkeypatch.setattr(exact, "_pairs", lambda passing: listed.append(int(passing.sum())) or pairs(passing))
    monkeypatch.setitem(exact.BLOCK_ROWS, "cpu", 1000)
    vectors = write_vectors(tmp_path / "v", random_vectors(3000, 24, 0, "float32"), shuffled_ids(3000))
    exact_search(random_vectors(37, 24, 1, "float32"), vectors, 10, "cpu")
    assert len(listed) == 3
    assert max(listed) <= 37 * (2 * 10 + exact.SPARE)


@pytest.mark.parametrize("shards", [1, 50])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("block_rows", [64, 32_768])
def test_exact_search_equals_brute_force(shards, dtype, block_rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact.BLOCK_ROWS, "cpu", block_rows)
    matrix, ids = random_vectors(1500, 24, 0, dtype), shuffled_ids(1500)
    vectors, queries = write_vectors(tmp_path / "v", matrix, ids, shards), random_vectors(37, 24, 1, dtype)
    for k in (1, 10, 200):
        assert_exact(vectors, matrix, ids, queries, k)


def test_k_may_exceed_the_collection(tmp_path: Path) -> None:
    matrix, ids = random_vectors(30, 8, 0), shuffled_ids(30)
    assert_exact(write_vectors(tmp_path / "v", matrix, ids, 4), matrix, ids, random_vectors(5, 8, 1), 1000)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_equal_scores_come_by_id(dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 vectors, only 7 different: every place at the end of the k best is contested, also across blocks and shards."""
    monkeypatch.setitem(exact.BLOCK_ROWS, "cpu", 32)
    matrix = random_vectors(7, 33, 0, dtype)[np.random.default_rng(3).integers(7, size=400)]
    ids = shuffled_ids(400)
    vectors = write_vectors(tmp_path / "v", matrix, ids, 3)
    for k in (1, 5, 60, 399):
        assert_exact(vectors, matrix, ids, random_vectors(11, 33, 1, dtype), k)
    scores, _ = exact_search(random_vectors(11, 33, 1, dtype), vectors, 60, "cpu")
    assert (np.diff(scores, axis=1) == 0).any(), "nothing was tied: the test shows nothing"


def test_later_and_better_blocks_replace_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exact.BLOCK_ROWS, "cpu", 50)
    matrix = (np.linspace(0.01, 1, 600)[:, None] * np.ones((600, 16))).astype(np.float16)
    ids = shuffled_ids(600)
    assert_exact(write_vectors(tmp_path / "v", matrix, ids, 2), matrix, ids, np.ones((3, 16), np.float16), 20)


def test_scores_closer_than_float32_can_tell_are_ordered_exactly(tmp_path: Path) -> None:
    """Two vectors whose float32 products round apart, but whose float64 ones are equal in float32, are a tie; numpy agrees."""
    rng = np.random.default_rng(5)
    base = rng.standard_normal((1, 768)) * 30
    matrix = (base + rng.standard_normal((300, 768)) * 1e-5).astype(np.float32)
    ids = shuffled_ids(300)
    vectors = write_vectors(tmp_path / "v", matrix, ids, 2)
    assert_exact(vectors, matrix, ids, (base + rng.standard_normal((4, 768))).astype(np.float32), 50)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 3e-8])
def test_vectors_of_a_collapsed_model_are_ranked_without_listing_all_pairs(noise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, pairs = [], exact._pairs
    monkeypatch.setattr(exact, "_pairs", lambda passing: listed.append(int(passing.sum())) or pairs(passing))
    monkeypatch.setitem(exact.BLOCK_ROWS, "cpu", 700)
    monkeypatch.setattr(exact, "PORTION", 300)
    rng = np.random.default_rng(2)
    matrix = (rng.standard_normal((1, 48)) + noise * rng.standard_normal((2000, 48))).astype("float32" if noise == 3e-8 else "float16")
    ids = shuffled_ids(2000)
    vectors = write_vectors(tmp_path / "v", matrix, ids, 3)
    queries = np.concatenate([matrix[:5], random_vectors(4, 48, 1, str(matrix.dtype))])
    for k in (1, 10, 800):
        listed.clear()
        assert_exact(vectors, matrix, ids, queries, k)
        assert max(listed, default=0) <= len(queries) * (2 * k + exact.SPARE + 700 * exact.DENSE)


@pytest.mark.parametrize("fast", [[torch.float32], [torch.bfloat16], [torch.bfloat16, torch.float32]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_the_fast_type_of_the_proposals_changes_nothing(fast, tied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "fast_types", lambda place, half: fast)
    monkeypatch.setitem(exact.BLOCK_ROWS, "cpu", 100)
    matrix = random_vectors(9, 40, 0)[np.arange(900) % 9] if tied else random_vectors(900, 40, 0) + np.float16(3)
    vectors = write_vectors(tmp_path / "v", matrix, shuffled_ids(900), 2)
    for k in (1, 30, 150):
        assert_exact(vectors, matrix, shuffled_ids(900), random_vectors(23, 40, 1) - np.float16(2), k)


def test_a_bfloat16_floor_is_rounded_down() -> None:
    products = exact.Products(torch.zeros(4, 8), torch.bfloat16)
    lowest = torch.tensor([1.001, -1.001, 0.0, -torch.inf])
    just_below = torch.tensor([[1.0], [-1.0078125], [0.0], [-3e38]], dtype=torch.bfloat16)
    assert products.passing(just_below, lowest).all()


def folders(tmp_path: Path, count: int = 300) -> tuple[Path, Path]:
    write_vectors(tmp_path / "v", random_vectors(count, 16, 0), shuffled_ids(count), 3)
    write_vectors(tmp_path / "q", random_vectors(20, 16, 1), [f"q{i}" for i in range(20)])
    return tmp_path / "v", tmp_path / "q"


def test_a_run_file_has_k_passages_for_each_query(tmp_path: Path) -> None:
    vectors, queries = folders(tmp_path)
    assert search(vectors, queries, tmp_path / "run.trec", k=10, progress=False)["exact"]
    run = read_run(tmp_path / "run.trec")
    assert len(run) == 20
    assert all(len(hits) == 10 for hits in run.values())


def test_queries_in_many_passes_give_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, queries = folders(tmp_path)
    search(vectors, queries, tmp_path / "once.trec", progress=False)
    monkeypatch.setattr(sys.modules["contaccum.retrieval.search"], "QUERIES_AT_ONCE", 7)
    monkeypatch.setitem(exact.SCORES_AT_ONCE, "cpu", 900)
    search(vectors, queries, tmp_path / "thrice.trec", progress=False)
    assert (tmp_path / "once.trec").read_bytes() == (tmp_path / "thrice.trec").read_bytes()


def truncate(folder: Path) -> None:
    file = folder / "shard-00001.npy"
    os.truncate(file, file.stat().st_size - 32)


def empty(folder: Path) -> None:
    (folder / "shard-00001.npy").write_bytes(b"")


def swap(folder: Path) -> None:
    """Two shards of the same size: only the checksum can tell."""
    os.rename(folder / "shard-00001.npy", folder / "x")
    os.rename(folder / "shard-00000.npy", folder / "shard-00001.npy")
    os.rename(folder / "x", folder / "shard-00000.npy")


def flip(folder: Path) -> None:
    with open(folder / "shard-00002.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def swap_ids(folder: Path) -> None:
    (folder / "shard-00000.ids.npy").write_bytes((folder / "shard-00001.ids.npy").read_bytes())


@pytest.mark.parametrize("damage", [truncate, empty, swap, flip, swap_ids])
@pytest.mark.parametrize("index", [None, "Flat"])
def test_a_changed_shard_is_noticed_and_no_run_is_written(damage, index, tmp_path: Path) -> None:
    vectors, queries = folders(tmp_path)
    damage(vectors)
    with pytest.raises(DataError, match="truncated, swapped or damaged") as caught:
        search(vectors, queries, tmp_path / "run.trec", index=index, progress=False)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("run.trec*"))


def test_vectors_of_two_models_are_not_compared(tmp_path: Path) -> None:
    vectors, _ = folders(tmp_path)
    write_vectors(tmp_path / "other", random_vectors(5, 16, 1), list("abcde"), model_checksum="another")
    with pytest.raises(DataError, match="encode both with one model"):
        search(vectors, tmp_path / "other", tmp_path / "run.trec", progress=False)


def test_queries_in_place_of_passages_are_noticed(tmp_path: Path) -> None:
    write_vectors(tmp_path / "p", random_vectors(5, 16, 1), list("abcde"), task="document")
    write_vectors(tmp_path / "q", random_vectors(2, 16, 1), list("ab"), task="query")
    with pytest.raises(DataError, match=r"q holds queries and .*p passages; give passages first, then queries"):
        search(tmp_path / "q", tmp_path / "p", tmp_path / "run.trec", progress=False)


@pytest.mark.parametrize(
    ("output", "more", "message"),
    [
        ("v/manifest.json", {}, "lies among encoded vectors, whose files it might replace; use another --output"),
        ("afile/run.trec", {}, "afile is not a folder that can be written to; use another --output"),
        ("v", {}, "v is a folder; give --output a file"),
        ("run.json", {"json_output": "run.json"}, "run.json is also read or written here and would be replaced; use another --json-output"),
        ("run.trec", {"device": "foo"}, "device 'foo' cannot be used"),
        ("run.trec", {"json_output": "run.json", "match": "fuzzy"}, "match='fuzzy' is unknown"),
    ],
)
def test_outputs_that_cannot_be_are_reported_before_the_search(output: str, more: dict, message: str, tmp_path: Path) -> None:
    vectors, queries = folders(tmp_path)
    (tmp_path / "afile").write_text("mine")
    before = (vectors / "manifest.json").read_bytes()
    named = {name: tmp_path / value if name == "json_output" else value for name, value in more.items()}
    with pytest.raises(ValueError, match=message):
        search(vectors, queries, tmp_path / output, progress=False, **named)
    assert (vectors / "manifest.json").read_bytes() == before
    assert not list(tmp_path.glob("run.*"))


@pytest.mark.parametrize("manifest", ["[]", '{"complete": true}', '{"complete": true, "shards": [{}]}'])
def test_a_damaged_manifest_is_named(manifest: str, tmp_path: Path) -> None:
    vectors, _ = folders(tmp_path)
    (vectors / "manifest.json").write_text(manifest)
    with pytest.raises(DataError, match=r"manifest.json (must hold a JSON object|is damaged).*; encode again into another folder"):
        Vectors(vectors)


def test_a_cut_index_is_named(tmp_path: Path) -> None:
    vectors, queries = folders(tmp_path)
    search(vectors, queries, tmp_path / "run.trec", index="Flat", progress=False)
    (file,) = vectors.glob("Flat-*.faiss")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"faiss cannot be read .*; remove it, and it is built again"):
        search(vectors, queries, tmp_path / "run.trec", index="Flat", progress=False)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"index": "Nonsense"}, {"index_parameters": "nprobe=4"}])
def test_wrong_options_name_the_remedy(wrong, tmp_path: Path) -> None:
    vectors, queries = folders(tmp_path)
    with pytest.raises(ValueError, match=str(next(iter(wrong.values()))).split("=")[0]) as caught:
        search(vectors, queries, tmp_path / "run.trec", progress=False, **wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("factory", "parameters"), [("Flat", ""), ("IVF4,Flat", "nprobe=4"), ("HNSW8", "efSearch=300")])
def test_a_full_approximate_search_finds_what_exact_search_finds(factory, parameters, tmp_path: Path) -> None:
    """Its index is kept, and not taken for one of other vectors."""
    vectors, queries = folders(tmp_path)
    options = {"k": 5, "progress": False}
    for number in range(2):
        search(vectors, queries, tmp_path / "exact.trec", **options)
        search(vectors, queries, tmp_path / "index.trec", index=factory, index_parameters=parameters, **options)
        wanted, found = read_run(tmp_path / "exact.trec"), read_run(tmp_path / "index.trec")
        shared = sum(len({hit.id for hit in wanted[query]} & {hit.id for hit in found[query]}) for query in wanted)
        assert shared >= 0.97 * 100  # a graph may miss one
        written = {file: file.stat().st_mtime_ns for file in vectors.glob("*.faiss")}
        assert len(written) == 1 + number
        search(vectors, queries, tmp_path / "again.trec", index=factory, index_parameters=parameters, **options)
        assert (tmp_path / "again.trec").read_bytes() == (tmp_path / "index.trec").read_bytes()
        assert {file: file.stat().st_mtime_ns for file in vectors.glob("*.faiss")} == written, "it was built again"
        write_vectors(tmp_path / "new", random_vectors(300, 16, 7), shuffled_ids(300), 3)
        for file in (tmp_path / "new").iterdir():
            file.rename(vectors / file.name)
        (tmp_path / "new").rmdir()


def test_run_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = {"q1": [Hit("b", 2.5), Hit("ä", float(np.float32(0.1)))], "q2": [Hit("a", -1e-7)]}
    with whole_file(tmp_path / "run.trec") as file:
        write_run(file, run)
    read = read_run(tmp_path / "run.trec")
    assert [[hit.id for hit in hits] for hits in read.values()] == [["b", "ä"], ["a"]]
    assert np.float32(read["q1"][1].score) == np.float32(0.1)


@pytest.mark.parametrize("line", ["q1 Q0 d1 1 0.5", "q1 Q0 d1 one 0.5 tag", "q1 Q0 d1 1 nan tag", "q1 Q0 d1 1 0.5 t\nq1 Q0 d1 2 0.4 t", ""])
def test_run_files_of_another_form_are_refused_by_line(line, tmp_path: Path) -> None:
    (tmp_path / "run.trec").write_text(line + "\n")
    with pytest.raises(DataError, match=r"line|holds no results") as caught:
        read_run(tmp_path / "run.trec")
    assert "\n" not in str(caught.value)


def test_an_id_with_a_blank_cannot_enter_a_run_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no single word"), whole_file(tmp_path / "run.trec") as file:
        write_run(file, {"q": [Hit("a b", 1.0)]})
    assert not list(tmp_path.iterdir())


def test_dpr_results_have_its_layout_and_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "passages.tsv").write_text("id\ttext\ttitle\n1\tParis is large\tFrance\n2\tRome too\tItaly\n3\tBerlin\tGermany\n")
    run = {"0": [Hit("2", 1.5), Hit("1", 0.5)], "1": [Hit("3", 2.0)]}
    queries = [Query("0", "Which city is large?", ["paris"]), Query("1", "Where?", [])]
    write_dpr_results(tmp_path / "out.json", run, queries, tmp_path / "passages.tsv")
    first, second = json.loads((tmp_path / "out.json").read_text())
    assert first["question"] == "Which city is large?"
    assert first["answers"] == ["paris"]
    assert first["ctxs"][1] == {"id": "1", "title": "France", "text": "Paris is large", "score": "0.5", "has_answer": True}
    assert [context["has_answer"] for context in first["ctxs"]] == [False, True]
    assert "has_answer" not in second["ctxs"][0]
    assert read_run(tmp_path / "out.json") == run


def test_dpr_results_need_the_collection_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "passages.tsv").write_text("id\ttext\ttitle\n1\tParis\tFrance\n")
    with pytest.raises(DataError, match="does not hold the passage '9'"):
        write_dpr_results(tmp_path / "out.json", {"0": [Hit("9", 1.0)]}, [Query("0", "Q", [])], tmp_path / "passages.tsv")
