"""Commands made from functions: a function's signature and docstring are its command's options and help.

They are read from the source, so that `--help` need not import what the function needs.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import typer

import contaccum
from contaccum.cli.base import Command, app, default_text, whole_numbers

ROOT = Path(contaccum.__file__).parent
# For callers in Python.
NO_OPTIONS = ("progress", "names", "title", "introduction", "provenance", "answer", "settings", "configurations", "say")
PAIRS = "Sequence[tuple[str, str]]"
KINDS: dict[str, Any] = {"bool": bool, "int": int, "float": float, "tuple[str, ...]": list[str], PAIRS: list[str]}  # lists: repeatable


class Parameter(NamedTuple):
    name: str
    kind: str  # as annotated, without None
    default: Any  # inspect.Parameter.empty: none; ...: not a literal
    help: str
    needed: bool = False  # by the function, though the command may leave it out: None
    optional_argument: bool = False  # stands by its place, where it is given


class Described(NamedTuple):
    summary: str
    parameters: list[Parameter]


def command(module: str, name: str, cls: type[Command] = Command) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the function `name` of `module` as a command. What is decorated shows its result, and has the examples in its docstring.

    With --json the result is printed as JSON, unless the function has a parameter `json` of its own.
    """

    def decorate(show: Callable[..., None]) -> Callable[..., None]:
        described = describe(module, name)
        kinds = {parameter.name: parameter.kind for parameter in described.parameters}
        nullable = {parameter.name for parameter in described.parameters if parameter.default is None and parameter.needed}

        def run(json_: bool = False, **values: Any) -> None:
            options = {key: _parsed(key, value, kinds[key]) for key, value in values.items() if value not in (None, []) or key in nullable}
            result = getattr(importlib.import_module(module), name)(**options)
            print(json.dumps(result, default=_as_json)) if json_ else show(result, **options)
            if hasattr(result, "raise_failed"):
                result.raise_failed()

        parameters = [_option(parameter, first=not place) for place, parameter in enumerate(described.parameters)]
        if "json" not in kinds:
            as_json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
            parameters.append(inspect.Parameter("json_", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=as_json))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = f"{described.summary}\n\n{inspect.getdoc(show)}"
        app.command(name, cls=cls)(run)
        return show

    return decorate


def _as_json(value: Any) -> Any:
    return value.as_json() if hasattr(value, "as_json") else asdict(value)


@cache
def describe(module: str, name: str) -> Described:
    file = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    function = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
    docstring = ast.get_docstring(function) or ""
    helps = _arguments_of(docstring)
    arguments = function.args
    required = len(arguments.args) - len(arguments.defaults)
    defaults = [*[inspect.Parameter.empty] * required, *map(_literal, arguments.defaults), *map(_literal, arguments.kw_defaults)]
    parameters = []
    for argument, default in zip([*arguments.args, *arguments.kwonlyargs], defaults, strict=True):
        kind, _, none = ast.unparse(argument.annotation or ast.Name("str")).rpartition(" | None")
        needed = default is inspect.Parameter.empty and bool(kind)
        if argument.arg not in NO_OPTIONS:
            by_place = default is None and argument in arguments.args
            parameters.append(Parameter(argument.arg, kind or none, None if needed else default, helps[argument.arg], needed, by_place))
    return Described(docstring.partition("\n\n")[0], parameters)


def _arguments_of(docstring: str) -> dict[str, str]:
    """name -> text of the section "Args:"."""
    found: dict[str, str] = {}
    section = docstring.partition("Args:\n")[2]
    for entry in re.split(r"\n {4}(?=\S)", "\n" + section.partition("\n\n")[0])[1:]:
        names, _, text = entry.partition(": ")
        for one in names.split(", "):
            found[one] = " ".join(text.split())
    return found


def _literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


def _option(parameter: Parameter, first: bool) -> inspect.Parameter:
    """An argument for what the function cannot do without, but for the output; options for the rest."""
    required = parameter.default is inspect.Parameter.empty
    kind, default = KINDS.get(parameter.kind, str), inspect.Parameter.empty if required else None
    if (required and parameter.name != "output") or (first and parameter.needed) or parameter.optional_argument:
        kind = list[str] if parameter.kind.startswith("Sequence") else str
        given: Any = typer.Argument(help=parameter.help)
    else:
        flag = f"--{parameter.name.replace('_', '-')}"
        names = [flag if kind is not bool or parameter.default is False else f"{flag}/--no-{flag[2:]}"]
        text = parameter.help + default_text(parameter.default if isinstance(parameter.default, (int, float, str)) else None)
        given = typer.Option(*names, help=text, show_default=False, metavar="A B" if parameter.kind == PAIRS else None)
    annotation: Any = Annotated[kind if required else Optional[kind], given]  # noqa: UP045
    return inspect.Parameter(parameter.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parsed(name: str, value: Any, kind: str) -> Any:
    """Several values stand with commas between; what is repeatable arrives as a list."""
    if kind == PAIRS:
        return list(zip(value[::2], value[1::2], strict=True))
    if kind == "Sequence[int]":
        return whole_numbers(f"--{name.replace('_', '-')}", value, "42,43" if name == "seeds" else "20,100")
    return [part.strip() for part in value.split(",")] if kind == "Sequence[str]" else value
