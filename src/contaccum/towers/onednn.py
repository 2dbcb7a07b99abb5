"""Linear layers by oneDNN instead of MKL, for float32 on a CPU: the same sums in another order.

PyTorch multiplies float32 matrices by MKL, which keeps to AVX2 on AMD's processors. oneDNN, which comes with PyTorch too, uses AVX-512
where there is some: forward and backward passes of a layer then take less than half of the time (docs/performance.md).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SMALLEST = 128 * 128  # elements of a weight; below, starting a product costs more than the product


@cache
def suits_onednn() -> bool:
    """Whether this is a processor on which oneDNN's products are the faster ones."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "AuthenticAMD" in processor.read_text()[:1000]


def take_onednn(model: nn.Module) -> None:
    """In place; weights, names and what is saved stay. Other types, devices and autocast go the usual way."""
    for layer in _layers(model):
        layer.__dict__["forward"] = types.MethodType(_forward, layer)


def leave_onednn(model: nn.Module) -> None:
    for layer in _layers(model):
        if _is_taken(layer):
            del layer.__dict__["forward"]


@contextmanager
def onednn_where_it_suits(model: nn.Module) -> Iterator[None]:
    """Within this block; a model that has it already keeps it."""
    layers = list(_layers(model))
    if not suits_onednn() or not layers or layers[0].weight.device.type != "cpu" or any(map(_is_taken, layers)):
        yield
        return
    take_onednn(model)
    try:
        yield
    finally:
        leave_onednn(model)


def _layers(model: nn.Module) -> Iterator[nn.Linear]:
    return (module for module in model.modules() if type(module) is nn.Linear and module.weight.numel() >= SMALLEST)


def _is_taken(layer: nn.Linear) -> bool:
    return getattr(layer.__dict__.get("forward"), "__func__", None) is _forward


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    plain = inputs.device.type == "cpu" and inputs.dtype == layer.weight.dtype == torch.float32
    if not plain or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return nn.Linear.forward(layer, inputs)
    found: Tensor = _OneDnnLinear.apply(inputs, layer.weight, layer.bias)
    return found


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs if weight.requires_grad else None, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if of_inputs else None,
            _product(rows.t(), inputs.flatten(0, -2).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left right^T + bias."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found
