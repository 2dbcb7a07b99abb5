"""Texts to vectors, fast: a window of texts is tokenised at once, sorted by its true lengths and cut into batches by a token budget.

Where it can, it is tokenised into lists, and each batch is padded alone (`contaccum.retrieval.rows`). The vectors are those of
SentenceTransformer's own modules; only the batching is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contaccum.retrieval.rows import Features, makes_rows, rows_of

T = TypeVar("T")
Batch = tuple[NDArray[np.int64], Features]  # places in the window, what the model reads

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # as `SentenceTransformer.encode_document` looks for them
CHARACTERS_PER_TOKEN = 4
COMPARED = 32  # texts that are read both ways, to see whether rows will do; fewer in a window are not worth it


def prompt_of(model: Any, task: str) -> str | None:
    """What the model puts before a text for "query" or "document"."""
    names = ("query",) if task == "query" else DOCUMENT_PROMPTS
    found: str | None = next((model.prompts[name] for name in names if name in model.prompts), model.prompts.get(model.default_prompt_name))
    return found


class Encoder:
    """Vectors equal to `model.encode_query` or `model.encode_document`, up to rounding; normalised where `normalize`.

    Args:
        task: "query" or "document": the tower, and the prompt, if the model has one.
        tokens_per_batch: padded tokens that the model reads at once, at most (one text may be longer).
        precision: "fp32"; "bf16" or "fp16" run the matrix products in that type.
    """

    def __init__(
        self,
        model: Any,
        task: str,
        tokens_per_batch: int,
        precision: str = "fp32",
        normalize: bool = False,
    ) -> None:
        self.model, self.task, self.normalize = model.eval(), task, normalize
        self.tokens_per_batch, self.precision = tokens_per_batch, precision
        self.prompt = prompt_of(model, task)
        self._rows: bool | None = None  # whether batches are put together from rows; not known yet

    def dim(self) -> int:
        """Of its vectors."""
        return int(self.vectors(self.batches(["a"])).shape[1])

    def batches(self, texts: Sequence[str]) -> list[Batch]:
        """A window of texts as the model's own `preprocess` reads it, each batch padded to its own longest text."""
        if self._rows is None and len(texts) >= COMPARED:
            self._rows = makes_rows(self.model, texts[:COMPARED], self.prompt, self.task)
        rows = rows_of(self.model, texts, self.prompt, self.task) if self._rows else None
        if rows is not None:
            return [(places, rows.batch(places)) for places in by_budget(rows.lengths(), self.tokens_per_batch)]
        features = self.model.preprocess(list(texts), prompt=self.prompt, task=self.task)
        mask = features.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape[:1] != (len(texts),) or mask.ndim != 2:
            return self._unpadded_batches(texts)
        lengths = mask.sum(1).numpy()
        return [(places, _cut(features, torch.from_numpy(places), mask)) for places in by_budget(lengths, self.tokens_per_batch)]

    def _unpadded_batches(self, texts: Sequence[str]) -> list[Batch]:
        """For models whose inputs are not padded rows (flattened for flash attention, static embeddings): lengths by characters."""
        lengths = np.array([1 + len(text) // CHARACTERS_PER_TOKEN for text in texts])
        groups = by_budget(lengths, self.tokens_per_batch)
        return [(places, self.model.preprocess([texts[i] for i in places], prompt=self.prompt, task=self.task)) for places in groups]

    @torch.inference_mode()
    def vectors(self, batches: Sequence[Batch], encoded: Callable[[int], object] = lambda texts: None) -> NDArray[np.float32]:
        """(texts, dim) in the order of the window that `batches` came from; `encoded` is called with the size of each batch."""
        places = np.concatenate([places for places, _ in batches])
        with self._autocast():
            parts = []  # on the device: one copy a window
            for rows, features in batches:
                parts.append(self._forward(features))
                encoded(len(rows))
        found = torch.cat(parts).float()
        if self.normalize:
            found = torch.nn.functional.normalize(found, dim=1)
        ordered = np.empty(found.shape, np.float32)
        ordered[places] = found.cpu().numpy()
        return ordered

    def _forward(self, features: Features) -> Tensor:
        device = self.model.device
        moved = {name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for name, value in features.items()}
        vectors: Tensor = self.model(moved, task=self.task)["sentence_embedding"]
        return vectors if self.model.truncate_dim is None else vectors[..., : self.model.truncate_dim]

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.model.device.type, dtype)


def by_budget(lengths: NDArray[Any], budget: int) -> list[NDArray[np.int64]]:
    """Places of the texts, longest first, in groups whose count times longest is at most `budget`, or of one text."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    while start < len(order):
        size = max(1, budget // int(max(1, lengths[order[start]])))
        groups.append(order[start : start + size])
        start += size
    return groups


def _cut(features: Features, rows: Tensor, mask: Tensor) -> Features:
    """These rows, without the columns that are padding in all of them; padding may stand left or right."""
    used = mask[rows].any(0).nonzero()
    columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
    cut: Features = {}
    for name, value in features.items():
        if isinstance(value, Tensor) and value.ndim >= 1 and value.shape[0] == mask.shape[0]:
            part = value[rows]
            cut[name] = part[:, columns] if value.shape[:2] == mask.shape else part
        else:
            cut[name] = value
    return cut


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, the next one being made in a thread while this one is used."""
    with ThreadPoolExecutor(1) as pool:
        nothing: Any = object()
        waiting = pool.submit(next, items, nothing)
        while (item := waiting.result()) is not nothing:
            waiting = pool.submit(next, items, nothing)
            yield item
