"""`train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.cli.base import Command, app, options_of
from contaccum.methods.config import EVALUATION, MEMORY, MODEL, SAVING, TrainConfig, given_in, load_config
from contaccum.methods.recipes import recipe as named_recipe

LARGE = 500_000  # passages


@app.command("train", cls=Command)
@options_of(TrainConfig)
def train(
    config: Annotated[Optional[Path], typer.Argument(help="YAML file of these options; those on the command line override it")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --output", rich_help_panel=SAVING)] = False,
    evaluated: Annotated[
        bool,
        typer.Option(
            "--evaluate/--no-evaluate", help="in the end, if --data has a test split", show_default=False, rich_help_panel=EVALUATION
        ),
    ] = True,
    recipe: Annotated[
        str,
        typer.Option(
            help="to start from: paper, or st: one tower, mean pooling, cosine, one epoch, as sentence-transformers' users",
            rich_help_panel=MODEL,
        ),
    ] = "paper",
    speed: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="auto: choose precision, n_local and the options that make towers faster, by trials of two minutes at most; off. Left "
            "out: auto on a GPU with --memory, where none of these options is given",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
    **options: Any,
) -> None:
    """Train a pair of encoders, or one. Several processes: torchrun --nproc-per-node 2 -m contaccum train ...

    Example: contaccum train --data acl --model bert-base-uncased --n-total 128 --n-local 8 --bank 1024 --memory 11GB --output runs/first
    """
    from contaccum.training.processes import leave_processes
    from contaccum.training.run import train as run_training

    overrides = {**named_recipe(recipe), **{name: value for name, value in options.items() if value is not None}}
    if resume and config is None and "output" in overrides and (stored := Path(overrides["output"]) / "config.yaml").exists():
        config = stored
    chosen = load_config(config, overrides)
    test_set = _test_set(chosen) if evaluated else None
    chosen = _fastest(chosen, speed, resume, given={*overrides, *given_in(config)})
    summary = run_training(chosen, resume=resume)
    leave_processes()
    if os.environ.get("RANK", "0") != "0":
        return  # one process speaks for all
    metrics = {} if test_set is None else _test_metrics(chosen, test_set)
    if json_:
        print(json.dumps({**summary, **({"metrics": metrics} if metrics else {})}))
    else:
        loss = "" if summary["final_loss"] is None else f", loss {summary['final_loss']:.4f}"  # of a run whose log was lost
        print(f"{summary['updates']:,} updates, {summary['samples_per_second']:.0f} samples/s{loss}")
        print("".join(f"{name:<12}{100 * value:8.1f}\n" for name, value in metrics.items()), end="")


def _fastest(config: TrainConfig, speed: str | None, resume: bool, given: set[str]) -> TrainConfig:
    """A resumed run has its options in its folder."""
    if speed not in ("auto", "off", None):
        raise ValueError(f"speed={speed!r} is unknown; use auto or off, or leave it out")
    if speed == "off" or (speed is None and (config.memory is None or resume)):
        return config
    from contaccum.training.fastest import allocate_in_growing_segments, fastest, worth_trials

    if speed is None and not worth_trials(config, given):
        return config
    allocate_in_growing_segments()
    return config if resume else fastest(config)


def _test_set(config: TrainConfig) -> Path | None:
    """The BEIR folder with test queries, where the data has such. What is wrong with them is reported before the training."""
    from contaccum.data.readers.beir import find_qrels, is_beir, read_qrels
    from contaccum.data.readers.queries import read_queries

    data = Path(config.data)
    beir = data / "beir" if is_beir(data / "beir") else data
    if not is_beir(beir) or "test" in config.split.split("+") or (file := find_qrels(beir).get("test")) is None:
        return None
    if _is_large(beir):
        read_qrels(file)  # no more is needed: it is not searched
    else:
        from contaccum.retrieval.evaluate import check_judgements

        check_judgements(file, beir)
        read_queries(beir, "test")
    return beir


def _is_large(beir: Path) -> bool:
    """More than is searched within minutes."""
    import torch

    from contaccum.data.readers.collections import count_lines

    return count_lines(beir) > (LARGE if torch.cuda.is_available() else LARGE // 10)


def _test_metrics(config: TrainConfig, beir: Path) -> dict[str, float]:
    """Of the finished model, where the collection is searched within minutes."""
    from contaccum.common.console import note
    from contaccum.retrieval import evaluate

    if _is_large(beir):
        note(f"the collection is large; to evaluate: contaccum evaluate {config.output}/model {config.data} --output {config.output}")
        return {}
    found: dict[str, float] = evaluate(Path(config.output) / "model", beir, output=config.output)["metrics"]
    return found
