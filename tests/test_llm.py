"""Decoders as towers, by a tiny one of Qwen3's shape: adapters, prompts, last-token pooling on either side of padding, bfloat16 weights."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import AutoModel, AutoTokenizer, Qwen3Config

from conftest import WORDS, texts
from contaccum import ContAccumLoss, dual_encoder
from contaccum.adapters.text_keys import token_keys
from contaccum.memory.plan import plan
from contaccum.memory.prediction.towers import Running, record
from contaccum.methods.config import TrainConfig, load_config
from contaccum.retrieval.encode import make_encoder
from contaccum.retrieval.model import model_on_device
from contaccum.towers.lora import READS_ADAPTERS, Lora, adapt, add_lora, block_linears, merge_lora, quantization
from contaccum.towers.random_encoder import write_weights, write_word_tokenizer
from contaccum.towers.speed import encoders, towers
from contaccum.training.run import train
from plan_models import decoder
from test_train import assert_bit_equal, command, final_state, options, run

OLD = Version(transformers.__version__) < Version(READS_ADAPTERS)
pytestmark = pytest.mark.skipif(OLD, reason=f"adapters need transformers {READS_ADAPTERS}")
LORA = {"lora_rank": 4, "pooling": "lasttoken", "lr": 1e-2}
SAMPLE = texts(9, seed=5)


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("decoder")
    write_word_tokenizer(WORDS, folder, max_seq_length=64)
    shape = {"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_weights(Qwen3Config(**shape, head_dim=8, intermediate_size=32, max_position_embeddings=64, pad_token_id=0), folder, seed=0)
    return str(folder)


def adapted(folder: str, tied: bool = True, **options: Any) -> SentenceTransformer:
    """Adapters that change something, as trained ones do."""
    model = dual_encoder(folder, tied=tied, pooling="lasttoken", max_seq_length=32, **options).to("cpu")
    add_lora(model, Lora(4, 8.0))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model.eval()


def test_what_follows_the_transformer_is_frozen_too(decoder_folder: str, tmp_path: Path) -> None:
    modules = [Transformer(decoder_folder), Pooling(16, pooling_mode="lasttoken"), Dense(16, 4)]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "own"))
    model = dual_encoder(tmp_path / "own", tied=True, pooling="own")
    add_lora(model, Lora(4, 8.0))
    assert {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad} == {"0"}


def vectors(model: SentenceTransformer) -> tuple[np.ndarray, np.ndarray]:
    return model.encode_query(SAMPLE), model.encode_document(SAMPLE)


def assert_same_vectors(a: SentenceTransformer, b: SentenceTransformer, tolerance: float = 1e-5) -> None:
    for mine, others in zip(vectors(a), vectors(b), strict=True):
        assert np.abs(mine - others).max() < tolerance * np.abs(mine).max()


# Adapters --------------------------------------------------------------------------------------------------------------


def test_all_linear_layers_of_the_blocks_are_adapted_and_nothing_else_is_trained(decoder_folder) -> None:
    model = adapted(decoder_folder)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert len(trained) == 2 * len(projections) * 2  # layers, matrices
    for layer, name in itertools.product(range(2), projections):
        assert sum(f"layers.{layer}." in t and f".{name}.lora_" in t for t in trained) == 2, (layer, name)


def test_adapters_are_in_float32_on_a_bfloat16_base(decoder_folder, tmp_path) -> None:
    """Else small updates would be rounded off, and lost again when a checkpoint is read."""
    model = adapted(decoder_folder, model_kwargs={"dtype": torch.bfloat16})
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == {(True, torch.float32), (False, torch.bfloat16)}
    model.save_pretrained(str(tmp_path))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loaded = dict(SentenceTransformer(str(tmp_path), device="cpu").named_parameters())
    assert all(torch.equal(p, loaded[name]) for name, p in trained.items())


def test_layers_beside_the_blocks_are_left_alone(model_folder) -> None:
    """BERT's pooler has a layer named as those inside, but pooling here reads the tokens."""
    pattern = block_linears(next(encoders(dual_encoder(model_folder, tied=True))))
    assert "pooler" not in pattern
    assert pattern.count("dense") == 3


