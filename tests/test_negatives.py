"""Mined negatives: never a positive, never with an answer, best first; files whole or absent."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

import contaccum.data.negatives as negatives_module
from conftest import WORDS, texts, tiny_config
from contaccum.cli import app, main
from contaccum.data.bm25 import Bm25
from contaccum.data.mine import mine, read_texts
from contaccum.data.negatives import Chooser, denoise, mine_bm25, mine_dense
from contaccum.data.negatives import given as given_negatives
from contaccum.data.training import as_table, load_training_set
from contaccum.errors import DataError
from contaccum.retrieval.answers import has_answer

SHARED = Path(__file__).parents[2] / "shared"


def training_set(*rows: tuple[str, str, list[str]], negatives: list[list[str]] | None = None) -> Dataset:
    """Rows of (query, positive, answers)."""
    query, positive, answers = (list(column) for column in zip(*rows, strict=True))
    columns = {"query": query, "positive": positive, "answers": answers}
    return as_table(columns if negatives is None else columns | {"negatives": negatives})


def passages(*given_texts: str) -> Dataset:
    return Dataset.from_dict({"text": list(given_texts)})


CAPITALS = [
    "Paris Paris is the capital of France",
    "Lyon Lyon is a city of France, not the capital",
    "France The capital of France was Versailles once",
    "Rome Rome is the capital of Italy",
    "Cheese France makes cheese",
    "Tennis a racket sport",
]


# BM25


def naive_bm25(query: list[str], documents: list[list[str]], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's BM25, from its formula."""
    mean = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(documents)
    for word in query:
        having = sum(word in document for document in documents)
        idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
        for i, document in enumerate(documents):
            tf = Counter(document)[word]
            scores[i] += idf * tf / (tf + k1 * (1 - b + b * len(document) / mean))
    return scores


@pytest.mark.parametrize("depth", [1, 3, 10, 500])
def test_search_ranks_by_bm25_and_breaks_ties_by_position(depth: int) -> None:
    documents = [*texts(150, seed=1), *texts(50, seed=1), "", "w1"]
    index = Bm25(documents, stopwords=None)
    assert len(index) == len(documents)
    for query in texts(30, seed=2):
        scores = naive_bm25(query.split(), [document.split() for document in documents])
        ranked = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: (-round(scores[i], 4), i))
        assert index.search(query, depth) == ranked[:depth]


def test_search_finds_nothing_for_unknown_words_and_stop_words() -> None:
    index = Bm25(["the cat", "a dog"])
    assert index.search("", 5) == index.search("the of and", 5) == index.search("unknown", 5) == []
    assert index.search("The CAT", 5) == [0]
    assert Bm25(["the cat", "a dog"], stopwords=None).search("the", 5) == [0]


def test_a_collection_without_words_is_refused() -> None:
    with pytest.raises(DataError, match="holds no word to index"):
        Bm25(["", "...", "the"])


def test_unknown_stop_words_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"stopwords='xx' is no language that bm25s knows; use en, de, fr, ... or none$"):
        Bm25(["a cat"], stopwords="xx")


# What may be a negative


def test_negatives_contain_no_answer_and_are_no_positive_in_rank_order() -> None:
    rows = training_set(("What is the capital of France?", CAPITALS[0], ["Paris"]))
    (mined,) = mine_bm25(rows, passages(*CAPITALS), per_query=10)
    ranked = [CAPITALS[i] for i in Bm25(CAPITALS).search("What is the capital of France?", 10)]
    assert CAPITALS[0] in ranked  # the positive is found, so leaving it out is not vacuous
    assert mined == [text for text in ranked if "Paris" not in text]
    assert len(mined) == 4
    assert CAPITALS[5] not in mined  # it shares no word


def test_without_answers_only_positives_are_excluded() -> None:
    rows = training_set(("capital of France", CAPITALS[0], []), ("capital of France", CAPITALS[2], []))
    first, second = mine_bm25(rows, passages(*CAPITALS), per_query=10)
    assert first == second == [CAPITALS[i] for i in Bm25(CAPITALS).search("capital of France", 10) if i not in (0, 2)]


def test_answers_of_all_rows_of_a_query_count() -> None:
    rows = training_set(("capital of France", CAPITALS[0], ["Paris"]), ("capital of France", CAPITALS[2], ["Versailles", "Lyon"]))
    for mined in mine_bm25(rows, passages(*CAPITALS)):
        assert mined == [CAPITALS[3], CAPITALS[4]]


