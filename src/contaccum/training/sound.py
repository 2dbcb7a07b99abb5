"""Whether training can come to anything: texts that the model can tell apart, losses and weights that are numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from datasets import Dataset
from sentence_transformers.base.modules import Transformer
from torch import nn

from contaccum.common.errors import DataError, DivergedError
from contaccum.common.inputs import readable
from contaccum.towers.loading import WHOLE, odd_weight

SAMPLE = 64  # rows
WORDS = 64  # tokens of each
UPDATES = 10  # in a row without a finite loss end a run
REMEDY = "use a lower --lr, a longer --warmup-updates or --precision fp32"


def check_words(model: nn.Module, dataset: Dataset) -> None:
    """DataError where a tower's tokenizer finds no word that it knows in the first rows: all texts would be the same."""
    first = dataset[:SAMPLE]
    texts = [*first["query"], *first["positive"]]
    for module in model.modules():
        if isinstance(module, Transformer) and hasattr(module.tokenizer, "unk_token_id"):
            with readable("the model's tokenizer cannot read the first rows", WHOLE):
                found: list[list[int]] = module.tokenizer(texts, add_special_tokens=False, truncation=True, max_length=WORDS)["input_ids"]
            if not set(chain.from_iterable(found)) - {module.tokenizer.unk_token_id}:
                raise DataError(f"the tokenizer knows no word of the first {len(first['query'])} rows; is it, or the data, the right one?")


def check_losses(lines: Sequence[Mapping[str, Any]], ended: bool = False) -> None:
    """DivergedError where the last updates, or all of a shorter run that has `ended`, have no finite loss."""
    last = lines[-UPDATES:]
    if last and (ended or len(last) == UPDATES) and not any(math.isfinite(line["loss"]) for line in last):
        raise DivergedError(f"no loss of the last {len(last)} updates (up to {last[-1]['update']}) is finite; {REMEDY}")


def check_weights(model: nn.Module) -> None:
    """DivergedError where training has left a weight that is no number."""
    if name := odd_weight(model):
        raise DivergedError(f"training has left weights that are not finite, as {name}; no model is saved; {REMEDY}")
