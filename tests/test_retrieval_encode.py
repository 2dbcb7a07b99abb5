"""Encoding: the vectors are SentenceTransformer's; interruptions, shards and processes leave no trace; what does not fit is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import texts
from contaccum.cli import app
from contaccum.common.errors import DataError
from contaccum.data.readers.queries import read_queries
from contaccum.retrieval import encode
from contaccum.retrieval.batches import by_budget
from contaccum.retrieval.encode import make_encoder
from contaccum.retrieval.shards import Vectors


def write_collection(path: Path, count: int = 100, seed: int = 0, words: int = 40) -> list[str]:
    """A JSONL collection of texts of different lengths; their texts."""
    passages = texts(count, seed, words)
    path.write_text("".join(json.dumps({"_id": f"p{i}", "text": text}) + "\n" for i, text in enumerate(passages)))
    return passages


def matrix(folder: Path) -> np.ndarray:
    return np.concatenate(list(Vectors(folder).arrays()))


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "qwen"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vectors_equal_sentence_transformers(family, dtype, tiny_encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["contaccum.retrieval.encode"], "WINDOW", 37)
    model = tiny_encoder(family)
    passages = write_collection(tmp_path / "c.jsonl")
    encode(model, tmp_path / "c.jsonl", tmp_path / "v", dtype=dtype, shard_size=45, tokens_per_batch=90, device="cpu", progress=False)
    vectors = Vectors(tmp_path / "v")
    assert (len(vectors), len(vectors.shards), vectors.dtype) == (100, 3, np.dtype(dtype))
    assert [key.decode() for key in vectors.ids_at(np.arange(100))] == [f"p{i}" for i in range(100)]
    wanted = model.encode_document(passages)
    np.testing.assert_allclose(matrix(tmp_path / "v").astype(np.float32), wanted, atol=1e-3 if dtype == "float16" else 1e-5)
    assert np.abs(np.diff(wanted, axis=0)).max() > 0.1, "all vectors are alike: the test shows nothing"


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "qwen"])
@pytest.mark.parametrize("prompt", [None, "w1 w2 "])
@pytest.mark.parametrize("task", ["query", "document"])
def test_batches_made_of_rows_are_those_that_are_padded_together(
    family, prompt, task, tiny_encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_encoder(family)
    model.prompts = {} if prompt is None else {"query": prompt, "document": prompt}
    model.max_seq_length = 24
    window = [*texts(60, 1, 40), " w1  W2 ", "unknown \u00e9\n words", "w5", ""]
    encoder = make_encoder(model, task, 90, None)
    fast = encoder.batches(window)
    assert encoder._rows, "not made of rows: the test shows nothing"
    monkeypatch.setattr(encoder, "_rows", False)
    slow = encoder.batches(window)
    assert len(fast) == len(slow)
    for (places, found), (other_places, wanted) in zip(fast, slow, strict=True):
        assert places.tolist() == other_places.tolist()
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value


def test_what_is_not_equal_in_rows_is_padded_together(tiny_encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_encoder()
    monkeypatch.setattr(
        "contaccum.retrieval.rows.AS_ROWS", {"common": {"return_tensors": None}, "text": {"padding": False, "max_length": 5}}
    )
    encoder = make_encoder(model, "document", 90, None)
    encoder.batches(texts(40, 1, 40))
    assert encoder._rows is False


def test_queries_take_the_query_tower_and_prompts_are_kept(tiny_encoder, tmp_path: Path) -> None:
    model = tiny_encoder()
    model.prompts = {"query": "w1 w2 ", "document": "w3 "}
    asked = write_collection(tmp_path / "q.jsonl", 20)
    for queries, reference in ((True, model.encode_query), (False, model.encode_document)):
        folder = tmp_path / f"v-{queries}"
        encode(model, tmp_path / "q.jsonl", folder, queries=queries, dtype="float32", device="cpu", progress=False)
        np.testing.assert_allclose(matrix(folder), reference(asked), atol=1e-5)
    assert np.abs(matrix(tmp_path / "v-True") - matrix(tmp_path / "v-False")).max() > 0.1


def test_vectors_of_a_cosine_model_are_normalised(tiny_encoder, tmp_path: Path) -> None:
    model = tiny_encoder(similarity="cosine", tied=True)
    passages = write_collection(tmp_path / "c.jsonl", 20)
    encode(model, tmp_path / "c.jsonl", tmp_path / "v", device="cpu", progress=False)
    np.testing.assert_allclose(matrix(tmp_path / "v"), model.encode_document(passages, normalize_embeddings=True), atol=1e-3)


def test_batches_keep_to_the_budget_and_hold_every_text_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    groups = by_budget(lengths, 128)
    assert sorted(np.concatenate(groups)) == list(range(500))
    assert all(len(group) * lengths[group].max() <= 128 for group in groups)
    assert [len(group) for group in by_budget(np.array([500, 1, 1]), 128)] == [1, 2]


@pytest.fixture
def encoded(tiny_encoder, tmp_path: Path):
    """(arguments of a finished run, its folder's files)."""
    tiny_encoder(dropout=0.0).save_pretrained(str(tmp_path / "model"))
    write_collection(tmp_path / "c.jsonl")
    arguments = {"model": tmp_path / "model", "texts": tmp_path / "c.jsonl", "output": tmp_path / "v", "shard_size": 30}
    options = {**arguments, "device": "cpu", "progress": False}
    assert encode(**options)["encoded"] == 100
    return options, files_of(tmp_path / "v")


def test_only_what_is_missing_or_damaged_is_encoded_again(encoded, tmp_path: Path) -> None:
    options, files = encoded
    assert encode(**options)["encoded"] == 0
    (tmp_path / "v" / "shard-00001.npy").unlink()
    assert encode(**options)["encoded"] == 30
    os.truncate(tmp_path / "v" / "shard-00003.npy", 200)
    assert encode(**options)["encoded"] == 10
    assert files_of(tmp_path / "v") == files


def test_another_model_is_refused(encoded, tiny_encoder, tmp_path: Path) -> None:
    options, files = encoded
    tiny_encoder(seed=1).save_pretrained(str(tmp_path / "other"))
    with pytest.raises(DataError, match=r"was begun with model_checksum=.*another output") as caught:
        encode(**{**options, "model": tmp_path / "other"})
    assert "\n" not in str(caught.value)
    assert files_of(tmp_path / "v") == files


@pytest.mark.parametrize("wrong", [{"dtype": "float32"}, {"shard_size": 20}, {"queries": True}, {"max_seq_length": 8}])
def test_other_settings_are_refused(wrong, encoded) -> None:
    options, _ = encoded
    with pytest.raises(DataError, match="was begun with"):
        encode(**{**options, **wrong})


def test_other_texts_are_refused(encoded, tmp_path: Path) -> None:
    options, files = encoded
    write_collection(tmp_path / "c.jsonl", seed=1)
    with pytest.raises(DataError, match="encoded from other texts"):
        encode(**options)
    assert files_of(tmp_path / "v") == files


def test_an_unfinished_folder_is_not_searched(encoded, tmp_path: Path) -> None:
    manifest = json.loads((tmp_path / "v" / "manifest.json").read_text())
    (tmp_path / "v" / "manifest.json").write_text(json.dumps({**manifest, "complete": False}))
    with pytest.raises(DataError, match="not whole yet"):
        Vectors(tmp_path / "v")


def test_vectors_too_large_for_half_precision_are_refused(tiny_encoder, tmp_path: Path) -> None:

    model = tiny_encoder(tied=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("LayerNorm.weight"):
                parameter.mul_(1e6)
    write_collection(tmp_path / "c.jsonl", 5)
    with pytest.raises(ValueError, match="use --dtype float32"):
        encode(model, tmp_path / "c.jsonl", tmp_path / "v", device="cpu", progress=False)


@pytest.mark.parametrize(
    ("wrong", "result"),
    [({"dtype": "int8"}, "float16"), ({"precision": "fp8"}, "bf16"), ({"shard_size": 0}, "1 or more"), ({"split": "test"}, "--queries")],
)
def test_wrong_options_name_the_remedy(wrong, result, tmp_path: Path) -> None:
    write_collection(tmp_path / "c.jsonl", 5)
    with pytest.raises(ValueError, match=result):
        encode("none", tmp_path / "c.jsonl", tmp_path / "v", **wrong)


def test_what_is_no_model_is_refused_in_a_line(tmp_path: Path) -> None:
    write_collection(tmp_path / "c.jsonl", 5)
    with pytest.raises(ValueError, match="none cannot be loaded as a SentenceTransformer") as caught:
        encode(tmp_path / "none", tmp_path / "c.jsonl", tmp_path / "v", progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "v").exists()


ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def command(folder: Path, output: str, shard_size: int) -> list[str]:
    places = [str(folder / name) for name in ("model", "c.jsonl")]
    return ["-m", "contaccum", "encode", *places, "--output", str(folder / output), "--shard-size", str(shard_size)]


@pytest.fixture
def one_thread():
    """The number of threads may change the last bit of a sum; the processes started here have one."""

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def encode_here(folder: Path, output: str, shard_size: int) -> None:
    encode(folder / "model", folder / "c.jsonl", folder / output, shard_size=shard_size, device="cpu", progress=False)


@pytest.mark.usefixtures("one_thread")
def test_killed_and_started_again_gives_the_same_files(tiny_encoder, tmp_path: Path) -> None:
    """kill -9 in the middle of a shard; the second run encodes only what was not there."""
    tiny_encoder(dropout=0.0).save_pretrained(str(tmp_path / "model"))
    write_collection(tmp_path / "c.jsonl", 4_000)
    encode_here(tmp_path, "whole", 50)
    process = subprocess.Popen(
        [sys.executable, *command(tmp_path, "killed", 50)], env=ALONE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "shard-00003.json").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list((tmp_path / "killed").glob("shard-?????.json")))
    assert 4 <= done < 80, "it was not interrupted in the middle"
    options = {"shard_size": 50, "device": "cpu", "progress": False}
    assert encode(tmp_path / "model", tmp_path / "c.jsonl", tmp_path / "killed", **options)["encoded"] == 4_000 - 50 * done
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.usefixtures("one_thread")
def test_two_processes_give_the_same_shards_as_one(tiny_encoder, tmp_path: Path) -> None:
    tiny_encoder(dropout=0.0).save_pretrained(str(tmp_path / "model"))
    write_collection(tmp_path / "c.jsonl", 250)
    encode_here(tmp_path, "one", 40)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, *command(tmp_path, "two", 40)], env=ALONE, check=True, capture_output=True)
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")
    assert len(Vectors(tmp_path / "two").shards) == 7


