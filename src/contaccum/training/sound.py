"""Whether training can come to anything: losses and weights that are numbers, and losses that are not all 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from contaccum.common.console import note
from contaccum.common.errors import DivergedError
from contaccum.towers.loading import odd_weight

UPDATES = 10  # in a row without a finite loss end a run
NOTHING = 1e-6  # a loss within rounding of 0
COLLAPSED = 1e-3  # of a loss: how near it stands to the one of vectors that are all the same
REMEDY = "use a lower --lr, a longer --warmup-updates or --precision fp32"


def check_losses(lines: Sequence[Mapping[str, Any]], ended: bool = False) -> None:
    """DivergedError where the last updates, or all of a shorter run that has `ended`, have no finite loss."""
    last = lines[-UPDATES:]
    if last and (ended or len(last) == UPDATES) and not any(math.isfinite(line["loss"]) for line in last):
        raise DivergedError(f"no loss of the last {len(last)} updates (up to {last[-1]['update']}) is finite; {REMEDY}")


def check_learns(lines: Sequence[Mapping[str, Any]], ended: bool = False) -> None:
    """DivergedError where no update until now, of at least `UPDATES` or of a run that has `ended`, had anything to learn."""
    if lines and (ended or len(lines) >= UPDATES) and all(abs(line["loss"]) < NOTHING for line in lines):
        raise DivergedError(
            f"the loss of all {len(lines)} updates is 0: no query has a negative that is another text than its positive; "
            "use a larger --n-local, a bank, --hard-negatives, or rows that differ"
        )


def note_collapse(lines: Sequence[Mapping[str, Any]]) -> None:
    """A note where the last losses are those of vectors that are all the same, log(1 + negatives)."""
    last = lines[-UPDATES:]
    if len(last) == UPDATES and all(abs(line["loss"] - math.log1p(line["negatives_per_query"])) < COLLAPSED for line in last):
        note(
            f"the model collapsed in training: the loss of the last {UPDATES} updates is log(1 + negatives) = {last[-1]['loss']:.3f}, as "
            "where all texts have the same vector; it finds next to nothing; try a lower --lr or a longer --warmup-updates"
        )


def check_weights(model: nn.Module) -> None:
    """DivergedError where training has left a weight that is no number."""
    if name := odd_weight(model):
        raise DivergedError(f"training has left weights that are not finite, as {name}; no model is saved; {REMEDY}")
