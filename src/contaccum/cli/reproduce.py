"""`reproduce`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.cli.base import Command, app, whole_numbers


@app.command("reproduce", cls=Command)
def reproduce(
    experiment: Annotated[str, typer.Argument(help="main, ablation, bank-size, speed, gradnorm, simmass, memory or pretrain")],
    dataset: Annotated[str, typer.Option(help="acl, squad-wiki, nq, trivia, webq, trec, msmarco or harvest (embedded)")] = "harvest",
    data: Annotated[Optional[Path], typer.Option(help="folder with the data set's files (not for harvest)")] = None,  # noqa: UP045
    scale: Annotated[str, typer.Option(help="tiny (minutes on a CPU), cpu, small (one GPU, hours or less) or paper")] = "small",
    model: Annotated[Optional[str], typer.Option(help="encoder, or random (default: bert-base-uncased; tiny: random)")] = None,  # noqa: UP045
    output: Annotated[Optional[Path], typer.Option(help="folder to write or continue (default: runs/EXPERIMENT-DATASET)")] = None,  # noqa: UP045
    seeds: Annotated[str, typer.Option(help="seeds with commas between")] = "0",
    pretraining_samples: Annotated[Optional[int], typer.Option(help="samples of each cell of pretrain (default: the scale's)")] = None,  # noqa: UP045
    jobs: Annotated[int, typer.Option(help="cells that run at once, each in its own process; 0: one after another in this process")] = 1,
    set_: Annotated[Optional[list[str]], typer.Option("--set", help="training option for every cell, as lr=1e-4, repeatable")] = None,  # noqa: UP045
    only: Annotated[Optional[list[str]], typer.Option(help="run only the cells with this text in their name, repeatable")] = None,  # noqa: UP045
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the cells and run nothing")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Run one of the paper's experiments: result file, table and figure. Run it again after an interruption.

    Example: contaccum reproduce main --scale tiny

    Example: contaccum reproduce main --dataset nq --data downloads/nq --scale paper --seeds 0,1,2
    """
    from contaccum.experiments.request import Request, planned
    from contaccum.report.terminal import show_lines

    folder = output or Path("runs") / f"{experiment}-{dataset}"
    settings = tuple(_settings(set_ or []).items())
    chosen = tuple(dict.fromkeys(whole_numbers("--seeds", seeds, "0,1,2")))
    request = Request(experiment, folder, dataset, data, scale, model, chosen, jobs, settings, tuple(only or ()), pretraining_samples)
    request.check()
    if dry_run:
        for cell in planned(request):
            print(cell.name)
        return
    from contaccum.experiments.runner import reproduce as run_reproduce

    found = run_reproduce(request, say=lambda line: print(line, file=sys.stderr, flush=True))
    if json_:
        print(json.dumps(found["rows"]))
    elif found["rows"]:
        show_lines(found["table"])
        print("  ".join(str(file) for file in found["files"]))
    if found["failed"]:
        raise SystemExit(1)


def _settings(words: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs, checked and typed as fields of a training configuration."""
    import yaml

    from contaccum.methods.config import load_config

    pairs = [word.partition("=") for word in words]
    if wrong := [word for word, (_, equals, _) in zip(words, pairs, strict=True) if not equals]:
        raise ValueError(f"--set {wrong[0]!r} must be NAME=VALUE, as lr=1e-4")
    try:
        values = {name.replace("-", "_"): yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as error:
        raise ValueError(f"--set {words} holds a value that cannot be read: {' '.join(str(error).split())}") from error
    if own := set(values) & {"data", "output", "model", "seed", "method"}:
        raise ValueError(f"--set {own.pop()} is the experiment's own; use its option")
    if own := set(values) & {"n_local", "drift_correction"}:
        raise ValueError(f"--set {own.pop()} would change nothing: each cell has its own; choose cells with --only")
    config = load_config(None, values)
    return {name: getattr(config, name) for name in values}