def test_a_process_that_is_missing_leaves_its_shards_out(tiny_encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_encoder()
    write_collection(tmp_path / "c.jsonl")
    options = {"shard_size": 30, "device": "cpu", "progress": False}
    for rank, complete in (("0", False), ("1", True)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert encode(model, tmp_path / "c.jsonl", tmp_path / "v", **options)["complete"] is complete


def test_the_commands_find_the_passage_that_repeats_the_query(
    tiny_encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")
    tiny_encoder(tied=True, dropout=0.0, similarity="cosine").save_pretrained(str(tmp_path / "model"))
    passages = write_collection(tmp_path / "corpus.jsonl", 80)
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps({"_id": f"q{i}", "text": passages[i]}) + "\n" for i in range(20)))
    (tmp_path / "qrels").mkdir()
    lines = "".join(f"q{i}\tp{i}\t1\n" for i in range(10))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)

    def call(*words: str) -> dict:
        app([*words, "--json"], standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    folder = str(tmp_path)
    assert call("encode", f"{folder}/model", folder, "--output", f"{folder}/v", "--device", "cpu")["texts"] == 80
    asked = call("encode", f"{folder}/model", folder, "--queries", "--split", "test", "--output", f"{folder}/q", "--device", "cpu")
    assert asked["texts"] == 10
    outputs = ["--output", f"{folder}/run.trec", "--json-output", f"{folder}/run.json"]
    assert call("search", f"{folder}/v", f"{folder}/q", "--k", "5", *outputs)["exact"]
    assert call("evaluate", "--run", f"{folder}/run.trec", "--qrels", folder, "--metrics", "MRR@5")["metrics"] == {"MRR@5": 1.0}
    at_once = call("evaluate", f"{folder}/model", folder, "--k", "5", "--metrics", "MRR@5", "--output", f"{folder}/out", "--device", "cpu")
    assert at_once["metrics"] == {"MRR@5": 1.0}
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["evaluation.json", "test.trec"]
    before = sorted(tmp_path.iterdir())
    assert call("evaluate", f"{folder}/model", folder, "--metrics", "MRR@5", "--device", "cpu")["metrics"] == {"MRR@5": 1.0}
    assert sorted(tmp_path.iterdir()) == before  # without --output nothing is left
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["run.trec"], "with --run run.trec"),
        ([], "give a model and a test set"),
        (["m", "d", "--run", "r"], "r is a run"),
    ):
        with pytest.raises(ValueError, match=message):
            call("evaluate", *words)
    first = json.loads((tmp_path / "run.json").read_text())[0]
    assert first["question"] == first["ctxs"][0]["text"] == passages[0]


