"""Starting points: settings under one name, each of which can be overridden."""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},  # the defaults of `TrainConfig`
    "st": {"tied": True, "pooling": "mean", "similarity": "cosine", "epochs": 1.0, "lr": 2e-5},  # as sentence-transformers' users begin
}


def recipe(name: str) -> dict[str, Any]:
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
