"""`compare` and `quickstart`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contaccum.cli.base import Command, app
from contaccum.cli.functions import command

if TYPE_CHECKING:
    from contaccum.comparison.compare import Comparison


@command("contaccum.comparison.compare", "compare")
def show_comparison(found: Comparison, **_: Any) -> None:
    """Example: contaccum compare faq.csv --model sentence-transformers/all-MiniLM-L6-v2 --output runs/faq

    Example: contaccum compare pairs.parquet --model bert-base-uncased --memory 11GB --seeds 1,2,3 --output runs/pairs
    """
    from contaccum.report.terminal import show

    show(found.summary.rows)
    print(found.headline)
    for detail in found.details:
        print(f"- {detail}")
    if found.command:
        print(f"\n{found.command_for}\n{found.command}")
    print(f"\nPage: {found.page}")


@app.command("quickstart", cls=Command)
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
    from contaccum.comparison.quickstart import Settings, free_folder
    from contaccum.comparison.quickstart import quickstart as run_quickstart

    settings = Settings(pairs=pairs, test=min(1000, pairs // 4), dev=min(200, pairs // 8), epochs=epochs, seed=seed)
    found = run_quickstart(free_folder(output), settings)
    if json_:
        print(json.dumps(found.as_json()))
    else:
        show_comparison(found)
    found.raise_failed()