def test_queries_are_read_from_every_format(tmp_path: Path) -> None:
    record = {"question": "Whose ’s?", "answers": ["a", "b"], "positive_ctxs": []}
    (tmp_path / "dpr.json").write_text(json.dumps([record, record]))
    (tmp_path / "qa.csv").write_text("who's there\t['x', \"y's\"]\nwhat\t[]\n")
    (tmp_path / "q.jsonl").write_text('{"id": 7, "query": "hello"}\n')
    assert [tuple(query) for query in read_queries(tmp_path / "dpr.json")] == [
        ("0", "Whose 's?", ["a", "b"]),
        ("1", "Whose 's?", ["a", "b"]),
    ]
    assert [tuple(query) for query in read_queries(tmp_path / "qa.csv")] == [("0", "who's there", ["x", "y's"]), ("1", "what", [])]
    assert [tuple(query) for query in read_queries(tmp_path / "q.jsonl")] == [("7", "hello", [])]


def test_queries_of_a_prepared_set_are_each_asked_once(tmp_path: Path) -> None:
    from datasets import DatasetDict

    from contaccum.data.training_set import as_table

    table = as_table({"query": ["a", "a", "b"], "positive": ["x", "y", "z"], "answers": [["1"], ["1"], ["2"]]})
    DatasetDict({"test": table}).save_to_disk(str(tmp_path / "set"))
    assert [tuple(query) for query in read_queries(tmp_path / "set", "test")] == [("0", "a", ["1"]), ("2", "b", ["2"])]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.txt", "x"),
        ("qa.tsv", "question\tno list\n"),
        ("q.jsonl", '{"id": "1"}\n'),
        ("d.jsonl", '{"id": 1, "text": "a"}\n' * 2),
        ("e.jsonl", ""),
    ],
)
def test_queries_that_cannot_be_read_are_refused_in_a_line(name, content, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        read_queries(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_the_package_imports_without_its_extras() -> None:
    blocked = ("faiss", "pytrec_eval", "scipy", "regex", "sentence_transformers", "tqdm")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import contaccum.retrieval as r; r.encode, r.search, r.evaluate"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
