"""From a configuration to its towers."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from contaccum.methods.config import TrainConfig
from contaccum.towers.dual_encoder import dual_encoder
from contaccum.towers.lora import Lora, add_lora, quantization


def build_towers(config: TrainConfig) -> SentenceTransformer:
    model = dual_encoder(
        config.model,
        config.passage_model,
        tied=config.tied,
        pooling=config.pooling,
        similarity=config.similarity,
        max_seq_length=config.max_seq_length,
        tokenizer=config.tokenizer,
        query_prompt=config.query_prompt,
        passage_prompt=config.passage_prompt,
        include_prompt=config.include_prompt,
        model_kwargs=_loading(config),
    )
    if (lora := lora_of(config)) is not None:
        add_lora(model, lora)
    return model


def _loading(config: TrainConfig) -> dict[str, Any]:
    return {"dtype": weights_dtype(config), **(quantization(config.quantize) if config.quantize else {})}


def weights_dtype(config: TrainConfig) -> torch.dtype:
    found: torch.dtype = getattr(torch, config.weights_dtype)
    return found


def lora_of(config: TrainConfig) -> Lora | None:
    if config.lora_rank is None:
        return None
    targets = tuple(name.strip() for name in (config.lora_targets or "").split(",") if name.strip())
    return Lora(config.lora_rank, config.lora_alpha or 2 * config.lora_rank, config.lora_dropout, targets)
