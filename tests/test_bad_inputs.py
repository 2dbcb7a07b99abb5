"""Files that are damaged, of another kind, hostile or odd: one clear line, nothing written, and no wrong figure without a word."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from commands import Commands, commands
from conftest import rows, write_beir
from contaccum.common.errors import DataError
from contaccum.common.outputs import read_json, write_json
from contaccum.common.sizes import parse_bytes
from contaccum.data import answers
from contaccum.data.mine import mine
from contaccum.data.prepare import prepare
from contaccum.data.readers.json_array import read_array
from contaccum.data.readers.queries import read_queries
from contaccum.data.training_set import load_training_set
from contaccum.methods.config import TrainConfig, load_config
from contaccum.report.folders import read_run_folder
from contaccum.retrieval.encode import encode
from contaccum.retrieval.evaluate import evaluate
from contaccum.retrieval.run_metrics import evaluate_run
from contaccum.retrieval.runs import read_run
from contaccum.retrieval.search import search
from contaccum.retrieval.shards import id_array, write_array, write_shard
from data_files import jsonl as lines
from data_files import write, write_pairs
from report_runs import make_run, write_lines

__all__ = ["commands"]


def assert_one_line(error: pytest.ExceptionInfo[BaseException]) -> None:
    assert "\n" not in str(error.value)


# Configurations

YAML = {
    "mixed keys": b"1: 2\nlr: 1.0\nx: 3\n",
    "latin-1": b"data: caf\xe9\n",
    "a NUL": b'data: "a\\0b"\noutput: x\n',
    "half a surrogate pair": b'data: "\\ud800"\noutput: x\n',
    "deep": b"[" * 5000,
    "a list": b"- lr\n",
    "a script": b"data: !!python/object/apply:os.system ['touch owned']\n",
    "no YAML": b"a: b: c\n\t- d",
    "a number of 5,000 digits": b"seed: " + b"9" * 5000,
    "a date that is none": b"seed: 2024-99-99\n",
    "a list for a number": b"data: a\noutput: b\nlr: [1]\n",
    "a number for a text": b"data: 1\noutput: b\n",
}


@pytest.mark.parametrize("name", YAML)
def test_a_configuration_that_cannot_be_read(name: str, tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "c.yaml", YAML[name])
    commands.refused("train", file)
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]  # nothing was run or written


def test_a_symlink_to_itself(tmp_path: Path, commands: Commands) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    out = tmp_path / "out"
    for words in (
        ("train", loop),
        ("train", "--data", loop, "--output", out),
        ("prepare", loop, "--output", out),
        ("mine", loop, "--output", out),
        ("report", loop, "--output", out),
        ("encode", loop, loop, "--output", out),
        ("search", loop, loop, "--output", out),
        ("evaluate", "--run", loop, "--qrels", loop),
        ("evaluate", loop, loop),
        ("prepare", write(tmp_path / "a.jsonl", "{}"), "--output", loop),
    ):
        commands.refused(*words)
    assert not out.exists()


def test_an_output_that_leads_nowhere(tmp_path: Path, commands: Commands, model_folder: str) -> None:
    out = tmp_path / "out"
    out.symlink_to("nowhere")
    rows = write(tmp_path / "a.jsonl", lines([{"query": "w1", "positive": "w2"}] * 4))
    for words in (
        ("prepare", rows, "--output", out),
        ("train", "--data", rows, "--model", model_folder, "--output", out, "--n-total", "2", "--n-local", "2", "--bank", "2"),
    ):
        assert commands.refused(*words).startswith(f"{out} is a symlink that leads nowhere; make what it points to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_a_name_that_is_not_utf8(commands: Commands) -> None:
    assert "is not UTF-8" in commands.refused("prepare", "caf\udce9.csv", "--output", "x")


def test_memory_beyond_all_numbers(commands: Commands) -> None:
    for text in ("9" * 400 + "GB", "1" * 19 + "TB", "0.0001"):
        with pytest.raises(ValueError, match="is not a size; write it as 11GB"):
            parse_bytes(text)
    assert "is not a size" in commands.refused("plan", "--memory", "9" * 400 + "GB")


def test_numbers_beyond_all_use_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"n_total=\d+ is too large"):
        load_config(None, {"data": "a", "output": "b", "n_total": 2**70}).check_values()
    with pytest.raises(ValueError, match="lr='1e' is not of type float"):
        load_config(None, {"lr": "1e"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pairs", "0"), "pairs=0 are too few"),
        (("--pairs", "3"), "pairs=3 are too few"),
        (("--epochs", "0"), "epochs=0.0 must be above 0"),
        (("--epochs", "nan"), "epochs=nan is not a finite number"),
        (("--seed", "-1"), "seed=-1 is negative"),
    ],
)
def test_quickstart_refuses_before_it_writes(options, message: str, tmp_path: Path, commands: Commands) -> None:
    assert message in commands.refused("quickstart", "--output", tmp_path / "q", *options)
    assert not list(tmp_path.iterdir())


# Queries and runs


@pytest.mark.parametrize(
    "field",
    ["[" * 300 + "]" * 300, "'Paris'", "{'a': 1}", "7", "[None]", "[['a']]", "__import__('os')", "", "['a'", "[1" + "0" * 5000 + "]"],
)
def test_a_question_whose_answers_are_no_list_of_texts(field: str, tmp_path: Path) -> None:
    file = write(tmp_path / "q.csv", f"who?\t['a']\nwhere?\t{field}\n")
    with pytest.raises(DataError, match=r"line 2: a question, a tab and a list of answers are needed, not") as error:
        read_queries(file)
    assert_one_line(error)


def test_a_question_beyond_csvs_usual_limit_is_read(tmp_path: Path) -> None:
    long = "word " * 60_000
    (query,) = read_queries(write(tmp_path / "q.csv", f"{long}\t['a', 1912]\n"))
    assert (query.text, query.answers) == (long, ["a", "1912"])
    with pytest.raises(DataError, match="field larger than field limit"):
        read_queries(write(tmp_path / "q.csv", f"{'x' * 2**25}\t['a']\n"))


def dpr_results(file: Path, **changes: object) -> Path:
    contexts = [{"id": "p1", "text": "a city in Asia", "score": "2.5"}]
    write_json(file, [{"id": "q1", "question": "who?", "answers": ["Paris"], "ctxs": contexts} | changes])
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": "Paris"}, "'answers' must be a list of texts, not 'Paris'"),
        ({"answers": [None]}, "'answers' must be a list of texts"),
        ({"question": None}, "no text under 'question'"),
        ({"ctxs": [{"id": "p1", "text": None, "score": 1}]}, "no text under 'text'"),
        ({"ctxs": [{"id": None, "text": "a", "score": 1}]}, "no text under '_id' or 'id'"),
        ({"ctxs": [{"id": "p1", "text": "a", "score": None}]}, "None is no score"),
        ({"ctxs": [{"id": "p1", "text": "a", "score": "1e999"}]}, "is no score; give a finite number"),
        ({"ctxs": [{"id": "p1", "text": "a", "score": 1}] * 2}, "a passage appears a second time"),
        ({"id": None}, "no text under '_id' or 'id'"),
        ({"ctxs": "p1"}, "a list of 'ctxs'"),
    ],
)
def test_what_is_no_retriever_output_is_not_judged(changes: dict, message: str, tmp_path: Path) -> None:
    assert evaluate_run(dpr_results(tmp_path / "r.json"), top=(1,))["metrics"] == {"Top@1": 0.0}
    with pytest.raises(DataError, match="record 1: ") as error:
        evaluate_run(dpr_results(tmp_path / "r.json", **changes))
    assert message in str(error.value)


def test_a_query_that_appears_twice_in_a_run_is_refused(tmp_path: Path) -> None:
    file = dpr_results(tmp_path / "r.json")
    write_json(file, read_json(file) * 2)
    with pytest.raises(DataError, match="record 2: the query id 'q1' appears a second time"):
        read_run(file)


ODD_SCORES = ["nan", "x", "inf", "-inf", "1_0", "9" * 5000, "1e999"]


@pytest.mark.parametrize(
    "line", ["q Q0 d one 1 t", "q Q0 d 1 1", f"q Q0 d {'9' * 5000} 1 t", "q Q0 d ² 1 t", *(f"q Q0 d 1 {score} t" for score in ODD_SCORES)]
)
def test_a_line_that_no_run_file_has(line: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: "):
        read_run(write(tmp_path / "r.trec", line + "\n"))


def test_an_answer_that_never_ends_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SECONDS", 0.2)
    pattern, text = "(a|aa)+$", "a" * 60 + "b"
    run = dpr_results(tmp_path / "r.json", answers=[pattern], ctxs=[{"id": "p", "text": text, "score": 1}])
    with pytest.raises(DataError, match=r"the answer '\(a\|aa\)\+\$' was not looked up within 0.2 s in the passage that begins with 'aaa"):
        evaluate_run(run, match="regex")
    data = write_pairs(tmp_path / "d.jsonl", [{"query": "aaa", "positive": "b", "negatives": [text], "answers": [pattern]}])
    with pytest.raises(DataError, match="was not looked up"):
        mine(data, None, tmp_path / "out", method="existing", match="regex")
    assert not (tmp_path / "out").exists()


def test_answers_that_take_long_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these passages alone is beyond its time."""
    monkeypatch.setattr(answers, "ALL_SECONDS", 0.3)
    matcher, passages = answers.AnswerMatcher(["(a|aa)+c|z"], "regex"), ["a" * 22 + "b"] * 10_000
    began = time.perf_counter()
    with pytest.raises(DataError, match=r"was not looked up with others within 0.3 s"):
        any(matcher.found_in(passage) for passage in passages)
    assert time.perf_counter() - began < 5


