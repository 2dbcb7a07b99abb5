"""`dual_encoder`: what it loads, and that one saved folder gives the same vectors in sentence-transformers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Router, Transformer
from transformers import AutoTokenizer, BertModel, DPRConfig, DPRContextEncoder, DPRQuestionEncoder

from conftest import texts, tiny_config
from contaccum import dual_encoder
from contaccum.methods.config import TrainConfig
from contaccum.training.run import train

QUERIES, PASSAGES = texts(5, seed=1), texts(5, seed=2)


def vectors(model: SentenceTransformer) -> tuple[np.ndarray, np.ndarray]:
    return model.encode_query(QUERIES), model.encode_document(PASSAGES)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_saved_folder_gives_the_same_vectors(model_folder, tmp_path, tied, pooling, similarity) -> None:
    model = dual_encoder(model_folder, tied=tied, pooling=pooling, similarity=similarity, max_seq_length=16)
    model.save_pretrained(str(tmp_path / "model"))
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    for a, b in zip(vectors(model), vectors(loaded), strict=True):
        assert np.allclose(a, b, atol=1e-6)
    assert loaded.similarity_fn_name == similarity
    assert loaded.max_seq_length == 16


def test_towers_are_apart_unless_tied(model_folder) -> None:
    apart, tied = dual_encoder(model_folder), dual_encoder(model_folder, tied=True)
    assert sum(p.numel() for p in apart.parameters()) == 2 * sum(p.numel() for p in tied.parameters())
    with torch.no_grad():
        next(apart[0].sub_modules["query"].parameters()).mul_(2)
    assert not np.allclose(apart.encode_query(QUERIES), apart.encode_document(QUERIES))
    assert np.allclose(tied.encode_query(QUERIES), tied.encode_document(QUERIES))


def test_half_precision_weights_are_trained_in_single(model_folder, tmp_path, tokenizer_folder) -> None:
    BertModel.from_pretrained(model_folder).half().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(tmp_path)
    assert {p.dtype for p in dual_encoder(tmp_path).parameters()} == {torch.float32}


def bert(seed: int) -> BertModel:
    torch.manual_seed(seed)
    return BertModel(tiny_config(), add_pooling_layer=False).eval()


def cls_vectors(model: BertModel, tokenizer_folder: str, sentences: list[str]) -> np.ndarray:
    batch = AutoTokenizer.from_pretrained(tokenizer_folder)(sentences, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return model(**batch).last_hidden_state[:, 0].numpy()


@pytest.mark.parametrize("layout", ["folders", "transformers-dpr", "dpr-checkpoint"])
def test_paired_checkpoints(layout: str, tokenizer_folder, model_folder, tmp_path: Path) -> None:
    """Two encoders saved by others' code give their own vectors here."""
    query, passage = bert(1), bert(2)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    if layout == "folders":
        for name, encoder in (("query_encoder", query), ("doc_encoder", passage)):
            encoder.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        model = dual_encoder(tmp_path)
    elif layout == "transformers-dpr":
        config = DPRConfig(**tiny_config().to_dict())
        question, context = DPRQuestionEncoder(config), DPRContextEncoder(config)
        question.question_encoder.bert_model.load_state_dict(query.state_dict())
        context.ctx_encoder.bert_model.load_state_dict(passage.state_dict())
        for name, encoder in (("question", question), ("context", context)):
            encoder.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        model = dual_encoder(tmp_path / "question", tmp_path / "context")
    else:
        weights = {f"question_model.{k}": v for k, v in query.state_dict().items()}
        weights |= {f"ctx_model.{k}": v for k, v in passage.state_dict().items()}
        torch.save({"model_dict": weights, "epoch": 3}, tmp_path / "dpr.cp")
        model = dual_encoder(tmp_path / "dpr.cp", tokenizer=model_folder)
    model.eval()
    assert np.allclose(model.encode_query(QUERIES), cls_vectors(query, tokenizer_folder, QUERIES), atol=1e-5)
    assert np.allclose(model.encode_document(PASSAGES), cls_vectors(passage, tokenizer_folder, PASSAGES), atol=1e-5)


