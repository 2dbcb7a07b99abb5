"""A key per text, by which equal texts are known to be equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What a model adds to the features of its inputs, which a loss may get that is not the first to see them, embeddings apart.
OUTPUTS = ("token_weights_sum", "scores", "causal_logits")
# What says where a text's tokens are and how many, as names that end with `_ids` and `_mask` do.
PLACES = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "offsets"),
    *("length", "prompt_length", "sentence_lengths", "token_counts", "query_expansion_positions"),
)


def token_keys(features: dict[str, Any]) -> Tensor | None:
    """A 64-bit key per text from its token ids without padding: (n,) int64, or None where the input is not text.

    Equal texts have equal keys whatever the padding, its side or flattening; different ones differ but for a chance of 2^-64.
    Images and sounds beside a text stand for one and the same token in it, so that their own values count too.
    """
    ids = features.get("input_ids")
    if ids is None:
        return None
    if "cu_seq_lens_q" in features:  # flattened: all texts in one row
        keys = _flattened_keys(ids.flatten(), features["cu_seq_lens_q"].to(torch.int64))
    elif "offsets" in features:  # likewise, for a StaticEmbedding
        keys = _flattened_keys(ids, torch.cat([features["offsets"], features["offsets"].new_tensor([len(ids)])]))
    else:
        keys = _padded_keys(ids, features.get("attention_mask"))
    for name, values in sorted(features.items()):
        if isinstance(values, Tensor) and _is_content(name, values):
            keys = _mix(keys * _ODD + _content_keys(values, len(keys)))
    return keys


def _is_content(name: str, values: Tensor) -> bool:
    """Whether these are an image's or a sound's own values: neither about the tokens, nor what a model has made of them."""
    about_tokens = name.endswith(("_ids", "_mask")) or name in PLACES
    output = "embedding" in name or name in OUTPUTS or values.requires_grad
    return values.dim() > 0 and not about_tokens and not output


def _padded_keys(ids: Tensor, mask: Tensor | None) -> Tensor:
    mask = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask.to(torch.int64)
    return _mix((_mix(ids * _ODD + mask.cumsum(1)) * mask).sum(1))


def _content_keys(values: Tensor, texts: int) -> Tensor:
    """(texts,): of each text's own values, where they stand in rows; else of all, and another for each text: then none are equal."""
    if len(values) == texts:
        return torch.stack([_content_key(row) for row in values])
    return _content_key(values) + torch.arange(texts, device=values.device)


def _content_key(values: Tensor) -> Tensor:
    bits = values.contiguous().flatten().view(_BITS[values.element_size()]).to(torch.int64)
    return _mix(_mix(bits * _ODD + torch.arange(len(bits), device=bits.device)).sum())


def _flattened_keys(ids: Tensor, starts: Tensor) -> Tensor:
    places = torch.arange(len(ids), device=ids.device)
    text = torch.searchsorted(starts, places, right=True) - 1
    keys = torch.zeros(len(starts) - 1, dtype=torch.int64, device=ids.device)
    return _mix(keys.index_add(0, text, _mix(ids * _ODD + places - starts[text] + 1)))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number


def _mix(x: Tensor) -> Tensor:
    """Spread every bit of x over all 64 (the finaliser of SplitMix64; products wrap around)."""
    x = (x ^ (x >> 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ (x >> 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31)
