"""`quickstart` and `train`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.cli.base import app, options_of
from contaccum.methods.config import TrainConfig, load_config


@app.command("quickstart")
def quickstart(
    output: Annotated[Path, typer.Option(help="folder to write; a number is added where it exists")] = Path("runs/quickstart"),
    pairs: Annotated[int, typer.Option(help="docstring -> function pairs, half of them for the encoder to start from")] = 15_000,
    epochs: Annotated[float, typer.Option(help="passes of the fine-tuning")] = 2.0,
    seed: Annotated[int, typer.Option(help="seed of weights, order and dropout")] = 42,
    json_: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Fine-tune a small encoder by four methods and compare them, on docstrings of the installed packages: no network, no GPU.

    Example: contaccum quickstart
    """
    from contaccum.experiments.quickstart import Settings, free_folder
    from contaccum.experiments.quickstart import quickstart as run_quickstart
    from contaccum.report.terminal import show

    folder = free_folder(output)
    settings = Settings(pairs=pairs, test=min(1000, pairs // 4), epochs=epochs, seed=seed)
    results = run_quickstart(folder, settings, say=lambda line: print(line, file=sys.stderr, flush=True))
    if json_:
        print(json.dumps([result.as_json() for result in results]))
    else:
        show(results)
        print(f"Page: {folder / 'report.html'}   Models: {folder / 'runs'}/*/model")


@app.command("train")
@options_of(TrainConfig)
def train(
    config: Annotated[Optional[Path], typer.Argument(help="YAML file of these options; those on the command line override it")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --output")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
    **options: Any,
) -> None:
    """Train a pair of encoders, or one. Several processes: torchrun --nproc-per-node 2 -m contaccum train ...

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
