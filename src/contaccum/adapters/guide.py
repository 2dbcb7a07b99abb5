"""A guide: a model that is not trained and says how similar two texts are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import has_static_embedding_input
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

TEXTS_AT_ONCE = 64


class Guide(nn.Module):
    """Embeds the texts that the trained model gets, from its token ids where it has the same tokens, else from the text again."""

    def __init__(self, guide: SentenceTransformer, model: SentenceTransformer) -> None:
        super().__init__()
        theirs: Any = getattr(model, "tokenizer", None)
        mine: Any = getattr(guide, "tokenizer", None)
        if not (hasattr(theirs, "get_vocab") and hasattr(theirs, "batch_decode")):
            raise ValueError("a guide needs the texts, and the trained model has no tokenizer to get them back; use margin without a guide")
        read_by: list[Any] = [getattr(part, "tokenizer", None) for part in model.modules()]
        known = [tokenizer.get_vocab() for tokenizer in read_by if hasattr(tokenizer, "get_vocab")]
        if any(vocabulary != known[0] for vocabulary in known):
            raise ValueError("a guide reads the texts of both towers by one tokenizer, and these have two; use margin without a guide")
        if guide is model:
            raise ValueError("the guide is the model that is trained; leave it out and use margin, or give a copy of it")
        self.guide = guide.requires_grad_(False)
        self.tokenizer = theirs
        same = hasattr(mine, "get_vocab") and mine.get_vocab() == theirs.get_vocab() and not has_static_embedding_input(guide)
        self.same_tokens = same and (guide.max_seq_length or 0) >= (model.max_seq_length or 0)

    @property
    def name(self) -> str:
        return str(self.guide.model_card_data.base_model or type(self.guide).__name__)

    @torch.no_grad()
    def embed(self, features: list[dict[str, Any]], at_once: int = TEXTS_AT_ONCE) -> list[Tensor]:
        """(n, g) for each column, a bounded number of texts at a time."""
        self.guide.eval()
        return [self._embed(column, at_once) for column in features]

    def _embed(self, column: dict[str, Any], size: int) -> Tensor:
        ids = column.get("input_ids")
        if ids is None:
            raise ValueError("a guide needs texts, but a column has no input_ids; use margin without a guide")
        if self.same_tokens and "cu_seq_lens_q" not in column:
            parts = [{k: v[i : i + size] if _per_text(v, len(ids)) else v for k, v in column.items()} for i in range(0, len(ids), size)]
        else:
            texts = self._texts(column)
            parts = [self._preprocessed(texts[i : i + size], column.get("task"), ids.device) for i in range(0, len(texts), size)]
        return torch.cat([self.guide(part)["sentence_embedding"] for part in parts])

    def _preprocessed(self, texts: list[str], task: str | None, device: torch.device) -> dict[str, Any]:
        features = self.guide.preprocess(texts, task=task)
        return batch_to_device(features if task is None else {**features, "task": task}, device)

    def _texts(self, column: dict[str, Any]) -> list[str]:
        ids = column["input_ids"]
        if "cu_seq_lens_q" in column:
            starts = column["cu_seq_lens_q"].tolist()
            ids = [ids.flatten()[a:b] for a, b in pairwise(starts)]
        else:
            ids = [row[mask.bool()] for row, mask in zip(ids, column["attention_mask"], strict=True)]
        decoded: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return decoded


def _per_text(value: Any, texts: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == texts
