"""`MatryoshkaLoss` around a loss with a bank: what it does to the model, and how its widths are told apart.

It replaces the model's `forward` for a micro-batch by a decorator that cuts embeddings to `decorator.dim`, and calls the loss once for each
width, the same decorator with another `dim`. For losses by GradCache it decorates `calculate_loss` instead.
"""

from __future__ import annotations

from typing import Any

from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses.adaptive_layer import ForwardDecorator as LayersDecorator
from sentence_transformers.sentence_transformer.losses.matryoshka import ForwardDecorator
from torch import Tensor, nn
from torch.nn.functional import normalize


def matryoshka_forward(model: nn.Module) -> ForwardDecorator | None:
    replaced = vars(model).get("forward")
    return replaced if isinstance(replaced, ForwardDecorator) else None


def takes_several_layers(model: nn.Module) -> bool:
    """Whether `AdaptiveLayerLoss` has decorated the model, perhaps around `MatryoshkaLoss`."""
    replaced = vars(model).get("forward")
    inner = replaced.fn if isinstance(replaced, ForwardDecorator) else replaced
    return isinstance(inner, LayersDecorator)


def embed_undecorated(model: nn.Module, features: list[dict[str, Any]]) -> list[Tensor]:
    """The whole embeddings."""
    decorator = matryoshka_forward(model)
    assert decorator is not None
    model.forward = decorator.fn
    try:
        return embed_columns(model, features)
    finally:
        model.forward = decorator


def shrunk(embeddings: Tensor, width: int) -> Tensor:
    """As that loss cuts them: of unit length, whatever the similarity."""
    if width > embeddings.shape[-1]:
        raise ValueError(f"matryoshka_dims has {width}, but embeddings are only {embeddings.shape[-1]} wide; leave it out")
    return normalize(embeddings[..., :width], dim=-1)
