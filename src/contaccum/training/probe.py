"""How far the vectors in the bank are from what the same texts are encoded to now."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cosine_similarity

from contaccum.adapters.losses import ContAccumLoss

TEXTS_PER_MICRO_BATCH = 4  # texts of each micro-batch


class BankProbe:
    """Keeps the texts of a few tuples of each micro-batch while they are in the bank, and encodes them again on request.

    Vectors are compared as the loss reads them, drift correction included. Those in the bank were encoded with dropout, those of now
    are not: age 0 shows what dropout alone does.
    """

    def __init__(self, loss: ContAccumLoss) -> None:
        self.loss = loss
        # bank -> its first tuple's number -> columns of features of TEXTS_PER_MICRO_BATCH tuples
        self.texts: defaultdict[str, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
        loss.register_forward_pre_hook(self._keep)

    def _keep(self, _: Any, arguments: tuple[Any, ...]) -> None:
        bank = self.loss.criterion.bank
        columns = list(arguments[0])[:2]  # queries and positives
        if not (self.loss.model.training and torch.is_grad_enabled() and bank.size):
            return
        if any("cu_seq_lens_q" in column for column in columns):
            raise ValueError("drift_every reads padded inputs, but these are flattened; leave it out or use padding")
        gathered = self.loss.gather_across_devices and dist.is_available() and dist.is_initialized()
        size = len(columns[0]["input_ids"])
        first = bank.count + (dist.get_rank() * size if gathered else 0)
        kept = self.texts[self.loss.criterion.bank_name]
        for number in [number for number in kept if number < bank.count - len(bank)]:
            del kept[number]
        kept[first] = [_first_texts(column, size) for column in columns]

    def drift(self) -> list[dict[str, Any]]:
        """Mean cosine of the bank in use and the present, by age: one entry per update that the bank reaches back."""
        bank = self.loss.criterion.bank
        passages, ages, oldest = bank.passages, bank.ages, bank.count - len(bank)
        queries = bank.queries
        found: dict[float, list[tuple[float | None, float]]] = {}
        for first, columns in self.texts[self.loss.criterion.bank_name].items():
            now = self._encoded(columns)
            for i, (query, passage) in enumerate(zip(*now, strict=True)):
                place = first + i - oldest
                if not 0 <= place < len(ages):
                    continue
                row = place - (len(ages) - len(queries))
                of_query = None if row < 0 else float(cosine_similarity(queries[row].float(), query, dim=0))
                of_passage = float(cosine_similarity(passages[place, 0].float(), passage, dim=0))
                found.setdefault(float(ages[place]), []).append((of_query, of_passage))
        return [_mean_of(i, age, found[age]) for i, age in enumerate(sorted(found))]

    def _encoded(self, columns: list[dict[str, Any]]) -> list[Tensor]:
        model = self.loss.model
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return [model(dict(column))["sentence_embedding"].float() for column in columns]
        finally:
            model.train(training)


def _first_texts(column: dict[str, Any], size: int) -> dict[str, Any]:
    def is_per_text(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == size

    return {name: value[:TEXTS_PER_MICRO_BATCH].clone() if is_per_text(value) else value for name, value in column.items()}


def _mean_of(place: int, age: float, cosines: list[tuple[float | None, float]]) -> dict[str, Any]:
    queries = [query for query, _ in cosines if query is not None]
    passages = [passage for _, passage in cosines]
    return {
        "age_updates": place,
        "age": age,
        "query_cosine": sum(queries) / len(queries) if queries else None,
        "passage_cosine": sum(passages) / len(passages),
        "samples": len(passages),
    }
