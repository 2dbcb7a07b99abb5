"""Options as they may be typed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def as_options(values: Mapping[str, Any]) -> str:
    """`--name value` for each field: a flag alone where it is True, `--no-name` where it is False, `none` where there is none."""
    return " ".join(_option(name.replace("_", "-"), value) for name, value in values.items())


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return f"--{name} {shlex.quote('none' if value is None else f'{value:g}' if isinstance(value, float) else str(value))}"
