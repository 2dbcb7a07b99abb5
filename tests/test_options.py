"""What is proposed as a command is that command."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer

from contaccum.cli import app
from contaccum.common.options import as_options


@pytest.mark.parametrize(
    ("values", "typed"),
    [
        ({"n_local": 8, "lr": 2e-5}, "--n-local 8 --lr 2e-05"),
        ({"tied": True, "include_prompt": False}, "--tied --no-include-prompt"),
        ({"drift_correction": None}, "--drift-correction none"),
        ({"query_prompt": "a query: "}, "--query-prompt 'a query: '"),
        ({"cutoffs": (1, 20)}, "--cutoffs 1,20"),
    ],
)
def test_values_as_options(values: dict[str, Any], typed: str) -> None:
    assert as_options(values) == typed


def test_what_is_off_can_be_typed() -> None:
    """A plan without padding's removal was proposed as `--unpad False`."""
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    words = shlex.split(as_options({"unpad": False, "include_prompt": False, "mask_duplicates": False, "n_local": 4}))
    parsed = train.make_context("train", words).params
    assert [parsed[name] for name in ("unpad", "include_prompt", "mask_duplicates", "n_local")] == [False, False, False, "4"]
