"""`train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.cli.base import app, options_of
from contaccum.methods.config import TrainConfig, load_config


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
    from contaccum.training.run import train as run_training

    overrides = {name: value for name, value in options.items() if value is not None}
    if resume and config is None and "output" in overrides and (stored := Path(overrides["output"]) / "config.yaml").exists():
        config = stored
    summary = run_training(load_config(config, overrides), resume=resume)
    if os.environ.get("RANK", "0") != "0":
        return  # one process speaks for all
    if json_:
        print(json.dumps(summary))
    else:
        print(f"{summary['updates']:,} updates, {summary['samples_per_second']:.0f} samples/s, loss {summary['final_loss']:.4f}")
