"""The command line: parse, build, call one function. Bad input gives one line and exit code 2."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.config import TrainConfig, load_config
from contaccum.errors import CheckpointError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def root() -> None:
    """Train dense retrievers under a memory budget."""


def main() -> None:
    """Entry point of the `contaccum` command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one bar at a time: ours
    try:
        app()
    except (ValueError, CheckpointError) as error:
        fail(str(error), 2)
    except Exception as error:
        message = " ".join(str(error).split())
        if "out of memory" in message.lower():
            fail(f"{message}; use a smaller --n-local, a smaller --max-seq-length or --gradient-checkpointing", 1)
        if any(word in message for word in ("Connection closed by peer", "Connection reset by peer", "NCCL", "gloo")):
            fail(f"another process of this run is gone ({message}); the run can go on with --resume", 1)
        raise


def fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


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
                    Optional[kinds[str(field.type).replace(" | None", "")]],  # noqa: UP045  (typer reads Optional)
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


@app.command("train")
@options_of(TrainConfig)
def train(
    config: Annotated[Optional[Path], typer.Argument(help="YAML of fields; options override it")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --output")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
    **options: Any,
) -> None:
    """Train a retriever. Several processes: torchrun --nproc-per-node 2 -m contaccum train ...

    Example: contaccum train --data acl --model bert-base-uncased --n-total 128 --n-local 8 --bank 1024 --memory 11GB --output runs/first
    """
    from contaccum.train import train as run_training

    overrides = {name: value for name, value in options.items() if value is not None}
    if resume and config is None and "output" in overrides and (stored := Path(overrides["output"]) / "config.yaml").exists():
        config = stored
    summary = run_training(load_config(config, overrides), resume=resume)
    if json_:
        print(json.dumps(summary))
    else:
        print(f"{summary['updates']:,} updates, {summary['samples_per_second']:.0f} samples/s, loss {summary['final_loss']:.4f}")