def test_answers_of_a_run_have_a_limit_for_each_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ALL_SECONDS", 0.3)
    contexts = [{"id": f"p{i}", "text": f"{'a' * 18}b{i}", "score": 1} for i in range(2000)]
    run = dpr_results(tmp_path / "r.json", answers=["(a|a)*$"], ctxs=contexts)
    with pytest.raises(DataError, match=r"'\(a\|a\)\*\$' was not looked up with others within 0.3 s"):
        evaluate_run(run, match="regex")


def test_an_answer_that_calls_itself_is_refused() -> None:
    with pytest.raises(DataError, match=r"the answer '\(\?R\)' needs more memory than there is"):
        answers.has_answer(["(?R)"], "a text", "regex")


def test_queries_without_answers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a run of texts, and beside one of ids; where none has answers, nothing can be judged."""
    file = dpr_results(tmp_path / "r.json", answers=["city"])
    write_json(file, [*read_json(file), *({**read_json(file)[0], "id": name, "answers": []} for name in ("q2", "q3"))])
    queries = write(tmp_path / "q.jsonl", '{"_id": "q1", "text": "who?", "answers": ["city"]}\n{"_id": "q2", "text": "who?"}\n')
    collection = write(tmp_path / "c.jsonl", '{"_id": "p1", "text": "a city in Asia"}\n')
    for given, message in (({}, "2 of 3"), ({"queries": queries, "collection": collection}, "1 of 2")):
        assert evaluate_run(file, **given)["metrics"]["Top@1"] == 1
        assert capsys.readouterr().err == f"note: {message} queries have no answers and are left out of Top@k, as 'q2'\n"
    with pytest.raises(ValueError, match="can be judged by nothing"):
        evaluate_run(dpr_results(tmp_path / "r.json", answers=[]))


def test_an_answer_of_millions_of_copies_is_not_compiled() -> None:
    with pytest.raises(DataError, match="asks for 900,000,000 copies of its parts; count to 10,000 at most"):
        answers.AnswerMatcher(["((((a{100}){100}){100}){10}){90}"], "regex")
    assert answers.has_answer([r"\d{4}-\d{2}"], "on 2024-05", "regex")


@pytest.mark.parametrize(
    ("judged", "message"),
    [
        (["q0\td0\t0", "q1\td1\t0"], "judges no passage as relevant, so there is nothing to find"),
        (["q0\td0\t1", "q1\tnowhere\t1"], "lacks 1 of 2 relevant passages, as 'nowhere'; do they belong together?"),
    ],
)
def test_judgements_that_nothing_can_meet(judged: list[str], message: str, model_folder: str, tmp_path: Path) -> None:
    data = write_beir(tmp_path / "data", ["w1 w2", "w3"], ["w1", "w3 w4"], test=range(2))
    (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(judged) + "\n")
    with pytest.raises(DataError, match=message):
        evaluate(model_folder, data, output=tmp_path / "out", device="cpu", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("answer", "match", "share", "message"),
    [
        (" ", "string", 1.0, "1 answers are without a word, and every passage holds them, as ' '"),
        ("", "regex", 1.0, "1 answers match nothing at all too, and every passage holds them, as ''"),
        ("x*", "regex", 1.0, "1 answers match nothing at all too, and every passage holds them, as 'x*'"),
        ("^$", "regex", 0.0, ""),
        ("([", "regex", 0.0, "1 answers are no regular expressions, and no passage holds them, as '(['"),
        ("w1", "string", 1.0, ""),
    ],
)
def test_answers_that_say_nothing_are_named(
    answer: str, match: str, share: float, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [{"question": "q", "answers": [answer], "ctxs": [{"id": "d0", "text": "w1 ([", "score": 1.0}]}]
    run = write(tmp_path / "r.json", json.dumps(found))
    assert evaluate_run(run, match=match)["metrics"]["Top@1"] == share
    said = capsys.readouterr().err
    assert message in said if message else not said


def test_judged_queries_without_results_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_beir(tmp_path / "data", ["w1 w2", "w3"], ["w1", "w3 w4"], test=range(2))
    run = write(tmp_path / "r.trec", "q0 Q0 d0 1 9.0 t\n")
    assert evaluate_run(run, qrels=data, split="test")["metrics"]["MRR@10"] == 0.5
    assert "1 of 2 judged queries have no results and count as 0, as 'q1'" in capsys.readouterr().err


def test_judgements_of_queries_that_are_not_there_name_one(model_folder: str, tmp_path: Path) -> None:
    data = write_beir(tmp_path / "data", ["w1 w2", "w3"], ["w1", "w3 w4"], test=range(2))
    (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nnobody\td1\t1\n")
    with pytest.raises(DataError, match="holds none of the queries that split 'test' judges, as 'nobody'"):
        evaluate(model_folder, data, device="cpu", progress=False)


def test_texts_in_another_language_than_the_tokenizer_s_are_refused(model_folder: str, tmp_path: Path) -> None:
    passages = write(tmp_path / "p.tsv", "id\ttext\ttitle\n" + "".join(f"{i}\tUnbekannte Wörter {i}\tT\n" for i in range(9)))
    with pytest.raises(DataError, match="the tokenizer knows next to no word of the first 9 texts"):
        encode(model_folder, passages, tmp_path / "out", device="cpu", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [{"epochs": 1e308}, {"lr": 1e38}, {"scale": 1e308}, {"margin": 3.0, "similarity": "cosine"}, {"margin": float("inf")}]
)
def test_numbers_that_are_too_large(options: dict[str, Any], tmp_path: Path) -> None:
    (name, *_) = options
    with pytest.raises(ValueError, match=f"{name}="):
        TrainConfig(data="d", output=str(tmp_path / "run"), **options).check()


def test_a_source_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the source has no name"):
        prepare("", tmp_path / "out")
    assert not (tmp_path / "out").exists()


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


# Encoding


def test_a_bad_line_is_found_before_anything_is_encoded(tmp_path: Path, commands: Commands, model_folder: str) -> None:
    entries = [{"_id": f"d{i}", "text": "w1 w2"} for i in range(9)]
    corpus = write(tmp_path / "c.jsonl", lines([*entries, entries[0]]))
    assert "line 10: the id 'd0' appears a second time" in commands.refused(
        *("encode", model_folder, corpus, "--output", tmp_path / "out" / "v", "--shard-size", "2")
    )
    assert not (tmp_path / "out").exists()


def test_bad_judgements_are_found_before_anything_is_encoded(tmp_path: Path, commands: Commands, model_folder: str) -> None:
    data = write_beir(tmp_path / "data", ["w1"], ["w2"], test=range(1))
    for words in (("--metrics", "x"), ("--top", "0"), ("--match", "x")):
        commands.refused("evaluate", model_folder, data, "--output", tmp_path / "out", *words)
    with open(data / "qrels" / "test.tsv", "a") as qrels:
        qrels.write("q0\td0\n")
    assert "line 3: query-id" in commands.refused("evaluate", model_folder, data, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("judged", "message"),
    [
        ("q1\td1\t0", "judges no passage as relevant"),
        ("q1\tnowhere\t1", "lacks 1 of 1 relevant passages, as 'nowhere'"),
        ("nobody\td1\t1", "queries.jsonl holds none of the queries that split 'test' judges, as 'nobody'"),
    ],
)
def test_a_test_set_that_nothing_can_meet_is_found_before_training(
    judged: str, message: str, tmp_path: Path, commands: Commands, model_folder: str
) -> None:
    data = write_beir(tmp_path / "data", ["w1", "w2"], ["w3", "w4"], train=range(2), test=range(1))
    (data / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}\n")
    words = ("train", "--data", data, "--model", model_folder, "--output", tmp_path / "run", "--n-total", "2", "--n-local", "2")
    assert message in commands.refused(*words, "--bank", "2", "--max-updates", "1")
    assert not (tmp_path / "run").exists()


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