def saved(folder: Path, model_folder: str, *kinds: str) -> str:
    """A SentenceTransformer of a Transformer and these modules."""
    made = {
        "max": lambda width: Pooling(width, pooling_mode="max"),
        "mean+cls": lambda width: Pooling(width, pooling_mode=("mean", "cls")),
        "dense": lambda width: Dense(width, 12),
        "normalize": lambda width: Normalize(),
    }
    torch.manual_seed(3)
    modules, width = [Transformer(model_folder)], 16
    for kind in kinds:
        modules.append(made[kind](width))
        width = 2 * width if kind == "mean+cls" else width
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kinds", [("max", "dense", "normalize"), ("mean+cls",)], ids="+".join)
def test_own_modules_give_the_vectors_of_the_model_itself(kinds: tuple[str, ...], tied: bool, model_folder: str, tmp_path: Path) -> None:
    own = saved(tmp_path / "own", model_folder, *kinds)
    model = dual_encoder(own, pooling="own", tied=tied, similarity="cosine", max_seq_length=16, device="cpu")
    given = SentenceTransformer(own, device="cpu")
    assert model.max_seq_length == 16
    for a, b in zip(vectors(model), vectors(given), strict=True):
        assert np.allclose(a, b, atol=1e-6)
    model.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    for a, b in zip(vectors(again), vectors(given), strict=True):
        assert np.allclose(a, b, atol=1e-6)
    if not tied:
        first, second = (list(part.parameters()) for part in model[0].sub_modules.values())
        assert not {id(p) for p in first} & {id(p) for p in second}, "each tower has its own load"


def test_own_modules_are_trained(model_folder: str, tmp_path: Path, jsonl) -> None:
    own = saved(tmp_path / "own", model_folder, "max", "dense", "normalize")
    sizes = {"n_total": 8, "n_local": 4, "bank": 8, "max_seq_length": 16, "epochs": 1, "save_every": 0, "lr": 1e-2, "warmup_updates": 0}
    train(TrainConfig(data=jsonl(32), model=own, output=str(tmp_path / "run"), tied=True, pooling="own", similarity="cosine", **sizes))
    before, after = (SentenceTransformer(place, device="cpu") for place in (own, str(tmp_path / "run" / "model")))
    assert [type(module).__name__ for module in after] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert not torch.equal(before[2].linear.weight, after[2].linear.weight)


def test_own_modules_are_checked_as_any_model(model_folder: str, tmp_path: Path) -> None:
    own = saved(tmp_path / "own", model_folder, "max", "dense")
    for pooled in (True, False):
        model = dual_encoder(own, pooling="own", tied=True, include_prompt=pooled)
        assert [module.include_prompt for module in model if isinstance(module, Pooling)] == [pooled]
    assert model.max_seq_length == 64, "as many as it has positions for"
    with pytest.raises(ValueError, match="max_seq_length=65 is more than the model's 64 positions"):
        dual_encoder(own, pooling="own", max_seq_length=65)
    broken = SentenceTransformer(own, device="cpu")
    with torch.no_grad():
        broken[2].linear.weight[0] = float("nan")
    broken.save_pretrained(str(tmp_path / "broken"))
    with pytest.raises(ValueError, match=r"holds weights that are not finite, as linear\.weight"):
        dual_encoder(tmp_path / "broken", pooling="own")
    two = SentenceTransformer(modules=[Router.for_query_document(*([module] for module in (broken[0], broken[0])))], device="cpu")
    two.save_pretrained(str(tmp_path / "two"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "two" / name).write_bytes((Path(model_folder) / name).read_bytes())
    for part in (tmp_path / "two").glob("*_Transformer"):
        part.rename(tmp_path / "two" / part.name.replace("_0_", "_1_"))
    file = tmp_path / "two" / "router_config.json"
    file.write_text(file.read_text().replace("_0_", "_1_"))
    with pytest.raises(ValueError, match=r"that begin with a Transformer, and .* begins with Router"):
        dual_encoder(tmp_path / "two", pooling="own")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: dual_encoder(f, pooling="max"), "pooling='max' is unknown; choose one of cls, mean"),
        (lambda f: dual_encoder(f, similarity="l2"), "similarity='l2' is unknown"),
        (lambda f: dual_encoder(tiny_config()), "give tokenizer=NAME"),
        (lambda f: dual_encoder(f + "/nowhere"), "no model can be read from"),
        (lambda f: dual_encoder(f, "other", tied=True), "tied=True has one tower"),
        (lambda f: dual_encoder(f, pooling="own", tokenizer=f), "cannot be given with pooling='own', which takes the model's"),
        (lambda f: dual_encoder(f, pooling="own"), "has no modules.json; use cls, mean or lasttoken"),
        (lambda f: dual_encoder(f + "/nowhere", pooling="own"), "there is no such folder"),
        (lambda f: dual_encoder(tiny_config(), pooling="own"), "and BertConfig is none; use cls, mean or lasttoken"),
        (lambda f: dual_encoder(f + "/config.json", "other", pooling="own"), "config.json"),
    ],
)
def test_user_mistakes(model_folder, call, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(model_folder)