def test_named_targets(decoder_folder) -> None:
    model = dual_encoder(decoder_folder, tied=True)
    add_lora(model, Lora(2, 4.0, targets=("q_proj", "v_proj")))
    adapters = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, p in model.named_parameters() if p.requires_grad}
    assert adapters == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match=r"no layer of qwen3 is named 'query'; there are .*q_proj"):
        add_lora(dual_encoder(decoder_folder, tied=True), Lora(2, 4.0, targets=("q_proj", "query")))


def test_a_base_that_cannot_be_found_again_is_refused(decoder_folder, tokenizer_folder) -> None:
    model = dual_encoder(decoder_folder, tied=True, tokenizer=tokenizer_folder)
    with pytest.raises(ValueError, match="an adapter is saved without its base"):
        add_lora(model, Lora(2, 4.0))


def test_an_adapter_is_saved_without_its_base_and_loads_in_sentence_transformers(decoder_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(Path(decoder_folder).parent)
    model = adapted(Path(decoder_folder).name)
    model.save_pretrained(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "model.safetensors").exists()
    monkeypatch.chdir(tmp_path)  # the base is found from anywhere
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert_same_vectors(model, loaded, 1e-6)
    assert np.abs(vectors(model)[0] - vectors(dual_encoder(decoder_folder, tied=True, pooling="lasttoken").to("cpu"))[0]).max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_towers_give_the_vectors_of_adapted_ones(dtype: torch.dtype, decoder_folder, tmp_path) -> None:
    model = adapted(decoder_folder, tied=False, model_kwargs={"dtype": dtype})
    exact = adapted(decoder_folder, tied=False, model_kwargs={"dtype": dtype})
    for tower in towers(exact):
        tower.auto_model.float()  # the same weights, computed in float32
    merge_lora(model)
    assert_same_vectors(exact, model)
    model.save_pretrained(str(tmp_path))
    assert_same_vectors(model, SentenceTransformer(str(tmp_path), device="cpu"), 1e-6)
    assert not list(tmp_path.rglob("adapter*"))


# Padding ---------------------------------------------------------------------------------------------------------------


def padded(model: SentenceTransformer, side: str) -> dict[str, Any]:
    for tower in towers(model):
        tower.tokenizer.padding_side = side
    return model.preprocess(SAMPLE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_vectors_and_keys_do_not_depend_on_the_side_of_padding(attention: str, decoder_folder) -> None:
    model = adapted(decoder_folder, model_kwargs={"attn_implementation": attention})
    left, right = padded(model, "left"), padded(model, "right")
    assert not torch.equal(left["input_ids"], right["input_ids"])
    assert torch.equal(token_keys(left), token_keys(right))
    with torch.no_grad():
        a, b = (model(dict(features))["sentence_embedding"] for features in (left, right))
        alone = torch.cat([model(model.preprocess([text]))["sentence_embedding"] for text in SAMPLE])
    assert torch.allclose(a, b, atol=1e-5)
    assert torch.allclose(a, alone, atol=1e-5)


# Prompts ---------------------------------------------------------------------------------------------------------------

PROMPTS = {"query_prompt": "w1 w2 w3 ", "passage_prompt": "w4 "}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pooling", "include"), [("lasttoken", True), ("mean", True), ("mean", False)])
def test_prompts_are_saved_and_used(tied: bool, pooling: str, include: bool, decoder_folder, tmp_path) -> None:
    options = {"tied": tied, "pooling": pooling, "max_seq_length": 32}
    torch.manual_seed(0)
    model = dual_encoder(decoder_folder, **options, **PROMPTS, include_prompt=include).to("cpu")
    model.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert_same_vectors(model, loaded, 1e-6)
    plain = dual_encoder(decoder_folder, **options).to("cpu")
    by_hand = plain.encode_query([PROMPTS["query_prompt"] + text for text in SAMPLE])
    assert np.allclose(loaded.encode_query(SAMPLE), by_hand, atol=1e-5) == include
    assert not np.allclose(loaded.encode_query(SAMPLE), plain.encode_query(SAMPLE), atol=1e-3), "the prompt does nothing"


@pytest.mark.parametrize("method", ["contaccum", "gradcache"])
@pytest.mark.parametrize("include", [True, False])
def test_training_reads_texts_as_encoding_does(include: bool, method: str, jsonl, decoder_folder, tmp_path, monkeypatch) -> None:
    """The vectors that enter the loss are those that `encode_query` and `encode_document` give."""
    seen: list[list[torch.Tensor]] = []
    original = ContAccumLoss.compute_loss_from_embeddings

    def watch(self: Any, embeddings: list[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append([column.detach().clone() for column in embeddings])
        return original(self, embeddings, *args, **kwargs)

    monkeypatch.setattr(ContAccumLoss, "compute_loss_from_embeddings", watch)
    data = jsonl(16, negatives=1)
    changes = {**PROMPTS, "include_prompt": include, "method": method, "pooling": "mean", "lr": 1e-12, "max_updates": 1, "bank": 8}
    train(TrainConfig(**options(data, decoder_folder, tmp_path / "run", **changes)))
    model = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    for column, known in enumerate(
        (
            model.encode_query([row["query"] for row in rows]),
            model.encode_document([row["positive"] for row in rows]),
            model.encode_document([row["negatives"][0] for row in rows]),
        )
    ):
        for vector in torch.cat([columns[column] for columns in seen]).numpy():
            assert np.abs(known - vector).max(1).min() < 1e-4


# The command -----------------------------------------------------------------------------------------------------------

WAYS = {
    "one tower": {"tied": True},
    "two towers": {"tied": False},
    "bfloat16": {"tied": True, "weights_dtype": "bfloat16", "precision": "bf16"},
    "bfloat16, two towers, checkpointing": {"tied": False, "weights_dtype": "bfloat16", "gradient_checkpointing": True},
    "left padding": {"tied": True, "query_prompt": "w1 w2 "},
    "gradcache": {"tied": True, "method": "contaccum-gradcache", "lora_dropout": 0.1},
}


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
def test_training_resumes_bit_equal_and_leaves_a_model(changes: dict[str, Any], jsonl, decoder_folder, tmp_path) -> None:
    folder = decoder_folder
    if "query_prompt" in changes:
        folder = str(tmp_path / "left")
        shutil.copytree(decoder_folder, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.padding_side = "left"
        tokenizer.save_pretrained(folder)
    arguments = options(jsonl(32, negatives=1), folder, tmp_path / "whole", **{**LORA, "epochs": 2, "save_every": 4, **changes})
    summary = train(TrainConfig(**arguments))
    assert summary["updates"] == 8
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("model", "summary.json", "checkpoint-8"))
    lines = (resumed / "log.jsonl").read_text().splitlines(keepends=True)
    (resumed / "log.jsonl").write_text("".join(lines[:4]))
    again = train(load_config(resumed / "config.yaml", {"output": str(resumed)}), resume=True)
    assert again["resumed_at_update"] == 4
    assert_bit_equal(final_state(whole), final_state(resumed))
    assert len(list((whole / "checkpoints" / "checkpoint-8").rglob("adapter_model.safetensors"))) == (1 if changes["tied"] else 2)
    model = SentenceTransformer(str(whole / "model"), device="cpu")
    assert model.prompts.get("query", "") == changes.get("query_prompt", "")
    moved = model.encode_query(SAMPLE) - dual_encoder(folder, tied=True, pooling="lasttoken").to("cpu").encode_query(SAMPLE)
    assert np.abs(moved).max() > 0.01, "nothing was trained"


def test_contaccum_encode_reads_adapters(decoder_folder, tmp_path) -> None:
    model = adapted(decoder_folder, query_prompt="w7 w8 ")
    model.save_pretrained(str(tmp_path / "model"))
    encoder = make_encoder(model_on_device(str(tmp_path / "model"), "cpu"), "query", None, None)
    assert encoder.prompt == "w7 w8 "
    assert np.allclose(encoder.vectors(encoder.batches(SAMPLE)), model.encode_query(SAMPLE), atol=1e-5)


def test_the_best_adapter_is_kept(jsonl, decoder_folder, tmp_path, caplog) -> None:
    """sentence-transformers only logs it when a best model cannot be read."""
    from data_files import beir_folder

    folder = beir_folder(tmp_path / "dev")
    changes = {**LORA, "tied": False, "dev": str(folder), "dev_split": "test", "dev_every": 2, "epochs": 1}
    summary = train(TrainConfig(**options(jsonl(32), decoder_folder, tmp_path / "run", **changes)))
    assert summary["dev_best_update"]
    assert "Could not load" not in caplog.text


def test_bfloat16_weights_are_trained_and_saved_as_such(jsonl, decoder_folder, tmp_path) -> None:
    changes = {"tied": True, "weights_dtype": "bfloat16", "pooling": "lasttoken", "lr": 1e-2, "epochs": 1}
    train(TrainConfig(**options(jsonl(32), decoder_folder, tmp_path / "run", **changes)))
    model = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    before = AutoModel.from_pretrained(decoder_folder).embed_tokens.weight
    assert not torch.equal(next(encoders(model)).embed_tokens.weight.float(), before.bfloat16().float())


REFUSED = {
    "lora_alpha=8.0 is for adapters; give --lora-rank": {"lora_alpha": 8},
    "lora_targets=q_proj is for adapters": {"lora_targets": "q_proj"},
    "lora_rank=0 must be above 0": {"lora_rank": 0},
    "lora_dropout=1.0 is no share": {"lora_rank": 2, "lora_dropout": 1.0},
    "quantize=4bit is for adapters": {"quantize": "4bit", "tied": True},
    "quantize=4bit is for one tower": {"quantize": "4bit", "lora_rank": 2},
    "quantize=4bit needs the package bitsandbytes": {"quantize": "4bit", "lora_rank": 2, "tied": True},
    "quantize='8bit' is unknown; choose one of 4bit, none": {"quantize": "8bit", "lora_rank": 2, "tied": True},
    "weights_dtype='fp8' is unknown": {"weights_dtype": "fp8"},
    "no layer of qwen3 is named 'query'": {"lora_rank": 2, "lora_targets": "query"},
    "cuda_graphs does not record adapters": {"lora_rank": 2, "cuda_graphs": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_written(message: str, jsonl, decoder_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        train(load_config(None, options(jsonl(32), decoder_folder, tmp_path / "run", **REFUSED[message])))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_the_command_line(jsonl, decoder_folder, tmp_path) -> None:
    changes = {"tied": True, "lora_rank": 2, "lora_targets": "q_proj,v_proj", "query_prompt": "w1 ", "pooling": "lasttoken"}
    done = run(command(options(jsonl(32), decoder_folder, tmp_path / "run", epochs=1, **changes)))
    assert done.returncode == 0, done.stderr
    assert "note: adapters of" in done.stdout


def test_the_plan_knows_adapters() -> None:
    model = decoder()
    config = TrainConfig(model=model, tied=True, pooling="lasttoken", memory="1GB", n_total=16, max_seq_length=16, hard_negatives=0)
    whole, adapters = (plan(replace(config, **changes)).prediction.parts for changes in ({}, {"lora_rank": 2, "weights_dtype": "bfloat16"}))
    weights = sum(p.numel() for p in AutoModel.from_config(model).parameters())
    assert whole["parameters"] >= 4 * weights > adapters["parameters"] > 2 * weights
    assert adapters["optimizer"] < 0.2 * whole["optimizer"]


WIDE = Qwen3Config(
    vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=384
)


def test_the_plan_knows_weights_in_4_bits() -> None:
    config = TrainConfig(model=WIDE, tied=True, pooling="lasttoken", memory="1GB", n_total=16, max_seq_length=16, hard_negatives=0)
    config = replace(config, lora_rank=2, weights_dtype="bfloat16", precision="bf16")
    half, packed = (plan(replace(config, n_local=4, quantize=kind)).prediction.parts for kind in (None, "4bit"))
    linear = 2 * 128 * (2 * 128 + 2 * 64 + 3 * 384)  # weights
    largest = 128 * 384
    saved = 2 * linear - linear * (0.5 + 1 / 64) - 2 * largest
    assert half["parameters"] - packed["parameters"] == pytest.approx(saved, abs=14 * 3072)  # of 14 weights tables, in blocks of 512 bytes
    assert packed["activations"] == half["activations"]


def test_weights_in_4_bits_take_what_is_predicted(tmp_path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    AutoModel.from_config(WIDE, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16, **quantization("4bit"))
    adapt(model, Lora(2, 4.0))
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    for parameter in model.parameters():
        if state := getattr(parameter, "quant_state", None):
            held += sum(t.nbytes for one in (state, state.state2) for t in vars(one).values() if isinstance(t, torch.Tensor))
    *fixed, largest = record(WIDE, 16, Running("lasttoken", "bf16", weights=torch.bfloat16, lora=Lora(2, 4.0), quantized=True)).fixed
    assert (sum(fixed), largest) == (held, 2 * 128 * 384)
