"""What CUDA does otherwise than the CPU, as far as memory goes: so that a recording without a GPU shows a GPU's allocations.

1. Dropout is one kernel that keeps a mask of one byte per element.
2. Attention with a padding mask is the memory-efficient kernel: flash attention takes no mask. It keeps query, key, value, the output, one
   logarithm per row (float32, rows padded to 32) and the mask as a bias in the computing precision, which PyTorch makes again in every
   layer; never the scores. Its backward allocates the three gradients and one float32 buffer of the output's size. cuDNN's kernel, which
   newer GPUs may take for half precision, keeps the same tensors.
3. Autocast runs normalisation, softmax and a few others in float32. Matrix products are the same on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BIAS_ALIGNMENT = 16  # elements
LOG_SUM_ALIGNMENT = 32  # rows

# Under autocast: inputs cast to float32, or a float32 result of half-precision inputs.
_FLOAT32_INPUTS: set[Callable[..., Any]] = {
    *(functional.layer_norm, functional.group_norm, torch.layer_norm, torch.logsumexp, Tensor.logsumexp, functional.softplus),
    *(torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp, torch.log, Tensor.log),
}
_FLOAT32_RESULT: set[Callable[..., Any]] = {
    *(functional.softmax, torch.softmax, Tensor.softmax, functional.log_softmax, torch.log_softmax, Tensor.log_softmax),
    *(torch.sum, Tensor.sum, torch.cumsum, Tensor.cumsum),
}
_DROPOUT: set[Callable[..., Any]] = {functional.dropout, torch.dropout}


class CudaSemantics(TorchFunctionMode):
    """Functions called under it allocate and save what they would on a CUDA device; their values mean nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func in _DROPOUT:
            return dropout(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if func in _FLOAT32_INPUTS:
                args = [_single(value) for value in args]
                kwargs = {name: _single(value) for name, value in kwargs.items()}
            elif func in _FLOAT32_RESULT and _is_half(args[0]):
                kwargs.setdefault("dtype", torch.float32)
        return func(*args, **kwargs)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None) -> Tensor:
    if not (training if train is None else train) or not 0 < p < 1:
        return input
    return torch.native_dropout(input, p, True)[0]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands in for `scaled_dot_product_attention`: (b, heads, rows, width) each."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    bias = None if attn_mask is None else _bias(attn_mask, query)
    result: Tensor = _EfficientAttention.apply(query, key, value, bias)
    return result


def _bias(mask: Tensor, query: Tensor) -> Tensor:
    bias = mask.to(query.dtype)
    if mask.dtype is torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype)
        bias.masked_fill_(mask.logical_not(), -torch.inf)
    if surplus := -bias.shape[-1] % BIAS_ALIGNMENT:
        bias = functional.pad(bias, [0, surplus])[..., : mask.shape[-1]]
    return bias.expand(*query.shape[:2], *bias.shape[2:])


class _EfficientAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        samples, heads, rows, _ = query.shape
        output = query.new_empty(samples, rows, heads, value.shape[-1]).transpose(1, 2)
        aligned = math.ceil(rows / LOG_SUM_ALIGNMENT) * LOG_SUM_ALIGNMENT
        log_sums = query.new_empty(samples, heads, aligned, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, output, _ = ctx.saved_tensors
        grad_output = grad_output.transpose(1, 2).contiguous()
        gradients = [
            torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2) for x in (query, key, value)
        ]
        output.new_empty(output.shape, dtype=torch.float32)  # in fp32 a product of output and its gradient, in half precision sums
        return (*gradients, None)


def _single(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
