"""One tower's parameters and passes on tensors without data, from its configuration alone: no weights are read, no memory is used."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils.operations import convert_to_fp32
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from transformers import MODEL_MAPPING, AutoModel, BertConfig, PretrainedConfig
from transformers.initialization import no_init_weights

from contaccum.common.inputs import readable
from contaccum.memory.prediction.cuda import CudaSemantics
from contaccum.memory.prediction.trace import AffineTrace, Recorder, Trace, fit
from contaccum.towers.dual_encoder import DPRPart, Source, load_encoder_config, paired_sources
from contaccum.towers.lora import Lora, adapt

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = (2, 3, 4)  # recorded: base and slope of every allocation from the first two, checked with the third
FORWARD, DROP, BACKWARD = 0, 1, 2  # segments of a tower's trace: the pass, its outputs released, the pass back


@dataclass(frozen=True)
class Tower:
    """What one forward and backward pass through a tower allocates, for any number of texts of one length."""

    fixed: tuple[int, ...]  # bytes of each parameter and buffer
    trainable: tuple[int, ...]  # bytes of each parameter that is trained
    passes: AffineTrace
    width: int  # of its vectors

    def saved_bytes(self, samples: int) -> int:
        """What autograd saves for the backward pass, each storage once, parameters and inputs not counted."""
        sizes = self.passes.sizes(samples)
        return sum(sizes[number] for number in self.passes.alive_after(DROP))


def tower_configs(
    model: Source, passage_model: Source | None = None, tokenizer: str | None = None
) -> tuple[PretrainedConfig, PretrainedConfig]:
    """Of the query tower and the passage tower that `dual_encoder` builds from the same sources."""
    query, passage = (_config(source, tokenizer) for source in paired_sources(model, passage_model))
    return query, passage


def _config(source: Source | DPRPart, tokenizer: str | None) -> PretrainedConfig:
    if isinstance(source, PretrainedConfig):
        return source
    config = load_encoder_config(tokenizer or "bert-base-uncased" if isinstance(source, DPRPart) else source)
    if config.model_type == "dpr":
        fields = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures", "projection_dim")}
        return BertConfig(**fields)
    if config.is_encoder_decoder:
        raise ValueError(f"{source} is an encoder-decoder ({config.model_type}), whose memory cannot be planned; give --n-local yourself")
    return config


@dataclass(frozen=True)
class Running:
    """How a tower is run and trained."""

    pooling: str = "cls"
    precision: str = "fp32"
    checkpointing: bool = False
    weights: torch.dtype = torch.float32
    lora: Lora | None = None
    quantized: bool = False  # what adapters leave frozen is in 4 bits


def record(config: PretrainedConfig, tokens: int, running: Running = Running()) -> Tower:
    """Record a tower for texts of `tokens` tokens."""
    _check_length(config, tokens)
    with torch.device("meta"):  # peft cannot put adapters beside layers that are fake already
        encoder = Encoder(config, running)
    with (mode := FakeTensorMode()):
        _on_cpu(encoder)
    passes = {n: record_passes(encoder, n, tokens, mode) for n in BATCHES}
    return Tower(
        fixed=fixed_bytes(encoder),
        trainable=tuple(p.nbytes for p in encoder.parameters() if p.requires_grad),
        passes=fit(passes, f"{config.model_type} with {tokens} tokens"),
        width=encoder.width,
    )


def fixed_bytes(encoder: Encoder) -> tuple[int, ...]:
    """Of each parameter and buffer. Weights in 4 bits have scales beside them; the largest is there once more, as it is computed with."""
    packed = {id(linear.weight): linear.weight.nbytes for linear in encoder.quantized}
    found: list[int] = []
    for tensor in [*encoder.parameters(), *encoder.buffers()]:
        found += packed_bytes(tensor.numel()) if id(tensor) in packed else [tensor.nbytes]
    return (*found, max(packed.values())) if packed else tuple(found)


def packed_bytes(numbers: int) -> list[int]:
    """As bitsandbytes keeps them: two in a byte, a scale of a byte for 64, a float32 for 256 of these, and two tables with an offset."""
    scales = math.ceil(numbers / 64)
    return [math.ceil(numbers / 2), scales, 4 * math.ceil(scales / 256), 4 * 16, 4 * 256, 4]


def _on_cpu(encoder: nn.Module) -> None:
    """Tensors like the encoder's, made under the present mode."""
    made: dict[int, Tensor] = {}
    for module in encoder.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            own = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            setattr(module, name, made.setdefault(id(tensor), own))


