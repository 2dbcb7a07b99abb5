"""Token ids of texts without padding, as lists: making padded tensors of a whole window takes Python longer than tokenising it.

sentence-transformers tokenises, cuts and adds prompts as always; it is only asked to leave padding to us (`processing_kwargs`). Whether a
model's batches can be put together so is found by doing it both ways with a few texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router, Transformer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Features = dict[str, Any]

AS_ROWS = {"common": {"return_tensors": None}, "text": {"padding": False}}
IDS, MASK = "input_ids", "attention_mask"
COLUMNS = {IDS, MASK, "token_type_ids"}  # of a text, a value for each token


@dataclass(frozen=True)
class Rows:
    """Texts' columns as lists of different lengths; `rest` are features of all of them."""

    columns: dict[str, list[list[int]]]
    rest: Features
    padding: dict[str, int]
    left: bool

    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(row) for row in self.columns[IDS]], np.int64)

    def batch(self, places: NDArray[np.int64]) -> Features:
        """These texts, padded to the longest of them."""
        longest = max(1, *(len(self.columns[IDS][i]) for i in places))
        features: Features = {}
        for name, rows in self.columns.items():
            padded = np.full((len(places), longest), self.padding[name], np.int64)
            for into, i in zip(padded, places, strict=True):
                into[longest - len(rows[i]) if self.left else 0 :][: len(rows[i])] = rows[i]
            features[name] = torch.from_numpy(padded)
        return {**features, **self.rest}


def rows_of(model: SentenceTransformer, texts: Sequence[str], prompt: str | None, task: str) -> Rows | None:
    """None where the model does not give lists for them."""
    tokenizer = _tokenizer(model, task)
    if tokenizer is None:
        return None
    found: Features = dict(model.preprocess(list(texts), prompt=prompt, task=task, processing_kwargs=AS_ROWS))
    columns = {name: found.pop(name) for name in COLUMNS & set(found)}
    lists = all(isinstance(column, list) and len(column) == len(texts) for column in columns.values())
    if not lists or not {IDS, MASK} <= set(columns) or any(isinstance(value, (Tensor, list)) for value in found.values()):
        return None
    padding = {IDS: tokenizer.pad_token_id, MASK: 0, "token_type_ids": tokenizer.pad_token_type_id}
    return Rows(columns, found, padding, tokenizer.padding_side == "left")


def makes_rows(model: SentenceTransformer, texts: Sequence[str], prompt: str | None, task: str) -> bool:
    """Whether a batch of rows is what the model's own `preprocess` gives, for these texts."""
    rows = rows_of(model, texts, prompt, task)
    if rows is None or min(rows.lengths()) == 0:
        return False
    ours, theirs = rows.batch(np.arange(len(texts))), model.preprocess(list(texts), prompt=prompt, task=task)
    return set(ours) == set(theirs) and all(_equal(ours[name], theirs[name]) for name in ours)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return not isinstance(other, Tensor) and bool(one == other)


def _tokenizer(model: SentenceTransformer, task: str) -> PreTrainedTokenizerBase | None:
    """Of the tower for a task, where it reads text by a tokenizer alone and has a token to pad with."""
    tower: Any = model[0]
    if isinstance(tower, Router):
        tower = tower.sub_modules[task][0] if task in tower.sub_modules else None  # type: ignore[index]
    if not isinstance(tower, Transformer) or "message" in tower.modality_config:
        return None
    tokenizer = tower.processor
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.pad_token_id is not None else None
