"""Negatives by models: the nearest of a bi-encoder, and what a cross-encoder keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset

import contaccum.data.negatives as negatives_module
from conftest import WORDS, texts, tiny_config
from contaccum.common.errors import DataError
from contaccum.data.answers import has_answer
from contaccum.data.mine import mine
from contaccum.data.negatives import denoise, load_cross_encoder, mine_dense
from contaccum.data.training_set import load_training_set
from mining import passages, prepared_files, training_set

prepared = pytest.fixture(prepared_files)


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
    kept = list(denoise(rows, candidates, load_cross_encoder(cross_encoder_folder), margin))
    assert 0 < sum(map(len, kept)) < 70 * 6
    for row, before, after in zip(rows, candidates, kept, strict=True):
        gaps = {text: scores[row["query"], row["positive"]] - scores[row["query"], text] for text in before}
        assert all(gap >= margin - 1e-4 for text, gap in gaps.items() if text in after)
        assert all(gap <= margin + 1e-4 for text, gap in gaps.items() if text not in after)
        assert after == [text for text in before if text in after]


def test_a_cross_encoder_with_several_labels_is_refused(tokenizer_folder: str, tmp_path: Path) -> None:
    folder = build_cross_encoder(tokenizer_folder, tmp_path, labels=3)
    with pytest.raises(ValueError, match="gives 3 scores a pair"):
        next(denoise(word_rows(1), [["w1"]], load_cross_encoder(folder)))


def test_an_encoder_is_no_cross_encoder(model_folder: str) -> None:
    """Its head would be made of random numbers."""
    with pytest.raises(DataError, match=r"lacks 2 of its weights, as classifier.bias, which would be random; give a CrossEncoder"):
        load_cross_encoder(model_folder)


@pytest.mark.parametrize("kind", ["dense", "denoise"])
def test_a_missing_model_is_reported_in_one_line_before_the_collection_is_read(kind: str, tmp_path: Path, jsonl: Callable) -> None:
    options = {"method": "dense", "model": tmp_path / "none"} if kind == "dense" else {"cross_encoder": tmp_path / "none"}
    with pytest.raises(DataError, match=r"none cannot be loaded as a \w+ \(.*\); give a model folder or a hub name") as error:
        mine(jsonl(4), tmp_path / "missing.tsv", tmp_path / "out", **options)
    assert "\n" not in str(error.value)


def test_dense_mining_and_denoising_from_files(prepared: Path, tiny_encoder: Callable, cross_encoder_folder: str) -> None:
    tiny_encoder(dropout=0.0).save_pretrained(str(prepared / "model"))
    options = {"method": "dense", "model": prepared / "model", "depth": 6, "per_query": 3}
    mine(prepared / "prepared", prepared / "passages.tsv", prepared / "dense", **options)
    dense = load_training_set(prepared / "dense")["negatives"][:]
    assert [len(texts) for texts in dense] == [3, 3]
    mine(prepared / "dense", None, prepared / "all", method="existing", cross_encoder=cross_encoder_folder, margin=-1e9)
    assert load_training_set(prepared / "all")["negatives"][:] == dense
    summary = mine(prepared / "dense", None, prepared / "none", method="existing", cross_encoder=cross_encoder_folder, margin=1e9)
    assert [summary[name] for name in ("rows", "rows_without_negatives", "negatives", "passages")] == [2, 2, 0, 0]
