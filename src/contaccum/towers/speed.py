"""Faster towers that compute the same: layers compiled, padding left out.

Both change the encoders of a SentenceTransformer in place and can be taken back. Neither changes a weight, the names in a state dict or
what `save_pretrained` writes.

- `compile_towers`: the layers of each encoder are compiled for any batch and length. All layers and both towers share one compiled
  function, so compiling takes the time of one layer. (transformers' own `torch_compile=True` would compile the whole SentenceTransformer,
  and turn on TF32 with it.)
- `unpad_towers`: an encoder sees the tokens of a batch in one row, without padding; attention keeps the texts apart by their places
  (PyTorch's own variable-length kernels, with dropout; no flash-attn package). The result is padded again, so that pooling, GradCache and
  losses see what they always see. How many tokens there are is counted when texts are tokenised: asking the device would wait for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.experimental._config as shapes
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

UNPADDED = "contaccum_unpadded"
COUNTS = "token_counts"  # the feature's name
HALF = (torch.float16, torch.bfloat16)
HEAD_WIDTHS = 8  # flash attention takes multiples of this


def _columns(mask: Tensor, config: Any) -> Tensor:
    return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)


def _after_padding(mask: Tensor, config: Any) -> Tensor:
    return mask.cumsum(1) + int(config.pad_token_id)


# Encoders whose attention sees the whole text, through transformers' interface, and how they number the tokens of a padded batch (n, t).
UNPADDABLE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "bert": _columns,
    "distilbert": _columns,
    "electra": _columns,
    "roberta": _after_padding,
    "xlm-roberta": _after_padding,
}


def towers(model: nn.Module) -> Iterator[Transformer]:
    return (module for module in model.modules() if isinstance(module, Transformer))


def encoders(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The transformers model of each tower."""
    return (tower.auto_model for tower in towers(model))


def compile_towers(model: SentenceTransformer, backend: str = "inductor") -> None:
    """Compile the layers of all towers, one function for all, for batches of any shape.

    Sizes that happen to be equal, as n texts of n tokens, are not taken for one (in this process, whatever is compiled): such a batch would
    get a function of its own, and checkpointing may then recompute a layer by another function than it was computed by, which it refuses.
    """
    shapes.use_duck_shape = False
    for layer in _layers(model):
        layer.compile(backend=backend, dynamic=True)


def uncompile_towers(model: SentenceTransformer) -> None:
    for layer in _layers(model):
        layer._compiled_call_impl = None


def _layers(model: SentenceTransformer) -> Iterator[nn.Module]:
    return (layer for encoder in encoders(model) for _, layers in stacks(encoder) for layer in layers)


