"""What `compare` compares: held-out pairs of any data, sizes that fit rows and time, and the model as it was given."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("bm25s", reason="needs contaccum[mine]")

from compared import OPTIONS, table
from conftest import write_beir
from contaccum import compare
from contaccum.common.errors import DataError, FailedRunsError
from contaccum.comparison.compare import BEFORE
from contaccum.comparison.sizing import Sizes, Speed, described, sizes
from contaccum.comparison.source import Columns, Prepared, prepared
from contaccum.comparison.start import start_of
from contaccum.data.readers.beir import read_qrels, read_texts
from contaccum.data.training_set import load_training_set


class TestSource:
    def test_no_text_of_a_held_out_pair_is_trained_on(self, tmp_path: Path) -> None:
        chance = random.Random(0)
        file = tmp_path / "faq.jsonl"
        lines = [{"question": f"how {i} {i % 7}?", "answer": f"answer {chance.randrange(250)}"} for i in range(600)]
        lines += [
            {"question": f"HOW  {i} {i % 7}?", "answer": f"another {i}"} for i in range(0, 600, 5)
        ]  # the same question, written apart
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = prepared(file, tmp_path / "data", Columns())
        parts = {split: load_training_set(data.folder, split) for split in ("train", "dev", "test")}
        assert sum(map(len, parts.values())) == 720
        plain = {
            split: {" ".join(text.lower().split()) for name in ("query", "positive") for text in part[name]}
            for split, part in parts.items()
        }
        assert not plain["train"] & plain["test"]
        assert not plain["train"] & plain["dev"]
        assert not plain["dev"] & plain["test"]
        assert 50 <= len(parts["test"]) <= 80

    def test_the_collection_is_everything_and_answers_are_where_they_belong(self, tmp_path: Path) -> None:
        data = prepared(table(tmp_path), tmp_path / "data", Columns())
        corpus, queries = read_texts(data.beir / "corpus.jsonl"), read_texts(data.beir / "queries.jsonl")
        assert len(corpus) == data.passages == 300
        test = load_training_set(data.folder, "test")
        qrels = read_qrels(data.beir / "qrels" / "test.tsv")
        judged = {(queries[query], corpus[doc]) for query, grades in qrels.items() for doc in grades}
        assert judged == set(zip(test["query"], test["positive"], strict=True))

    def test_splits_of_the_source_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "beir"
        (folder / "qrels").mkdir(parents=True)
        (folder / "corpus.jsonl").write_text(
            "".join(json.dumps({"_id": f"d{i}", "title": "T", "text": f"text {i}"}) + "\n" for i in range(90))
        )
        (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": f"q{i}", "text": f"query {i}"}) + "\n" for i in range(80)))
        for split, numbers in (("train", range(60)), ("test", range(60, 80))):
            (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td{i}\t1\n" for i in numbers))
        data = prepared(folder, tmp_path / "data", Columns())
        assert set(load_training_set(data.folder, "test")["query"]) == {f"query {i}" for i in range(60, 80)}
        assert (data.rows, data.queries, data.passages) == (57, 20, 90)  # 3 for the curve; ten passages belong to no row

    def test_few_queries_are_few_however_many_rows_they_have(self, tmp_path: Path) -> None:
        queries, passages = [f"query {i}" for i in range(60)], [f"text {i}" for i in range(120)]
        data = write_beir(tmp_path / "beir", queries, passages, train=range(40))
        judged = "".join(f"q{i}\td{doc}\t1\n" for i in range(40, 60) for doc in (i, i + 20, i + 40, i + 60))
        (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
        found = prepared(data, tmp_path / "data", Columns())
        assert len(load_training_set(found.folder, "test")) == 80
        assert "note: 20 test queries are few: only large differences will show" in found.lines
        assert found.lines[-1].endswith("20 test queries, 120 passages to search")

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (["query,positive", "one,two"], "1 rows are too few"),
            (["query,positive", *["same,same"] * 40], "40 rows are too few, or share too many texts"),
            (["query,positive", *[f"question {i},the one answer" for i in range(40)]], "share too many texts"),
            (["a,b", "1,2", "3,4"], "a.csv: none of its columns"),
            (["a,b", "1,word", "3,other"], "only b of its columns"),
            (["text", *[f"word {i}" for i in range(9)]], "two columns of texts are needed"),
            ([f"{'a long first question ' * 5},{'and its answer ' * 9}", "c,d"], "the first line must name the columns"),
            (["query,positive", *[f"q{i}," for i in range(20)]], "no usable record"),
            (["query,positive"], "is empty"),
        ],
    )
    def test_what_cannot_be_compared_is_refused_in_one_line(
        self, lines: list[str], message: str, tmp_path: Path, model_folder: str
    ) -> None:
        file = tmp_path / "a.csv"
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(DataError, match=message) as refused:
            compare(file, model=model_folder, output=tmp_path / "out", say=lambda line: None)
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "out").exists()

    def test_empty_cells_are_left_out_and_counted(self, tmp_path: Path) -> None:
        file = table(tmp_path)
        file.write_text(file.read_text() + "300,,no question\n301,no answer,\n302,  ,blank\n")
        data = prepared(file, tmp_path / "data", Columns())
        assert "train: left out 2 rows with a blank query" in data.lines
        assert "train: left out 1 row with a blank positive" in data.lines

    @pytest.mark.parametrize("mark", [";", "\t"])
    def test_a_csv_by_semicolons_or_tabs_is_read(self, mark: str, tmp_path: Path) -> None:
        file = tmp_path / "a.csv"
        file.write_text(f"Frage{mark}Antwort\n" + "".join(f"was, wie {i}{mark}so, und {i}\n" for i in range(60)))
        data = prepared(file, tmp_path / "data", Columns())
        assert data.passages == 60
        assert load_training_set(data.folder, "test")["query"][0].startswith("was, wie ")

    def test_a_json_array_of_pairs_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "a.json"
        file.write_text(json.dumps([{"question": f"what {i}", "answer": f"that {i}"} for i in range(60)], indent=1))
        assert prepared(file, tmp_path / "data", Columns()).passages == 60

    def test_columns_that_are_not_there_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no column ask; columns there: id, Question, answer"):
            prepared(table(tmp_path), tmp_path / "data", Columns(query="ask"))

    def test_one_column_cannot_be_both(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="column 'answer' is chosen twice"):
            prepared(table(tmp_path), tmp_path / "data", Columns(query="answer", positive="answer"))

    @pytest.mark.parametrize(
        ("names", "query", "positive", "negatives"),
        [
            (["anchor", "positive", "negative"], "anchor", "positive", ("negative",)),
            (["Query Text", "hard_negative_1", "passage"], "Query Text", "passage", ("hard_negative_1",)),
            (["title", "text", "query"], "query", "text", ()),
            (["erste", "zweite"], "erste", "zweite", ()),
            (["document", "erste"], "erste", "document", ()),
            (["kind", "erste", "zweite"], "erste", "zweite", ()),
        ],
    )
    def test_columns_are_guessed(self, names: list[str], query: str, positive: str, negatives: tuple[str, ...], tmp_path: Path) -> None:
        from contaccum.data.guess import guess_columns

        file = tmp_path / "a.jsonl"
        blanks = {"kind": "-"}  # one word
        lines = [{name: f"{name}{blanks.get(name, ' ')}{i}" for name in names} for i in range(5)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        guess = guess_columns(str(file))
        assert (guess.columns.query, guess.columns.positive, guess.columns.negatives) == (query, positive, negatives)


def fake(count: int, passages: int = 0) -> Prepared:
    return Prepared("nowhere", count, 500, passages or count)


def chosen(data: Prepared, seconds_per_text: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Sizes:
    monkeypatch.setattr(
        "contaccum.comparison.sizing._probe", lambda *_: Speed(6 * seconds_per_text, 2 * seconds_per_text, seconds_per_text)
    )
    given = {
        "n_total": None,
        "n_local": None,
        "epochs": None,
        "tokens": 128,
        "full_tokens": 256,
        "fixed_tokens": False,
        "minutes": 10.0,
        **options,
    }
    return sizes(data, None, ["gradaccum", "gradcache", "contaccum"], 1, **given)


def test_too_few_rows_are_refused_before_anything_is_trained(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\d+ rows are left to train on, too few to compare methods; give 32 or more"):
        compare(table(tmp_path, 12), model=model_folder, output=tmp_path / "out", say=lambda line: None)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="n_total=512 is more than the"):
        compare(table(tmp_path), **{**OPTIONS, "n_total": 512}, model=model_folder, output=tmp_path / "out", say=lambda line: None)


def test_sizes_fit_the_rows_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    quick = chosen(fake(4300), 1e-4, monkeypatch)
    assert (quick.n_total, quick.n_local, quick.epochs, quick.limit, quick.passages) == (32, 8, 1.0, None, None)
    assert chosen(fake(20_000), 1e-5, monkeypatch).n_total == 128
    assert chosen(fake(60_000), 1e-5, monkeypatch).epochs == 1.0
    small = chosen(fake(300), 1e-4, monkeypatch)
    assert (small.n_total, small.n_local) == (16, 8)
    slow = chosen(fake(1_000_000), 0.02, monkeypatch)
    assert slow.epochs == 1.0
    assert slow.tokens == 64
    assert slow.passages is not None
    assert slow.limit is not None
    assert 1000 <= slow.limit < 10_000
    assert chosen(fake(1_000_000), 0.02, monkeypatch, minutes=None).limit is None
    assert slow.limit < chosen(fake(1_000_000), 0.02, monkeypatch, minutes=60.0).limit


def test_what_is_cut_for_time_is_said_and_is_whole_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def notes(size: Sizes) -> list[str]:
        return [line for line in described(size, fake(300), "m", "", 2e-5, None) if "as a CPU is slow" in line]

    slow = chosen(fake(300), 1.0, monkeypatch)
    assert (slow.epochs, slow.full_epochs, slow.tokens, slow.full_tokens) == (1.0, 3.0, 64, 256)
    assert notes(slow) == [
        "note: 1 epoch instead of 3 and 64 tokens of a text instead of 256, as a CPU is slow; the command at the end trains with 3 and 256"
    ]
    quick = chosen(fake(300), 1e-4, monkeypatch)
    assert notes(quick) == ["note: 128 tokens of a text instead of 256, as a CPU is slow; the command at the end trains with 256"]
    assert not notes(chosen(fake(300), 1e-4, monkeypatch, tokens=256))


def test_the_command_at_the_end_is_not_cut(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, Any]()
    monkeypatch.setattr("contaccum.comparison.sizing.SHORT", 16)
    monkeypatch.setattr("contaccum.comparison.sizing._probe", lambda *_: Speed(6.0, 2.0, 1.0))
    monkeypatch.setattr("contaccum.comparison.sizing.FEWEST_ROWS", 32)
    monkeypatch.setattr("contaccum.comparison.compare._run", lambda *_: [])
    monkeypatch.setattr("contaccum.comparison.outcome.outcome", lambda folder, runs, options, *_: given.update(options))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    configurations = {"one": {"method": "contaccum"}, "other": {"method": "contaccum", "epochs": 2.0}}
    compare(table(tmp_path, 120), model=model_folder, output=tmp_path / "out", configurations=configurations, say=lambda line: None)
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert (sizes["epochs"], sizes["tokens"]) == (1.0, 16), "the time is short"
    assert [(given[name]["epochs"], given[name]["max_seq_length"]) for name in ("one", "other")] == [(3.0, 64), (2.0, 64)]


@pytest.mark.parametrize(
    ("rows", "n_local", "n_total"), [(4300, 64, 128), (4300, 12, 36), (300, 5, 15), (300, 8, 16), (300, 200, 200), (16, 6, 12), (40, 1, 16)]
)
def test_samples_of_an_update_are_a_multiple_of_those_in_memory(
    rows: int, n_local: int, n_total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = chosen(fake(rows), 1e-4, monkeypatch, n_local=n_local)
    assert (size.n_total, size.n_local) == (n_total, n_local)


def test_more_samples_in_memory_than_rows_are_refused(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_local=500 is more than the 102 rows to train on; use at most that many"):
        compare(table(tmp_path, 120), model=model_folder, output=tmp_path / "out", n_local=500, say=lambda line: None)
    assert not (tmp_path / "out").exists()


def test_three_runs_on_two_cores_take_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    size = chosen(fake(1000, passages=1), 1e-2, monkeypatch, epochs=1)
    rest = 12 + 1e-2 + 6 * 700 * 1e-2  # beginning, judging and the curve
    assert size.expected_seconds == pytest.approx(2 * (6e-2 * 1000 + rest))  # gradaccum and contaccum; GradCache beside them


def saved(folder: Path, model_folder: str, *others: Any, tokens: int = 24, **told: Any) -> str:
    """A SentenceTransformer of a Transformer and these modules."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    transformer = Transformer(model_folder)
    transformer.max_seq_length = tokens
    SentenceTransformer(modules=[transformer, *others], device="cpu", **told).save_pretrained(str(folder))
    return str(folder)


