"""The planner's recordings: what autograd saves is predicted to the byte, for every family, and without data."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig

from conftest import tiny_config
from contaccum.memory.prediction.cuda import CudaSemantics
from contaccum.memory.prediction.towers import DROP, Encoder, Running, can_checkpoint, inputs, record, record_passes
from contaccum.memory.prediction.trace import AffineTrace, Trace, fit, sorted_releases
from plan_models import TOKENS, middling


def saved_by_hooks(encoder: Encoder, samples: int) -> int:
    """Bytes that autograd saves in a real forward pass: each storage once, without parameters, buffers and inputs."""
    features = inputs(samples, TOKENS)
    known = {t.untyped_storage()._cdata for t in [*encoder.parameters(), *encoder.buffers(), *features.values()]}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        embedding = encoder(dict(features))["sentence_embedding"]
    assert embedding.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def poolerless(config: BertConfig, precision: str, semantics: Any) -> Encoder:
    """BERT's own pooler saves its output for nobody; a hook sees that, a recording of what stays does not."""
    encoder = Encoder(config, Running("cls", precision), semantics)
    encoder.model.pooler = None
    return encoder


@pytest.mark.parametrize("semantics", [nullcontext, CudaSemantics])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_saved_bytes_are_affine_and_predicted_exactly(attention: str, precision: str, semantics: Any) -> None:
    """Predicted from batches of 2, 3 and 4 without data; saved by real passes of 1, 2, 3 and 6."""
    config = middling()
    config._attn_implementation = attention
    encoder = poolerless(config, precision, semantics)
    saved = {n: saved_by_hooks(encoder, n) for n in (1, 2, 3, 6)}
    assert saved[3] - saved[2] == saved[2] - saved[1] > 0
    with (mode := FakeTensorMode()):
        fake = poolerless(config, precision, semantics)
    trace = fit({n: record_passes(fake, n, TOKENS, mode) for n in (2, 3, 4)}, "it")
    for n, bytes_saved in saved.items():
        sizes = trace.sizes(n)
        assert sum(sizes[i] for i in trace.alive_after(DROP)) == bytes_saved, n


def test_attention_on_cuda_saves_no_scores() -> None:
    """Twice as long texts: the mask's bias grows fourfold, everything else at most twofold."""
    config = middling(num_hidden_layers=1, max_position_embeddings=512)
    short, long = (record(config, tokens).saved_bytes(4) for tokens in (128, 256))
    bias = 4 * 4 * 128 * 128  # bytes, samples, rows, columns
    assert 2 * short < long <= 2 * short + 2 * bias
    config._attn_implementation = "eager"
    assert record(config, 256).saved_bytes(4) > long + 4 * 4 * 2 * 256 * 256


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "qwen"])
@pytest.mark.parametrize(("precision", "checkpointing"), [("fp32", True), ("bf16", False), ("fp16", True)])
def test_every_family_can_be_recorded(family: str, checkpointing: bool, precision: str) -> None:
    config = tiny_config(family)
    tower = record(
        config, TOKENS, Running("lasttoken" if family == "qwen" else "mean", precision, checkpointing and can_checkpoint(config))
    )
    assert tower.saved_bytes(5) > 0
    assert len({number for _, number in tower.passes.kept}) >= len(tower.trainable) - 1  # a tower may leave one unused


def test_checkpointing_and_half_precision_save_memory() -> None:
    config = middling(num_hidden_layers=6)
    saved = {(p, c): record(config, TOKENS, Running("cls", p, c)).saved_bytes(64) for p in ("fp32", "bf16") for c in (False, True)}
    assert saved["fp32", True] < 0.2 * saved["fp32", False]
    assert saved["bf16", False] < 0.95 * saved["fp32", False]


def test_uneven_growth_is_refused() -> None:
    def trace(size: int) -> Trace:
        return Trace((size,), ((0,),))

    assert fit({2: trace(5), 3: trace(7), 4: trace(9)}, "it") == AffineTrace((1,), (2,), ((0,),), ())
    with pytest.raises(ValueError, match="it does not grow evenly"):
        fit({2: trace(5), 3: trace(7), 4: trace(10)}, "it")
    with pytest.raises(ValueError, match="it does not grow evenly"):
        fit({2: trace(5), 3: Trace((7, 1), ((0, 1),)), 4: trace(9)}, "it")


def test_releases_at_one_place_have_one_order() -> None:
    """Autocast drops its cache in the order of addresses; a gradient's place stays where it is."""
    assert sorted_releases([0, 1, ~1, ~0, 2, ~2]) == (0, 1, ~0, ~1, 2, ~2)
    assert sorted_releases([0, 1, 2, ~2, ~1, ~0], {4}) == (0, 1, 2, ~2, ~0, ~1)


def test_a_recording_without_data_is_one_with_data() -> None:
    """Only where several gradients meet does a tensor without data take one more buffer for their sum."""
    peaks = {}
    for name, mode in (("fake", FakeTensorMode()), ("real", nullcontext())):
        with mode:
            encoder = Encoder(middling(), Running())
        trace = record_passes(encoder, 4, TOKENS, mode)
        peaks[name] = _peak(trace)
    assert peaks["real"] <= peaks["fake"] <= 1.02 * peaks["real"]


def _peak(trace: Trace) -> int:
    live = peak = 0
    for event in (event for segment in trace.segments for event in segment):
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        peak = max(peak, live)
    return peak
