"""Faster towers compute what plain ones do: loss and gradients, state dicts, saved folders, resumed runs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import DistilBertConfig, ElectraConfig, RobertaConfig, XLMRobertaConfig

from conftest import assert_close, texts, tiny_config
from contaccum import CachedContAccumLoss, ContAccumLoss, dual_encoder
from contaccum.towers.speed import (
    UNPADDED,
    can_unpad,
    check_compiler,
    check_unpadded,
    compile_towers,
    encoders,
    repad_towers,
    uncompile_towers,
    unpad_towers,
)

SHAPE = {"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "bert": lambda: tiny_config("bert", 0.0),
    "distilbert": lambda: DistilBertConfig(vocab_size=70, dim=16, n_layers=2, n_heads=2, hidden_dim=32, dropout=0.0, attention_dropout=0.0),
    "electra": lambda: ElectraConfig(**SHAPE, embedding_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "roberta": lambda: RobertaConfig(**SHAPE, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "xlm-roberta": lambda: XLMRobertaConfig(**SHAPE, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
}


@pytest.fixture(autouse=True)
def _no_compiled_code_of_other_tests() -> None:
    torch._dynamo.reset()


def columns(model: SentenceTransformer, count: int = 6, seed: int = 0, words: int = 12) -> list[dict[str, Any]]:
    """Queries, positives and hard negatives of many lengths."""
    found = []
    for place, task in enumerate(("query", "document", "document")):
        column = model.preprocess(texts(count, seed + place, words), task=task)
        found.append({**{k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in column.items()}, "task": task})
    return found


def step(model: SentenceTransformer, kind: type[ContAccumLoss] = ContAccumLoss, autocast: Any = None) -> dict[str, Tensor]:
    """Two micro-steps with a bank: their losses and the summed gradients."""
    torch.manual_seed(1)
    loss = kind(model, bank_size=8, **({"mini_batch_size": 4} if kind is CachedContAccumLoss else {})).to(model.device)
    model.train()
    model.zero_grad()
    found: dict[str, Tensor] = {}
    for seed in (0, 10):
        with autocast or nullcontext():
            value = loss(columns(model, seed=seed), None)
        value.backward()
        found[f"loss {seed}"] = value.detach()
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any(float(gradient.abs().max()) > 0 for gradient in found.values())
    return found


@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_unpadded_towers_give_the_same_loss_and_gradients(family, side, kind, tokenizer_folder) -> None:
    torch.manual_seed(0)
    model = dual_encoder(CONFIGS[family](), tokenizer=tokenizer_folder, pooling="mean", max_seq_length=32).to("cpu").double()
    for route in model[0].sub_modules.values():
        route[0].tokenizer.padding_side = side
    plain = step(model, kind)
    unpad_towers(model)
    assert {encoder.config._attn_implementation for encoder in encoders(model)} == {UNPADDED}
    assert_close(step(model, kind), plain, rtol=1e-10)
    repad_towers(model)
    assert_close(step(model, kind), plain, rtol=1e-10)


@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
def test_unpadded_towers_know_their_tokens_without_asking_the_device(kind, tiny_encoder, monkeypatch) -> None:
    """Counted when tokenised, through merging columns and cutting mini-batches; counts of another batch are not believed."""
    model = tiny_encoder(dropout=0.0)
    unpad_towers(model)
    asked: list[int] = []
    nonzero = Tensor.nonzero
    batch = columns(model)
    assert all(column["token_counts"] == column["attention_mask"].sum(1).tolist() for column in batch)
    if kind is CachedContAccumLoss:
        loss = kind(model, bank_size=8, mini_batch_size=4)
        for column in batch:
            column["attention_mask"][:, -1] = 1  # GradCache itself looks for the end of the longest text
            column["token_counts"] = column["attention_mask"].sum(1).tolist()
    else:
        loss = kind(model, bank_size=8)
    monkeypatch.setattr(Tensor, "nonzero", lambda self, *rest, **more: asked.append(len(self)) or nonzero(self, *rest, **more))
    loss([dict(column) for column in batch], None).backward()
    longest = [len(column["input_ids"][0]) for column in batch]
    assert [size for size in asked if size not in longest] == []
    model({**batch[0], "token_counts": [3]})
    assert asked[-1] == batch[0]["input_ids"].numel()


def test_unpadded_attention_sees_no_padding(tiny_encoder) -> None:
    model = tiny_encoder()
    unpad_towers(model)
    seen: list[int] = []
    layer = next(encoders(model)).encoder.layer[0]
    layer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape[1]))
    batch = columns(model)[0]
    model(dict(batch))
    assert seen == [int(batch["attention_mask"].sum())]
    assert seen[0] < batch["attention_mask"].numel()


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
def test_compiled_towers_give_the_same_loss_and_gradients(kind, unpad, tiny_encoder) -> None:
    """Traced and differentiated as for the code generator, run eagerly: dropout then draws as it always does."""
    model = tiny_encoder(dropout=0.1)
    if unpad:
        unpad_towers(model)
    plain = step(model, kind)
    compile_towers(model, backend="aot_eager")
    assert_close(step(model, kind), plain, rtol=1e-5)
    uncompile_towers(model)
    assert_close(step(model, kind), plain, rtol=0.0)


def test_compiled_once_for_both_towers_and_all_lengths(tiny_encoder) -> None:
    model, counter = tiny_encoder(), CompileCounter()
    unpad_towers(model)
    compile_towers(model, backend=counter)
    for count, words in ((4, 5), (4, 9), (7, 14), (3, 20)):
        for column in columns(model, count, words=words):
            model(column)
    assert counter.frame_count == 1


def test_compiled_layers_can_be_checkpointed(tiny_encoder) -> None:
    model = tiny_encoder(dropout=0.1)
    plain = step(model)
    for encoder in encoders(model):
        encoder.gradient_checkpointing_enable({"use_reentrant": False})
    compile_towers(model, backend="aot_eager")
    assert_close(step(model), plain, rtol=1e-5)


def test_as_many_texts_as_tokens_are_compiled_and_checkpointed_like_any_batch(tiny_encoder) -> None:
    model, counter = tiny_encoder(dropout=0.1), CompileCounter()
    for encoder in encoders(model):
        encoder.gradient_checkpointing_enable({"use_reentrant": False})
    compile_towers(model, backend=counter)
    loss = ContAccumLoss(model, bank_size=8)
    for tokens in ((6, 9), (8, 5), (9, 6)):
        batch = [
            {"input_ids": torch.full((6, t), 9), "attention_mask": torch.arange(t).expand(6, t).ge(1).long(), "task": task}
            for t, task in zip(tokens, ("query", "document"), strict=True)
        ]
        loss(batch, None).backward()
    assert counter.frame_count == 1


def generated(model: SentenceTransformer, **autocast: Any) -> None:
    """Code really generated: loss and gradients, and the same dropout with and without gradients, which GradCache needs."""
    plain = step(model, autocast=torch.autocast(**autocast) if autocast else None)
    compile_towers(model)
    assert_close(step(model, autocast=torch.autocast(**autocast) if autocast else None), plain, rtol=3e-2 if autocast else 1e-4)


def same_dropout(model: SentenceTransformer, **autocast: Any) -> None:
    compile_towers(model.train())
    batch = columns(model)[1]
    found = []
    for context in (torch.no_grad, nullcontext):
        torch.manual_seed(3)
        with context(), torch.autocast(**autocast) if autocast else nullcontext():
            found.append(model(dict(batch))["sentence_embedding"].detach())
    torch.manual_seed(4)
    with torch.autocast(**autocast) if autocast else nullcontext():
        other = model(dict(batch))["sentence_embedding"].detach()
    near = 2e-2 if autocast else 1e-4
    assert torch.allclose(found[0].float(), found[1].float(), rtol=near, atol=near)
    assert not torch.allclose(found[0].float(), other.float(), rtol=near, atol=near)


def needs_compiler(cuda: bool) -> None:
    try:
        check_compiler(cuda)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [{}, {"device_type": "cpu", "dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_generated_code_gives_the_same_loss_and_gradients(autocast, tiny_encoder) -> None:
    needs_compiler(cuda=False)
    generated(tiny_encoder(dropout=0.0), **autocast)


@pytest.mark.slow
def test_generated_code_drops_the_same_with_and_without_gradients(tiny_encoder) -> None:
    needs_compiler(cuda=False)
    same_dropout(tiny_encoder(dropout=0.3))


PRECISIONS = {
    "fp32": {},
    "bf16": {"device_type": "cuda", "dtype": torch.bfloat16},
    "fp16": {"device_type": "cuda", "dtype": torch.float16},
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("compiled", [False, True])
def test_fast_towers_on_a_gpu(precision, compiled, tiny_encoder) -> None:
    """Within the precision's own error: that of the plain path in it, from the plain path in fp32, or half a step of its numbers."""
    model = tiny_encoder(dropout=0.0).to("cuda")
    exact = step(model)
    autocast = PRECISIONS[precision]

    def run() -> dict[str, Tensor]:
        return step(model, autocast=torch.autocast(**autocast) if autocast else None)

    plain = run()
    if precision != "fp32" or not compiled:  # refused, see below
        unpad_towers(model)
    if compiled:
        needs_compiler(cuda=True)
        compile_towers(model)
    step_of = torch.finfo(autocast.get("dtype", torch.float32)).eps / 2
    assert error_of(run(), exact) <= max(1e-5, 3 * error_of(plain, exact), step_of)