def can_checkpoint(config: PretrainedConfig) -> bool:
    """Whether transformers offers gradient checkpointing for this model."""
    known: Any = MODEL_MAPPING.get(type(config), None)
    return known is None or bool((known[0] if isinstance(known, tuple) else known).supports_gradient_checkpointing)


def longest(model: Source, passage_model: Source | None, tokens: int) -> int:
    """`tokens`, or as many as both towers have positions for."""
    rooms = [getattr(config, "max_position_embeddings", tokens) for config in tower_configs(model, passage_model)]
    return int(min(tokens, *rooms))


def _check_length(config: PretrainedConfig, tokens: int) -> None:
    room = getattr(config, "max_position_embeddings", None)
    if room is not None and tokens > room:
        raise ValueError(
            f"--max-seq-length {tokens} is longer than the {room} positions of the {config.model_type} model; use at most {room}"
        )


class Encoder(nn.Module):
    """Features in, sentence embeddings out, as a trained SentenceTransformer's tower does it under accelerate's autocast.

    Its forward pass, and what checkpointing computes again of it, run under `semantics`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        running: Running,
        semantics: Callable[[], AbstractContextManager[Any]] = CudaSemantics,
    ) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        what = f"no {config.model_type} model can be built from its configuration"
        with readable(what, "give a model whose config.json is whole"), no_init_weights():  # drawing them needs data
            self.model = AutoModel.from_config(config, dtype=running.weights)
        for name, parameter in self.model.named_parameters():
            if name.startswith("pooler."):
                parameter.requires_grad_(False)  # as in `dual_encoder`
        self.quantized = [module for module in self.model.modules() if running.quantized and isinstance(module, nn.Linear)]
        for linear in self.quantized:  # computed with in half precision, without a cast at every use
            linear.to(AUTOCAST.get(running.precision, running.weights))
        if running.lora is not None:
            adapt(self.model, running.lora)
        if running.checkpointing:
            config.use_cache = False  # as transformers does then, with a warning
            self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), semantics())})
        self.semantics = semantics
        self.width = int(config.hidden_size)
        self.pooling = Pooling(self.width, pooling_mode=running.pooling)
        self.precision = running.precision
        self.dtype = torch.float32 if running.precision in AUTOCAST else running.weights  # of its vectors
        self.train()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        with self.semantics(), torch.autocast("cpu", AUTOCAST[self.precision]) if self.precision in AUTOCAST else nullcontext():
            features["token_embeddings"] = self.model(**features).last_hidden_state
            features = self.pooling(features)
        return convert_to_fp32(features) if self.precision in AUTOCAST else features


def record_passes(encoder: Encoder, samples: int, tokens: int, mode: AbstractContextManager[Any]) -> Trace:
    """Segments FORWARD, DROP and BACKWARD, under the `mode` in which the encoder was built; parameters are left without gradients.

    Not counted are the inputs and the gradient of the embeddings.
    """
    with mode:
        features = inputs(samples, tokens)
        gradient = torch.zeros(samples, encoder.width, dtype=encoder.dtype)
        recorder = Recorder([*encoder.parameters(), *encoder.buffers(), *features.values(), gradient])
        hooks = [p.register_post_accumulate_grad_hook(partial(_keep, recorder)) for p in encoder.parameters() if p.requires_grad]
        gc.disable()  # what cycles hold must be released at the same place for every batch
        try:
            with recorder:
                embeddings = encoder(features)["sentence_embedding"]
                edge = get_gradient_edge(embeddings)
                recorder.next_segment()
                del features, embeddings
                recorder.next_segment()
                torch.autograd.backward([edge], [gradient])
        finally:
            gc.enable()
            for hook in hooks:
                hook.remove()
        trace = recorder.trace()
        encoder.zero_grad()
    return trace


def inputs(samples: int, tokens: int) -> dict[str, Tensor]:
    """Padded texts: with a mask that hides something, as nearly every batch of real texts has one."""
    mask = torch.ones(samples, tokens, dtype=torch.int64)
    mask[0, -1] = 0
    return {"input_ids": torch.ones(samples, tokens, dtype=torch.int64), "attention_mask": mask}


def _keep(recorder: Recorder, parameter: Tensor) -> None:
    if parameter.grad is not None:
        recorder.keep(parameter.grad)