def stacks(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules that are a stack of layers of one kind, each with its layers; the outermost only."""
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len({type(layer) for layer in child}) == 1]
    if lists:
        yield module, [layer for layers in lists for layer in layers]
        return
    for child in module.children():
        yield from stacks(child)


def check_compiler(cuda: bool) -> None:
    """ValueError where there is nothing to compile with."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if cuda and not has_triton():
        raise ValueError("torch_compile needs Triton, which does not work here; install it or leave torch_compile out")
    try:
        if not cuda:
            get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError("torch_compile needs a C++ compiler on a machine without a GPU; install g++ or leave torch_compile out") from error


def check_unpadded(precision: str, compiled: bool, cuda: bool) -> None:
    """ValueError for what the device cannot do without padding."""
    if cuda and precision == "fp32" and compiled:  # PyTorch's shape function of that kernel's backward pass misses an argument
        raise ValueError("unpad and torch_compile go together in half precision only; use precision bf16 or leave one of them out")
    if cuda and precision != "fp32" and not has_flash_attention():
        raise ValueError(
            "unpad in half precision needs an NVIDIA GPU of the Ampere generation or later, and a PyTorch with flash attention; "
            "leave it out, or resume a run that began with it on such a GPU"
        )


def unpads_by_itself(model: SentenceTransformer, precision: str) -> bool:
    """Whether training leaves padding out by default: where texts of one length take as long, and others less."""
    able = all(can_unpad(encoder) and not shows_layers(encoder.config) for encoder in encoders(model))
    return able and precision != "fp32" and has_flash_attention()


def unpad_towers(model: SentenceTransformer) -> None:
    """Leave padding out in all towers; ValueError for an encoder that cannot."""
    if kinds := [encoder.config.model_type for encoder in encoders(model) if not can_unpad(encoder)]:
        raise ValueError(f"unpad=true is not possible for {kinds[0]}; it is for {', '.join(UNPADDABLE)}")
    if any(shows_layers(encoder.config) for encoder in encoders(model)):
        raise ValueError("unpad=true is not possible for an encoder that also gives what is inside its layers; leave it out")
    AttentionInterface.register(UNPADDED, attention_unpadded)
    AttentionMaskInterface.register(UNPADDED, _no_mask)
    for tower in towers(model):
        tower.auto_model.set_attn_implementation(UNPADDED)
        # sentence-transformers calls `forward`, not the module
        tower.auto_model.forward = types.MethodType(_forward_unpadded, tower.auto_model)
        count_tokens(tower)


def repad_towers(model: SentenceTransformer) -> None:
    for tower in towers(model):
        uncount_tokens(tower)
        if tower.auto_model.__dict__.pop("forward", None) is not None:
            tower.auto_model.set_attn_implementation("sdpa")


def can_unpad(encoder: PreTrainedModel) -> bool:
    config = encoder.config
    known = config._attn_implementation in ("sdpa", UNPADDED) and attends_to_all(config)
    return known and config.hidden_size // config.num_attention_heads % HEAD_WIDTHS == 0


def attends_to_all(config: PretrainedConfig) -> bool:
    """Whether it is one of the known encoders, and no decoder."""
    return config.model_type in UNPADDABLE and not getattr(config, "is_decoder", False)


def shows_layers(config: PretrainedConfig) -> bool:
    """Whether such an encoder also gives what its single layers gave."""
    return bool(config.output_hidden_states or config.output_attentions)


def has_flash_attention() -> bool:
    """Whether PyTorch's variable-length kernel for half precision is there, and runs on the device, an NVIDIA GPU."""
    built = torch.cuda.is_available() and torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability()[0] >= 8


def count_tokens(tower: Transformer) -> None:
    """Have its texts' tokens counted when they are tokenised, and passed to its encoder."""
    tower.preprocess = types.MethodType(_preprocess_counting, tower)  # type: ignore[method-assign]
    if tower.model_forward_params is not None:
        tower.model_forward_params |= {COUNTS}


def uncount_tokens(tower: Transformer) -> None:
    tower.__dict__.pop("preprocess", None)


def _preprocess_counting(self: Transformer, *arguments: Any, **options: Any) -> dict[str, Any]:
    """As the tower's own, with the number of each text's tokens; a list, which trainers leave where it is when they move a batch."""
    features: dict[str, Any] = type(self).preprocess(self, *arguments, **options)
    if "attention_mask" in features:
        features[COUNTS] = features["attention_mask"].sum(1).tolist()
    return features


def countable(features: dict[str, Any]) -> dict[str, Any]:
    """Token counts as a tensor, not on the device, so that columns are merged and cut with them."""
    counts = features.get(COUNTS)
    return features if counts is None else {**features, COUNTS: torch.as_tensor(counts, device="cpu")}


def _forward_unpadded(
    self: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    token_counts: Tensor | list[int] | None = None,
    **options: Any,
) -> Any:
    """As the encoder's own forward, with zeros in place of the hidden states of padding."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask  # (n, t)
    if token_counts is None or len(token_counts) != len(mask):  # unknown, or of a batch that this is a part of
        real = mask.flatten().nonzero().flatten()  # waits for the device
    else:
        real = mask.flatten().argsort(descending=True, stable=True)[: int(torch.as_tensor(token_counts).sum())]
    starts = functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)  # (n + 1,)
    positions = UNPADDABLE[self.config.model_type](mask, self.config)
    if token_type_ids is not None:
        options["token_type_ids"] = token_type_ids.flatten()[real][None]
    output = type(self).forward(
        self,
        input_ids=input_ids.flatten()[real][None],
        position_ids=positions.flatten()[real][None],
        cu_seq_lens_q=starts,
        max_length_q=mask.shape[1],  # no text is longer; the longest itself would have to be waited for
        **options,
    )
    hidden = output.last_hidden_state[0]
    padded = hidden.new_zeros(mask.numel(), hidden.shape[-1]).index_copy(0, real, hidden)
    output.last_hidden_state = padded.view(*mask.shape, -1)
    return output


def attention_unpadded(
    module: nn.Module,
    query: Tensor,  # (1, heads, tokens, width), as key and value
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention within each text of a row of them: (1, tokens, heads, width)."""
    texts, longest = cu_seq_lens_q, max_length_q
    if not query.is_cuda:
        return _attention_by_mask(query, key, value, dropout, scaling, texts), None
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if query.dtype in HALF:
        rows = (x.squeeze(0) for x in (query, key, value))
        result = torch.ops.aten._flash_attention_forward(*rows, texts, texts, longest, longest, dropout, False, False, scale=scaling)
        return result[0].unsqueeze(0), None
    result = torch.ops.aten._efficient_attention_forward(
        query, key, value, None, texts, texts, longest, longest, dropout, 0, compute_log_sumexp=True, scale=scaling
    )
    return result[0], None


def _attention_by_mask(query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, starts: Tensor) -> Tensor:
    """The same where there is no kernel for it: all tokens with all, and a mask between texts."""
    text = torch.bucketize(torch.arange(query.shape[2], device=starts.device), starts[1:], right=True)
    mask = text[:, None] == text
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling).transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