def test_a_positive_with_another_title_or_spacing_is_excluded() -> None:
    rows = training_set(
        ("capital of France", "Paris  is the capital of\nFrance", []), ("capital of Italy", "Italy Rome is the capital", [])
    )
    first, second = mine_bm25(rows, passages(*CAPITALS, "Rome is the capital"))
    assert CAPITALS[0] not in first
    assert "Rome is the capital" not in second
    assert CAPITALS[3] in first


def test_nothing_left_gives_an_empty_list() -> None:
    rows = training_set(("capital", CAPITALS[0], ["is", "was", "a", "makes"]), ("unknownword", CAPITALS[0], []), ("", CAPITALS[0], []))
    assert list(mine_bm25(rows, passages(*CAPITALS))) == [[], [], []]


def test_answers_without_words_say_nothing() -> None:
    rows = training_set(("capital of France", CAPITALS[0], ["", " "]))
    assert len(next(mine_bm25(rows, passages(*CAPITALS)))) == 4
    assert len(next(mine_bm25(rows, passages(*CAPITALS), match="regex"))) == 4


def test_regex_answers_exclude_by_search() -> None:
    rows = training_set(("capital of France", CAPITALS[0], ["Lyo?n|(", "ver.ailles"]))
    (mined,) = mine_bm25(rows, passages(*CAPITALS), match="regex")
    assert CAPITALS[2] not in mined  # by the valid pattern
    assert CAPITALS[1] in mined  # the other is invalid and matches nothing


def test_the_same_text_is_given_once_and_per_query_bounds_the_number() -> None:
    rows = training_set(("capital of France", "elsewhere", []))
    collection = passages(*CAPITALS, *CAPITALS, CAPITALS[0].replace(" ", "  "))
    (mined,) = mine_bm25(rows, collection, depth=100)
    assert len(mined) == len(set(mined)) == 5
    assert list(mine_bm25(rows, collection, per_query=2)) == [mined[:2]]
    assert list(mine_bm25(rows, collection, per_query=2, depth=2)) == [mined[:1]]  # the two best are one text


@given(st.data())
def test_no_chosen_negative_breaks_a_rule(data: st.DataObject) -> None:
    word = st.sampled_from(["a", "b", "é", "e\u0301", "C.", "1,5"])
    text = st.lists(word, max_size=4).map(" ".join)
    answers, positive = data.draw(st.lists(text, max_size=3)), data.draw(text)
    candidates = data.draw(st.lists(text, max_size=12))
    chosen = Chooser(training_set(("q", positive, answers)), per_query=5)("q", candidates)
    known = [answer for answer in answers if answer]
    assert not any(has_answer(known, negative) or negative == positive for negative in chosen)
    wanted = [c for c in dict.fromkeys(candidates) if c and not has_answer(known, c) and not same_but_for_title(c, positive)]
    assert chosen == wanted[:5]


