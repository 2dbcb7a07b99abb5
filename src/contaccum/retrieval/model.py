"""The model that encodes: loading it, and a checksum that says which it is."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module, Transformer

from contaccum.retrieval.device import check_device
from contaccum.towers.loading import check_length, load_model


def model_on_device(model: Any, device: str | None = None, max_seq_length: int | None = None) -> SentenceTransformer:
    """A SentenceTransformer on its device, from a folder or name, or itself; under torchrun each process has its own GPU."""
    check_device(device)
    if isinstance(model, (str, Path)):
        if device is None and torch.cuda.is_available():
            device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        model = load_model(model, device=device)
    elif device is not None:
        model.to(device)
    assert isinstance(model, SentenceTransformer)
    if max_seq_length is not None:
        _limit(model, max_seq_length)
    return model


def _limit(model: SentenceTransformer, tokens: int) -> None:
    """Texts of every tower are cut after so many tokens."""
    for module in model.modules():
        if isinstance(module, Transformer):
            check_length(module, tokens)
            module.max_seq_length = tokens


def model_checksum(model: SentenceTransformer) -> str:
    """SHA-256 of what makes the vectors: weights, modules and vocabulary. Both towers count: queries and passages have the same."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for module in model.modules():
        config = module.get_config_dict() if isinstance(module, Module) else {}
        kept = {key: value for key, value in config.items() if key != "max_seq_length"}  # may be given again
        digest.update(json.dumps([type(module).__name__, kept], sort_keys=True, default=str).encode())
    vocabulary = model.tokenizer.get_vocab() if hasattr(model.tokenizer, "get_vocab") else {}
    digest.update(json.dumps(sorted(vocabulary.items())).encode())
    return digest.hexdigest()


def is_cosine(model: SentenceTransformer) -> bool:
    """Whether the model compares by cosine; False: by dot product."""
    name = str(model.similarity_fn_name)
    if name not in ("cosine", "dot"):
        raise ValueError(f"the model's similarity is {name}, but search is by dot or cosine; set similarity_fn_name")
    return name == "cosine"