def cells_of(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> dict[str, dict[str, Any]]:
    """Fields of each run that `compare` would do, by name."""
    cells = list[Any]()
    monkeypatch.setattr("contaccum.comparison.compare._run", lambda given, *_: cells.extend(given) or [cell.name for cell in given])
    with pytest.raises(FailedRunsError):
        compare(*args, **options)
    return {cell.group: cell.options for cell in cells}


def test_the_model_of_every_run_is_the_one_that_was_given(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules, prompts, similarity and length: before training it has its own vectors. Nothing is drawn while it is loaded."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling

    from contaccum.comparison.outcome import command
    from contaccum.experiments.baselines import untrained_model

    told = {"prompts": {"query": "w1 w2: ", "document": "w3: "}, "similarity_fn_name": "dot"}
    model, lines = saved(tmp_path / "own", model_folder, Pooling(16, pooling_mode="max"), Dense(16, 8), **told), list[str]()
    given = {name: value for name, value in OPTIONS.items() if name != "max_seq_length"}
    cells = cells_of(monkeypatch, table(tmp_path, 120), model=model, output=tmp_path / "out", **given, say=lines.append)
    (line,) = (line for line in lines if line.startswith("every method: "))
    assert "24 tokens of a text" in line
    assert line.endswith(
        "own modules (Transformer, Pooling by max, Dense), dot product, queries begin with 'w1 w2: ', passages begin with 'w3: '"
    )
    fields = {"pooling": "own", "similarity": "dot", "max_seq_length": 24, "query_prompt": "w1 w2: ", "passage_prompt": "w3: "}
    for name in ("gradaccum", "gradcache", "contaccum", BEFORE):
        assert {field: cells[name][field] for field in fields} == fields
    shown = command(Prepared("data", 1, 1, 1), cells["contaccum"], tmp_path / "final")
    assert "--pooling own --n-total" in shown, "dot product is the default of train"
    assert "--passage-prompt 'w3: ' --query-prompt 'w1 w2: '" in shown
    before, itself = untrained_model(cells[BEFORE], "cpu"), SentenceTransformer(model, device="cpu")
    texts = ["w1 w5 w9", "w7"]
    assert before.encode_query(texts) == pytest.approx(itself.encode_query(texts), abs=1e-6)
    assert before.encode_document(texts) == pytest.approx(itself.encode_document(texts), abs=1e-6)


@pytest.mark.parametrize(
    ("kinds", "told", "expected", "words"),
    [
        (["mean"], {}, {"pooling": "mean", "similarity": "cosine", "tied": True}, ""),
        (["cls", "normalize"], {}, {"pooling": "cls", "similarity": "cosine", "tied": True}, ", cls pooling"),
        (["mean", "normalize"], {"similarity_fn_name": "dot"}, {"pooling": "mean", "similarity": "cosine", "tied": True}, ""),
        (["mean"], {"similarity_fn_name": "dot"}, {"pooling": "mean", "similarity": "dot", "tied": True}, ", dot product"),
        (["max"], {}, {"pooling": "own", "similarity": "cosine", "tied": True}, ", own modules (Transformer, Pooling by max)"),
        (
            ["mean"],
            {"prompts": {"query": "w1 ", "document": "w2 "}},
            {"pooling": "mean", "similarity": "cosine", "tied": True, "query_prompt": "w1 ", "passage_prompt": "w2 "},
            ", queries begin with 'w1 ', passages begin with 'w2 '",
        ),
        (["no prompt"], {}, {"pooling": "mean", "similarity": "cosine", "tied": True, "include_prompt": False}, ", prompts are not pooled"),
    ],
)
def test_what_a_model_is_saved_with(
    kinds: list[str], told: dict[str, Any], expected: dict[str, Any], words: str, model_folder: str, tmp_path: Path
) -> None:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    modules = {"normalize": Normalize(), "no prompt": Pooling(16, pooling_mode="mean", include_prompt=False)}
    others = [modules.get(kind) or Pooling(16, pooling_mode=kind) for kind in kinds]
    model = saved(tmp_path / "model", model_folder, *others, **told)
    found = start_of(model, tmp_path / "start.json")
    assert found.fields == expected
    assert found.tokens == 24
    assert found.in_words(found.fields) == words
    shutil.rmtree(model)
    assert start_of(model, tmp_path / "start.json") == found, "it is looked at once"


def test_what_is_said_of_the_model_is_overridden_by_settings(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = saved(tmp_path / "model", model_folder, Pooling(16, pooling_mode="max"), prompts={"query": "w1 "})
    settings, options = (
        {"pooling": "cls", "query_prompt": None, "epochs": 2},
        {"model": model, "output": tmp_path / "out", "say": lambda line: None},
    )
    given = {name: value for name, value in OPTIONS.items() if name != "epochs"}
    cells = cells_of(monkeypatch, table(tmp_path, 120), **given, **options, settings=settings)
    assert [(cells[name]["pooling"], cells[name]["query_prompt"]) for name in ("contaccum", BEFORE)] == [("cls", None)] * 2
    assert cells["contaccum"]["epochs"] == 2


def test_two_towers_start_as_two(model_folder: str, tmp_path: Path) -> None:
    from contaccum import dual_encoder

    dual_encoder(model_folder, pooling="cls").save_pretrained(str(tmp_path / "two"))
    assert start_of(str(tmp_path / "two"), tmp_path / "start.json").fields == {"pooling": "cls", "similarity": "dot", "tied": False}
    assert start_of(model_folder, tmp_path / "plain.json").fields == {"pooling": "mean"}


def test_no_bar_is_drawn_in_python_and_the_caller_s_setting_stays(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    file = table(tmp_path, 120)
    cells_of(monkeypatch, file, model=model_folder, output=tmp_path / "out", **OPTIONS, say=lambda line: None)
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    cells_of(monkeypatch, file, model=model_folder, output=tmp_path / "again", **OPTIONS, say=lambda line: None)
    assert not logging.is_progress_bar_enabled()
