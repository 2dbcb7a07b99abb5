"""Files that are damaged, of another kind, hostile or odd: one clear line, nothing written, and no wrong figure without a word."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from commands import Commands, commands
from conftest import write_beir
from contaccum.common.errors import DataError
from contaccum.common.outputs import read_json, write_json
from contaccum.common.sizes import parse_bytes
from contaccum.data import answers
from contaccum.data.mine import mine
from contaccum.data.prepare import prepare
from contaccum.data.readers.queries import read_queries
from contaccum.methods.config import TrainConfig, load_config
from contaccum.retrieval.encode import encode
from contaccum.retrieval.evaluate import evaluate
from contaccum.retrieval.run_metrics import evaluate_run
from contaccum.retrieval.runs import read_run
from data_files import assert_one_line, write, write_pairs
from data_files import jsonl as lines

__all__ = ["commands"]


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
