"""Token ids straight from the tokenizer's Rust core, padded in numpy.

`SentenceTransformer.preprocess` pads a whole window and builds its tensors from Python lists, which on a fast GPU takes longer than the
model itself. Here only the ids of each text are taken, and each batch is padded alone. Whether that gives exactly what `preprocess` does is
not assumed but tried on the first texts; a model for which it does not keeps its own way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router, Transformer
from torch import Tensor

from contaccum.common.outputs import whole_path

TRIED = 32  # texts, and one longer than any limit
READABLE = {"input_ids", "attention_mask", "token_type_ids"}


class DirectReader:
    """Reads texts as one tower of a model does: `padded(tokens(texts))` is what `preprocess(texts)` would give.

    With a folder `cache`, ids are kept there, a file per call, and taken from there when the same texts come again, from this process or
    another, to a tokenizer that does the same.
    """

    def __init__(self, core: Any, prompt: str, pad_id: int, left: bool, like: dict[str, Any], cache: Path | None = None) -> None:
        self.core, self.prompt, self.pad_id, self.left, self.like, self.cache = core, prompt, pad_id, left, like, cache
        self.settings = hashlib.sha256(f"{len(prompt)} {prompt}{core.to_str()}".encode()) if cache else None

    def tokens(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        if self.cache is None or self.settings is None:
            return self._read(texts)
        digest = self.settings.copy()
        for text in texts:
            digest.update(f"{len(text)} {text}".encode())
        file = self.cache / f"{digest.hexdigest()[:32]}.npy"
        if (kept := _unpacked(file, len(texts))) is not None:
            return kept
        tokens = self._read(texts)
        with whole_path(file) as part, open(part, "wb") as out:
            np.save(out, np.concatenate([np.array([len(ids) for ids in tokens], np.int32), *tokens]))
        return tokens

    def _read(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array(encoding.ids, np.int32) for encoding in self.core.encode_batch_fast([self.prompt + text for text in texts])]

    def padded(self, tokens: Sequence[NDArray[np.int32]]) -> dict[str, Any]:
        lengths = np.array([len(ids) for ids in tokens])
        places = np.arange(lengths.max())
        mask = places >= (lengths.max() - lengths)[:, None] if self.left else places < lengths[:, None]
        ids = np.full(mask.shape, self.pad_id)
        ids[mask] = np.concatenate(tokens)  # row by row, as the mask is read
        made = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
        made["token_type_ids"] = torch.zeros_like(made["input_ids"])
        return {name: made[name] if isinstance(value, Tensor) else value for name, value in self.like.items()}


def _unpacked(file: Path, texts: int) -> list[NDArray[np.int32]] | None:
    """Lengths first, then all ids; None where there is no whole file: it is made again."""
    try:
        packed = np.load(file)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    lengths, ids = packed[:texts], packed[texts:]
    return np.split(ids, np.cumsum(lengths)[:-1]) if len(ids) == lengths.sum() else None


def direct_reader(
    model: SentenceTransformer, task: str, prompt: str | None, texts: Sequence[str], cache: Path | None = None
) -> DirectReader | None:
    """A reader that equals `model.preprocess` on some of `texts`; None where there is no such."""
    tower = _tower(model, task)
    tokenizer: Any = getattr(tower, "tokenizer", None)
    core = getattr(tokenizer, "backend_tokenizer", None)
    if tower is None or core is None or not hasattr(core, "encode_batch_fast"):
        return None
    tried = [*texts[:TRIED], " ".join(texts[:TRIED]) * 4]
    expected = model.preprocess(tried, prompt=prompt, task=task)
    if {name for name, value in expected.items() if isinstance(value, Tensor)} - READABLE:
        return None
    copy = type(core).from_str(core.to_str())  # the tokenizer's own settings are those of its last call
    copy.no_padding()
    limit = tower.max_seq_length
    copy.enable_truncation(limit) if limit else copy.no_truncation()
    reader = DirectReader(copy, prompt or "", tokenizer.pad_token_id or 0, tokenizer.padding_side == "left", expected, cache)
    return reader if _equal(reader.padded(reader._read(tried)), expected) else None


def _tower(model: SentenceTransformer, task: str) -> Transformer | None:
    first: Any = model[0]
    if isinstance(first, Router):
        towers: Any = first.sub_modules
        first = towers[task][0] if task in towers else None
    return first if isinstance(first, Transformer) else None


def _equal(made: dict[str, Any], expected: dict[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return made.keys() == expected.keys() and all(same(made[name], value) for name, value in expected.items())
