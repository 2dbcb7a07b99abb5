"""Pairs from plain text: what is prepared, how pairs are drawn, and that they depend on seed, epoch and row alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from contaccum.data.documents import cut
from contaccum.data.drawn_pairs import KINDS, DrawPairs, drawn_kind, drawn_pairs, uniform
from contaccum.data.prepare import prepare
from contaccum.data.training_set import load_training_set
from data_files import assert_refused, jsonl, out_folder, write

out = pytest.fixture(out_folder)
WORDS = [f"w{i}" for i in range(500)]


def sentences(count: int, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(" ".join(chance.choices(WORDS, k=chance.randint(5, 9))) + "." for _ in range(count))


def corpus(folder: Path, count: int = 40) -> Path:
    records = [{"_id": str(i), "title": f"title {i}", "text": sentences(4 + i % 5, seed=i)} for i in range(count)]
    return write(folder / "corpus.jsonl", jsonl(records))


def drawn(path: Path, seed: int = 0, epoch: int = 0) -> tuple[list[str], list[str]]:
    table, draw = drawn_pairs(path, drawn_kind(path) or "", "train", None, seed)
    draw.epoch = epoch
    rows = table[:]
    return rows["query"], rows["positive"]


@pytest.mark.parametrize("kind", KINDS)
def test_titles_tell_equal_texts_apart_only_where_they_are_used(tmp_path: Path, out: Path, kind: str) -> None:
    text = sentences(6, seed=0)
    path = write(tmp_path / "corpus.jsonl", jsonl([{"_id": str(i), "title": f"title {i}", "text": text} for i in range(3)]))
    prepare(path, out, unsupervised=kind)
    table, _ = drawn_pairs(out, kind, "train", None, 0)
    assert len(table) == (3 if kind in ("title-body", "dropout") else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_pair_are_of_its_document(tmp_path: Path, out: Path, kind: str) -> None:
    prepare(corpus(tmp_path), out, unsupervised=kind)
    assert drawn_kind(out) == kind
    for epoch in range(3):
        for i, (query, positive) in enumerate(zip(*drawn(out, epoch=epoch), strict=True)):
            text = sentences(4 + i % 5, seed=i)
            whole = f"title {i} {text}"
            left = {"title-body": f"title {i}", "dropout": whole}.get(kind)
            assert query == left if left else query in text
            if kind == "crops":
                assert positive in text
                assert all(f" {side} " in f" {text} " for side in (query, positive)), "a word was cut"
                assert all(len(side.split()) >= 2 and len(side) < 0.5 * len(text) + 12 for side in (query, positive))
            elif kind == "inverse-cloze":
                assert positive in (text, " ".join(text.replace(query, "").split()))
            elif kind == "neighbours":
                assert f"{query} {positive}" in text
                assert 1 <= query.count(".") <= 3
                assert 1 <= positive.count(".") <= 3
            else:
                assert positive == (whole if kind == "dropout" else text)


@pytest.mark.parametrize("kind", ["crops", "inverse-cloze", "neighbours"])
def test_pairs_are_others_in_every_epoch_and_for_every_seed(tmp_path: Path, out: Path, kind: str) -> None:
    prepare(corpus(tmp_path), out, unsupervised=kind)
    first = drawn(out)
    assert drawn(out) == first
    for other in (drawn(out, epoch=1), drawn(out, seed=1)):
        assert sum(a != b for a, b in zip(zip(*first, strict=True), zip(*other, strict=True), strict=True)) > 30


def test_a_pair_depends_on_its_row_alone(tmp_path: Path, out: Path) -> None:
    """Not on its place, nor on what it is read with: another order, a part of the set and single rows give the same pairs."""
    prepare(corpus(tmp_path), out, unsupervised="crops")
    table, draw = drawn_pairs(out, "crops", "train", None, seed=3)
    draw.epoch = 2
    whole = table[:]
    order = random.Random(0).sample(range(len(table)), 15)
    assert [table[i]["query"] for i in order] == [whole["query"][i] for i in order] == table[order]["query"]
    assert table.select(order)[:]["positive"] == [whole["positive"][i] for i in order]


def test_inverse_cloze_leaves_the_sentence_in_a_tenth_of_the_texts() -> None:
    draw = DrawPairs("inverse-cloze", seed=0)
    rows = 4000
    found = draw({"title": [""] * rows, "text": ["a b.\nc d.\ne f."] * rows, "document": list(range(rows)), "piece": [0] * rows})
    kept = sum(query in positive for query, positive in zip(found["query"], found["positive"], strict=True))
    assert 0.08 < kept / rows < 0.12
    assert all(found["query"].count(query) > rows / 4 for query in ("a b.", "c d.", "e f."))


def test_chances_are_uniform_and_independent() -> None:
    chances = uniform(seed=5, epoch=1, documents=list(range(-5000, 5000)), pieces=[0] * 10_000, draws=4)
    assert chances.min() >= 0
    assert chances.max() < 1
    assert np.allclose(chances.mean(0), 0.5, atol=0.02)
    assert np.allclose(np.corrcoef(chances.T), np.eye(4), atol=0.05)
    others = uniform(5, 2, list(range(-5000, 5000)), [0] * 10_000, 4), uniform(5, 1, list(range(-5000, 5000)), [1] * 10_000, 4)
    assert all(abs(np.corrcoef(chances[:, 0], other[:, 0])[0, 1]) < 0.05 for other in others)


def test_duplicates_and_what_is_too_short_are_dropped_and_counted(tmp_path: Path, out: Path) -> None:
    long = [sentences(3, seed) for seed in range(3)]
    records = [{"text": text} for text in (long[0], "a b c d e f g h i", "too short.", long[1], f"  {long[0]}\n", "", long[2], long[0])]
    summary = prepare(write(tmp_path / "c.jsonl", jsonl(records)), out, unsupervised="crops")
    train = summary.splits["train"]
    assert train.rows == 3
    assert train.dropped == {"of fewer than 8 words": 1, "of fewer than 40 characters": 1, "without text": 1, "that were there before": 2}
    table, _ = drawn_pairs(out, "crops", "train", None, 0)
    assert table.with_format(None)["text"][:] == long
    assert len(set(table[:]["label"])) == 3
    assert "drawn when they are read" in summary.table()


def test_long_documents_are_cut_and_keep_one_key(tmp_path: Path, out: Path) -> None:
    text = sentences(200, seed=1)
    prepare(write(tmp_path / "c.jsonl", jsonl([{"text": text}, {"text": sentences(3, seed=2)}])), out, unsupervised="neighbours")
    table = drawn_pairs(out, "neighbours", "train", None, 0)[0].with_format(None)[:]
    assert " ".join(piece.replace("\n", " ") for piece in table["text"][:-1]) == text
    assert max(len(piece.split()) for piece in table["text"]) < 256 + 9
    assert table["piece"] == [*range(len(table["piece"]) - 1), 0]
    assert len(set(table["document"])) == 2


def test_pieces_are_of_about_one_length() -> None:
    assert [len(piece) for piece in cut(["w"] * 1000, limit=300)] == [250] * 4
    assert cut(["a b", "c"], limit=5) == [["a b", "c"]]
    assert [len(piece) for piece in cut(["one two three"] * 10, limit=3)] == [1] * 10


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_plain_text_has_a_document_on_each_line_or_in_each_file(tmp_path: Path, out: Path, suffix: str) -> None:
    texts = [sentences(3, seed) for seed in range(4)]
    lines = write(tmp_path / f"lines.txt{suffix}", "\n".join(texts))
    for i, text in enumerate(texts):
        write(tmp_path / "files" / str(i) / f"a.txt{suffix}", text.replace(". ", ".\n\n"))
    prepare(lines, out, unsupervised="crops")
    prepare(tmp_path / "files", out.with_name("files"), unsupervised="crops")
    found = [drawn_pairs(path, "crops", "train", None, 0)[0].with_format(None) for path in (out, out.with_name("files"))]
    assert found[0]["text"][:] == found[1]["text"][:] == texts
    assert drawn(out) == drawn(out.with_name("files"))


def test_what_cannot_be_is_refused(tmp_path: Path, out: Path) -> None:
    source = corpus(tmp_path)
    assert_refused(tmp_path / "none.txt", out, "does not exist", unsupervised="crops")
    short = write(tmp_path / "short.txt", "one\ntwo\n\n")
    assert_refused(short, out, "no usable document .2 of fewer than 8 words, 1 without text", unsupervised="crops")
    for options, message in (
        ({"unsupervised": "words"}, "unsupervised 'words': use one of crops"),
        ({"unsupervised": "crops", "hold_out": 0.1}, "leave out format"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(source, out, **options)
    with pytest.raises(ValueError, match="no source"):
        prepare(None, out, unsupervised="crops")
    prepare(source, out, unsupervised="crops")
    with pytest.raises(ValueError, match="holds texts that pairs are drawn from"):
        load_training_set(out)
