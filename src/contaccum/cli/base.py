"""The application that the command modules register with, and options made from dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Annotated, Any, Optional

import typer
import typer.core

import contaccum
from contaccum.methods.config import GROUPS

# In the order of use.
ORDER = (
    "quickstart",
    "compare",
    "prepare",
    "mine",
    "plan",
    "train",
    "encode",
    "search",
    "evaluate",
    "report",
    "push",
    "reproduce",
    "bench",
)


class InOrder(typer.core.TyperGroup):
    def list_commands(self, context: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)


app = typer.Typer(cls=InOrder, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="show the version")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print the result and errors alone; anywhere in the line")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="show what the libraries say too; anywhere in the line")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an unexpected error; anywhere in the line")] = False,
) -> None:
    """Train dense retrievers under a memory budget."""
    if version:
        print(f"contaccum {contaccum.__version__}")
        raise typer.Exit


def options_of(config: Any, only: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of a dataclass (`only`: of these), grouped in its help; those not used arrive as None."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        chosen = [field for field in fields(config) if not only or field.name in only]
        generated = [_option(field) for field in sorted(chosen, key=lambda field: GROUPS.index(field.metadata["group"]))]
        command.__signature__ = inspect.Signature([*own, *generated])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *generated]}
        return command

    return decorate


def _option(field: Field[Any]) -> inspect.Parameter:
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool}
    kind: Any = str if field.metadata.get("accepts") else kinds[str(field.type).replace(" | None", "")]
    text = field.metadata["help"] + default_text(field.default)
    option = typer.Option(help=text, show_default=False, rich_help_panel=field.metadata["group"])
    annotation: Any = Annotated[Optional[kind], option]  # noqa: UP045  (typer reads Optional)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def default_text(value: Any) -> str:
    return "" if value in (None, "") or isinstance(value, bool) else f" (default {value})"


def whole_numbers(option: str, text: str, example: str) -> list[int]:
    """Of "1, 20": [1, 20]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{option} {text!r} must be whole numbers with commas between, as {example}")
    return [int(part) for part in parts]
