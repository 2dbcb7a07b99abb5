"""The application that the command modules register with, and options made from dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, Optional

import typer
import typer.core

# As one uses them.
ORDER = ("quickstart", "prepare", "mine", "plan", "train", "encode", "search", "evaluate", "report", "reproduce", "bench")


class InOrder(typer.core.TyperGroup):
    def list_commands(self, context: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)


app = typer.Typer(cls=InOrder, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Train dense retrievers under a memory budget."""


def options_of(config: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of a dataclass; those not used arrive as None."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        kinds = {"str": str, "int": int, "float": float, "bool": bool}
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        generated = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    Optional[str if field.metadata.get("accepts") else kinds[str(field.type).replace(" | None", "")]],  # noqa: UP045  (typer reads Optional)
                    typer.Option(help=field.metadata["help"] + _default(field.default), show_default=False),
                ],
            )
            for field in fields(config)
        ]
        command.__signature__ = inspect.Signature([*own, *generated])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *generated]}
        return command

    return decorate


def _default(value: Any) -> str:
    return "" if value in (None, "") else f" (default {value})"


def whole_numbers(option: str, text: str, example: str) -> list[int]:
    """Of "1, 20": [1, 20]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{option} {text!r} must be whole numbers with commas between, as {example}")
    return [int(part) for part in parts]


def show_table(table: Sequence[Sequence[str]]) -> None:
    """Head and lines, the first column to the left."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    head, *lines = table
    drawn = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(head):
        drawn.add_column(name, justify="right" if place else "left")
    for line in lines:
        drawn.add_row(*line)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=140)).print(drawn)
