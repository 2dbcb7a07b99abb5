"""What every reader yields: rows of a training set, and a tally of what it left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypedDict


class TrainingRow(TypedDict):
    """One row of `contaccum.data.training_set.FEATURES`."""

    query: str
    positive: str
    negatives: list[str]
    answers: list[str]


@dataclass
class Tally:
    """Records that became no row, by reason, and what else the user should know."""

    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