def error_of(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Largest difference, as a share of the largest value."""
    assert found.keys() == exact.keys()
    largest = max(float(value.abs().max()) for value in exact.values())
    return max(float((found[name].double() - exact[name].double()).abs().max()) for name in exact) / largest


@pytest.mark.gpu
@pytest.mark.parametrize("unpad", [False, True])
def test_generated_code_drops_the_same_on_a_gpu(unpad, tiny_encoder) -> None:
    needs_compiler(cuda=True)
    model = tiny_encoder(dropout=0.3).to("cuda")
    if unpad:
        unpad_towers(model)
    same_dropout(model, **PRECISIONS["bf16"])


@pytest.mark.gpu
def test_a_micro_step_does_not_wait_for_the_device(tiny_encoder) -> None:
    model = tiny_encoder().to("cuda").train()
    unpad_towers(model)
    does_not_wait(model)


def does_not_wait(model: SentenceTransformer) -> None:
    """From the third micro-step on."""
    loss = ContAccumLoss(model, bank_size=8).to("cuda")
    batches = [columns(model, seed=seed) for seed in (0, 10, 20)]
    try:
        for place, batch in enumerate(batches):
            torch.cuda.set_sync_debug_mode("error" if place == 2 else "default")
            with torch.autocast("cuda", torch.bfloat16):
                value = loss(batch, None)
            value.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unpadded_attention_drops_on_a_gpu(dtype, tiny_encoder) -> None:
    model = tiny_encoder(dropout=0.5).to("cuda").train()
    unpad_towers(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # attention reads its rate and drops all the same
    batch, draws = columns(model)[1], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.autocast("cuda", dtype):
            draws.append(model(dict(batch))["sentence_embedding"])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_names_and_saved_folders_stay(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder(dropout=0.0)
    before, vectors = copy.deepcopy(model.state_dict()), model.encode_query(["w1 w2 w3"])
    unpad_towers(model)
    compile_towers(model, backend="aot_eager")
    assert list(model.state_dict()) == list(before)
    assert abs(model.encode_query(["w1 w2 w3"]) - vectors).max() < 1e-6
    model.save_pretrained(str(tmp_path))
    written = [file for file in tmp_path.rglob("*.json") if UNPADDED in file.read_text()]
    assert written == []
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert {encoder.config._attn_implementation for encoder in encoders(loaded)} == {"sdpa"}
    assert abs(loaded.encode_query(["w1 w2 w3"]) - vectors).max() < 1e-6


def test_an_encoder_that_cannot_be_unpadded_says_so(tiny_encoder) -> None:
    model = tiny_encoder("modernbert")
    assert not any(map(can_unpad, encoders(model)))
    with pytest.raises(ValueError, match="unpad=true is not possible for modernbert; it is for bert"):
        unpad_towers(model)
    model = tiny_encoder()
    next(encoders(model)).config.output_hidden_states = True
    with pytest.raises(ValueError, match="unpad=true is not possible for an encoder that also gives what is inside its layers"):
        unpad_towers(model)


def test_what_the_device_cannot_do_unpadded_is_one_clear_line(monkeypatch) -> None:
    with pytest.raises(ValueError, match="unpad and torch_compile go together in half precision only"):
        check_unpadded("fp32", compiled=True, cuda=True)
    monkeypatch.setattr("contaccum.towers.speed.has_flash_attention", lambda: False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU of the Ampere generation"):
        check_unpadded("bf16", compiled=False, cuda=True)
    check_unpadded("fp32", compiled=True, cuda=False)


def test_no_compiler_is_one_clear_line(monkeypatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler"):
        check_compiler(cuda=False)


def test_positives_and_hard_negatives_share_a_forward_pass(tiny_encoder) -> None:
    model = tiny_encoder()
    calls: list[int] = []
    model[0].sub_modules["document"][0].register_forward_pre_hook(lambda module, arguments: calls.append(len(arguments[0]["input_ids"])))
    ContAccumLoss(model, bank_size=8)(columns(model, 6), None)
    assert calls == [12]
