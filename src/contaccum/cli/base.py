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


class Command(typer.core.TyperCommand):
    """Shows what can be switched on and off as `--[no-]name`: a column for each of the two cuts names in a window of 80 columns."""

    def format_help(self, context: Any, formatter: Any) -> None:
        for option in self.params:
            if option.secondary_opts:
                option.opts, option.secondary_opts = [f"--[no-]{option.opts[0][2:]}"], []
        super().format_help(context, formatter)


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
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in [*own, *map(_option, chosen)]]
        parameters.sort(key=lambda p: ("", *GROUPS).index(_group(p)))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _group(parameter: inspect.Parameter) -> str:
    """Under which its help stands; "" for one that has none."""
    return getattr(parameter.annotation.__metadata__[0], "rich_help_panel", None) or ""


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