def same_but_for_title(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return one == other or (bool(short) and long.endswith(" " + short))


def test_given_negatives_are_checked_again() -> None:
    rows = training_set(("q", "p", ["x"]), negatives=[["has x", "p", "fine", "fine", "good"]])
    assert list(given_negatives(rows)) == [["fine", "good"]]


@pytest.mark.parametrize(("numbers", "message"), [({"per_query": 0}, "per_query=0"), ({"per_query": 5, "depth": 4}, "depth=4")])
def test_senseless_numbers_are_refused_at_once(numbers: dict[str, int], message: str) -> None:
    rows = training_set(("q", "p", []))
    with pytest.raises(ValueError, match=message):
        mine_bm25(rows, passages("a text"), **numbers)


# Models


def word_rows(count: int) -> Dataset:
    queries = texts(count, seed=3)
    return training_set(*((query, f"{query} {query}", [WORDS[i % 7]]) for i, query in enumerate(queries)))


def test_dense_negatives_obey_the_same_rules(tiny_encoder: Callable) -> None:
    rows, collection = word_rows(12), passages(*texts(80, seed=4), *word_rows(12)["positive"])
    mined = list(mine_dense(rows, collection, tiny_encoder(dropout=0.0), per_query=5, depth=40))
    assert len(mined) == 12
    assert sum(map(len, mined)) > 30
    for row, chosen in zip(rows, mined, strict=True):
        assert len(chosen) == len(set(chosen)) <= 5
        assert row["positive"] not in chosen
        assert not any(has_answer(row["answers"], text) for text in chosen)


def test_dense_negatives_are_the_nearest_by_cosine(tiny_encoder: Callable) -> None:
    rows, collection = training_set(("w1 w2 w3", "w4 w5", [])), list(dict.fromkeys(texts(50, seed=5)))
    model = tiny_encoder(dropout=0.0)
    (mined,) = mine_dense(rows, passages(*collection), model, per_query=4, depth=20)
    vectors = model.encode_document(collection, normalize_embeddings=True)
    cosines = vectors @ model.encode_query("w1 w2 w3", normalize_embeddings=True)
    assert mined == [collection[i] for i in (-cosines).argsort()[:4]]
    (skipped,) = mine_dense(rows, passages(*collection), model, per_query=4, depth=20, range_min=2)
    assert skipped[:2] == mined[2:]
    assert list(mine_dense(rows, passages(*collection), model, per_query=4, depth=20, max_score=-2.0)) == [[]]


def test_dense_mining_in_blocks_equals_mining_at_once(tiny_encoder: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows, collection, model = word_rows(10), passages(*texts(60, seed=6)), tiny_encoder(dropout=0.0)
    whole = list(mine_dense(rows, collection, model, depth=30))
    monkeypatch.setattr(negatives_module, "DENSE_BLOCK", 3)
    monkeypatch.setattr(negatives_module, "SCORES", 100)
    assert list(mine_dense(rows, collection, model, depth=30, scratch=tmp_path)) == whole
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def cross_encoder_folder(tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_cross_encoder(tokenizer_folder, tmp_path_factory.mktemp("cross-encoder"), labels=1)


def build_cross_encoder(tokenizer_folder: str, folder: Path, labels: int) -> str:
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    config = tiny_config(dropout=0.0)
    config.num_labels, config.initializer_range = labels, 1.0  # scores that differ
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return str(folder)


def test_denoising_keeps_what_scores_a_margin_below_the_positive(cross_encoder_folder: str) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    rows = word_rows(70)  # more than one block
    candidates = [texts(6, seed=i) for i in range(70)]
    pairs = [(row["query"], text) for row, before in zip(rows, candidates, strict=True) for text in (row["positive"], *before)]
    logits = CrossEncoder(cross_encoder_folder).predict(pairs, activation_fn=torch.nn.Identity())
    scores = dict(zip(pairs, map(float, logits), strict=True))

    margin = 0.5
    kept = list(denoise(rows, candidates, cross_encoder_folder, margin=margin))
    assert 0 < sum(map(len, kept)) < 70 * 6
    for row, before, after in zip(rows, candidates, kept, strict=True):
        gaps = {text: scores[row["query"], row["positive"]] - scores[row["query"], text] for text in before}
        assert all(gap >= margin - 1e-4 for text, gap in gaps.items() if text in after)
        assert all(gap <= margin + 1e-4 for text, gap in gaps.items() if text not in after)
        assert after == [text for text in before if text in after]


def test_a_cross_encoder_with_several_labels_is_refused(tokenizer_folder: str, tmp_path: Path) -> None:
    folder = build_cross_encoder(tokenizer_folder, tmp_path, labels=3)
    with pytest.raises(ValueError, match="gives 3 scores a pair"):
        next(denoise(word_rows(1), [["w1"]], folder))


@pytest.mark.parametrize("kind", ["dense", "denoise"])
def test_a_missing_model_is_said_in_one_line_before_the_collection_is_read(kind: str, tmp_path: Path, jsonl: Callable) -> None:
    options = {"method": "dense", "model": tmp_path / "none"} if kind == "dense" else {"cross_encoder": tmp_path / "none"}
    with pytest.raises(DataError, match=r"none cannot be loaded as a \w+; give a model folder or a hub name") as error:
        mine(jsonl(4), tmp_path / "missing.tsv", tmp_path / "out", **options)
    assert "\n" not in str(error.value)


# Files


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A saved training set with splits, and the collection beside it in DPR's layout."""
    rows = [("capital of France", CAPITALS[0], ["Paris"]), ("capital of Italy", CAPITALS[3], ["Rome"])]
    tables = {"train": training_set(*rows), "dev": training_set(rows[1], negatives=[["old"]]), "test": training_set(rows[0])}
    DatasetDict(tables).save_to_disk(str(tmp_path / "prepared"))
    split = [text.split(" ", 1) for text in CAPITALS]
    lines = ["id\ttext\ttitle", *(f'{i}\t"{text}"\t{title}' for i, (title, text) in enumerate(split))]
    (tmp_path / "passages.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_mining_fills_the_split_asked_for_and_carries_the_others_over(prepared: Path) -> None:
    summary = mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    train = load_training_set(prepared / "out")
    for row in train:
        assert row["negatives"]
        assert set(row["negatives"]) < set(CAPITALS)  # title and text, as the positives
        assert not any(has_answer(row["answers"], text) for text in row["negatives"])
    for split in ("dev", "test"):
        assert load_training_set(prepared / "out", split)[:] == load_training_set(prepared / "prepared", split)[:]
    assert [summary[name] for name in ("rows", "rows_without_negatives", "passages")] == [2, 0, 6]
    assert summary["negatives"] == sum(len(texts) for texts in train["negatives"]) == 2 * summary["negatives_per_row"]
    assert summary["seconds"] > 0
    assert summary["peak_bytes"] > 2**20
    assert json.loads((prepared / "out" / "mine.json").read_text())["rows"] == 2
    assert sorted(path.name for path in prepared.iterdir()) == ["out", "passages.tsv", "prepared"]


def test_several_splits_are_mined_and_order_is_kept(prepared: Path) -> None:
    summary = mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out", splits=("dev", "train"))
    assert summary["rows"] == 3
    before, after = load_training_set(prepared / "prepared"), load_training_set(prepared / "out")
    assert after["query"][:] == before["query"][:]
    assert after["positive"][:] == before["positive"][:]
    assert load_training_set(prepared / "out", "dev")["negatives"][0] == after["negatives"][1] != ["old"]


def test_jsonl_without_a_collection_mines_among_its_positives(jsonl: Callable, tmp_path: Path) -> None:
    source = jsonl(40)
    summary = mine(source, None, tmp_path / "out", per_query=3)
    positives = set(load_training_set(source)["positive"])
    mined = load_training_set(tmp_path / "out")
    assert summary["passages"] == len(positives)
    assert 0 < summary["negatives"] <= 120
    assert all(row["positive"] not in row["negatives"] and set(row["negatives"]) <= positives for row in mined)


def test_a_beir_folder_is_training_set_and_collection(tmp_path: Path) -> None:
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{i}", "title": text.split(" ", 1)[0], "text": text.split(" ", 1)[1]} for i, text in enumerate(CAPITALS)]
    (beir / "corpus.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (beir / "queries.jsonl").write_text(json.dumps({"_id": "q0", "text": "capital of France"}) + "\n")
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\nq0\td2\t1\n")
    mine(beir, None, tmp_path / "out", splits=("test",))
    for row in load_training_set(tmp_path / "out", "test"):
        assert row["negatives"] == [CAPITALS[1], CAPITALS[3], CAPITALS[4]]
    with pytest.raises(DataError, match="no split 'train'; it has test"):
        mine(beir, None, tmp_path / "other")


def test_jsonl_collections_need_a_text_and_may_have_a_title(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"text": "one"}\n\n{"title": "T", "text": "two"}\n')
    assert list(read_texts(file)) == ["one", "T two"]
    file.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match="line 2: no text under 'text'"):
        list(read_texts(file))
    file.write_text("")
    with pytest.raises(DataError, match="is empty"):
        list(read_texts(file))
    with pytest.raises(DataError, match="of no known kind"):
        read_texts(file.rename(tmp_path / "c.docx"))


def test_existing_output_is_refused_and_an_empty_folder_is_not(prepared: Path) -> None:
    (prepared / "out").mkdir()
    mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    before = sorted(path.name for path in (prepared / "out").rglob("*"))
    with pytest.raises(ValueError, match=r"out exists already; remove it or choose another output$"):
        mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert sorted(path.name for path in (prepared / "out").rglob("*")) == before


def test_failed_mining_leaves_nothing(prepared: Path) -> None:
    (prepared / "passages.tsv").write_text("id\ttext\ttitle\n1\ta text\ta title\n2\tonly a text\n")
    with pytest.raises(DataError, match="line 3"):
        mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert sorted(path.name for path in prepared.iterdir()) == ["passages.tsv", "prepared"]


def test_a_failure_while_negatives_are_written_leaves_nothing(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(self: Bm25, query: str, depth: int) -> list[int]:
        if "Italy" in query:
            raise KeyboardInterrupt
        return [1]

    monkeypatch.setattr(Bm25, "search", search)
    with pytest.raises(KeyboardInterrupt):
        mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert sorted(path.name for path in prepared.iterdir()) == ["passages.tsv", "prepared"]


def test_killed_mining_leaves_no_output_under_its_name(prepared: Path) -> None:
    endless = prepared / "endless.jsonl"  # a collection without an end keeps the process at work until it is killed
    os.mkfifo(endless)
    held_open = os.open(endless, os.O_RDWR)
    arguments = [prepared / "prepared", "--collection", endless, "--output", prepared / "out"]
    process = subprocess.Popen([sys.executable, "-m", "contaccum", "mine", *map(str, arguments)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(prepared.glob(".out.*/passages.arrow")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    os.close(held_open)
    assert list(prepared.glob(".out.*/passages.arrow"))  # it was at work
    assert not (prepared / "out").exists()
    mine(prepared / "prepared", prepared / "passages.tsv", prepared / "out")
    assert len(load_training_set(prepared / "out")) == 2


def test_dense_mining_and_denoising_from_files(prepared: Path, tiny_encoder: Callable, cross_encoder_folder: str) -> None:
    tiny_encoder(dropout=0.0).save_pretrained(str(prepared / "model"))
    options = {"method": "dense", "model": prepared / "model", "depth": 6, "per_query": 3}
    mine(prepared / "prepared", prepared / "passages.tsv", prepared / "dense", **options)
    dense = load_training_set(prepared / "dense")["negatives"][:]
    assert [len(texts) for texts in dense] == [3, 3]
    mine(prepared / "dense", None, prepared / "all", method="given", cross_encoder=cross_encoder_folder, margin=-1e9)
    assert load_training_set(prepared / "all")["negatives"][:] == dense
    summary = mine(prepared / "dense", None, prepared / "none", method="given", cross_encoder=cross_encoder_folder, margin=1e9)
    assert [summary[name] for name in ("rows", "rows_without_negatives", "negatives", "passages")] == [2, 2, 0, 0]


# Command line


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["contaccum", "mine", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_command_prints_json(prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [prepared / "prepared", "--collection", prepared / "passages.tsv", "--output", prepared / "out", "--per-query", 2, "--json"]
    assert run_cli(monkeypatch, *arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["negatives"] == 4
    assert load_training_set(prepared / "out")[0]["negatives"] == [CAPITALS[2], CAPITALS[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "magic"], "method='magic' is unknown; choose one of bm25, dense, given"),
        (["--method", "dense"], "needs the folder or name of a trained model"),
        (["--split", "valid"], "has no split 'valid'; it has train, dev, test"),
        (["--split", "dev", "--split", "dev"], "none twice"),
        (["--match", "fuzzy"], "match='fuzzy' is unknown; choose one of string, regex"),
        (["--stopwords", "xx"], "stopwords='xx' is no language"),
        (["--per-query", "0"], "per_query=0 asks for no negatives"),
        (["--depth", "5"], "depth=5 passages cannot give per_query=10 negatives"),
        (["--collection", "missing.tsv"], "missing.tsv does not exist"),
    ],
)
def test_command_refuses_bad_options_in_one_line(
    options: list[str], message: str, prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, prepared / "prepared", "--output", prepared / "out", *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert message in line
    assert sorted(path.name for path in prepared.iterdir()) == ["passages.tsv", "prepared"]


def test_help_shows_an_example() -> None:
    command = next(command for command in app.registered_commands if command.name == "mine")
    assert "Example: contaccum mine " in (command.callback.__doc__ or "")


# The real thing


@pytest.mark.slow
def test_squad_wiki(tmp_path: Path) -> None:
    folder = SHARED / "data" / "squad-wiki"
    if not folder.exists():
        pytest.skip(f"{folder} is missing: put the squad-wiki files there")
    from contaccum.data.dpr import training_rows
    from contaccum.data.rows import Tally

    rows = list(training_rows(folder / "biencoder-squad-train.json.xz", Tally()))
    as_table({name: [row[name] for row in rows] for name in rows[0]}).save_to_disk(str(tmp_path / "squad"))
    summary = mine(tmp_path / "squad", folder / "passages.tsv.xz", tmp_path / "mined")
    assert [summary[name] for name in ("rows", "rows_without_negatives", "passages")] == [6499, 0, 105123]
    assert summary["negatives_per_row"] > 9.9
    for row in load_training_set(tmp_path / "mined"):
        assert row["answers"]
        assert not any(has_answer(row["answers"], text) or text == row["positive"] for text in row["negatives"])
