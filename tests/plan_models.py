"""A model for tests of the planner: its size and its texts' length."""

from __future__ import annotations

from typing import Any

from transformers import BertConfig, Qwen3Config

TOKENS = 24


def middling(**changes: Any) -> BertConfig:
    """Large enough that blocks of 512 bytes do not decide."""
    shape = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    return BertConfig(**{**shape, "max_position_embeddings": 64, **changes})


def decoder() -> Qwen3Config:
    """Of Qwen3's shape, about as large."""
    shape = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3Config(**shape, head_dim=16, intermediate_size=192, max_position_embeddings=64, pad_token_id=0)
