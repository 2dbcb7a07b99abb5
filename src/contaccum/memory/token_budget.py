"""Micro-batches by tokens: `TokenBudgetTrainer` cuts an update's samples into as many as a budget of tokens asks for.

1. A batch holds the update's samples. In their order, each micro-batch takes as many as the budget allows. A sample beyond it stands alone.
2. Tokens are those that the towers compute: padding counts, up to the longest query and the longest passage of the micro-batch, unless the
   towers leave it out.
3. A micro-batch is what it would be if it had been tokenised by itself: padded to its own longest texts.
4. Its loss, a mean over its samples, weighs by its share of them, as a half does in `contaccum.memory.halving`. So the update's gradient is
   that of the mean over its samples, each with the negatives of its micro-batch and the bank; and each micro-batch enters the bank in turn.

For one process: several would have to cut alike, as each sees the vectors of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contaccum.adapters.trainer import ContAccumTrainer
from contaccum.memory.halving import Inputs, part_of, rows_of

MASK = "attention_mask"


class TokenBudgetTrainer(ContAccumTrainer):
    """`ContAccumTrainer` whose batches are whole updates, computed in micro-batches of at most `tokens` tokens."""

    def __init__(self, *args: Any, tokens: int, padded: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokens, self.padded = tokens, padded

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """The update's loss, from micro-batch to micro-batch."""
        losses: list[Tensor] = []
        rows = rows_of(inputs)
        for part in micro_batches(inputs, self.tokens, self.padded):
            with self.weighing((rows_of(part) or 1) / (rows or 1)):
                losses.append(super().training_step(model, part, num_items_in_batch))
        return torch.stack(losses).sum()


def micro_batches(inputs: Inputs, tokens: int, padded: bool) -> list[Inputs]:
    """A batch as the trainer gets it, cut by its masks: queries first, then columns of passages, which are padded together."""
    rows, masks = rows_of(inputs), {name[: -len(MASK)]: value.cpu() for name, value in inputs.items() if name.endswith(MASK)}
    if rows is None or not masks:
        raise ValueError("local_tokens counts the tokens of padded texts, and these inputs are not such; use n_local")
    lengths = torch.stack([mask.sum(1) for mask in masks.values()], 1)  # (rows, columns)
    cuts = budgeted(lengths.tolist(), tokens, padded)
    return [_tokenised_alone(part_of(inputs, rows, *cut), {name: mask[slice(*cut)] for name, mask in masks.items()}) for cut in cuts]


def budgeted(lengths: list[list[int]], tokens: int, padded: bool) -> list[tuple[int, int]]:
    """Where to cut samples, each given by the tokens of its query and its passages: (start, stop) of each micro-batch."""
    cuts, start = [], 0
    query = passage = texts = 0  # longest of each in the micro-batch, and the tokens in it
    for stop, (of_query, *of_passages) in enumerate(lengths):
        query, passage, texts = max(query, of_query), max(passage, *of_passages), texts + of_query + sum(of_passages)
        needed = (stop + 1 - start) * (query + len(of_passages) * passage) if padded else texts
        if needed > tokens and stop > start:
            cuts.append((start, stop))
            start, query, passage, texts = stop, of_query, max(of_passages), of_query + sum(of_passages)
    return [*cuts, (start, len(lengths))]


def _tokenised_alone(part: Inputs, masks: dict[str, Tensor]) -> Inputs:
    """Without the padding that all of its texts share, on whichever side."""
    cut = dict(part)
    for column, mask in masks.items():
        used = mask.any(0).nonzero().flatten()
        for name, value in part.items():
            if name.startswith(column) and isinstance(value, Tensor) and value.shape[:2] == mask.shape:
                cut[name] = value[:, int(used[0]) : int(used[-1]) + 1]
    return cut
