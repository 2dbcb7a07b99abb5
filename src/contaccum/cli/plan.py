"""`plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from contaccum.cli.base import Command, app, options_of
from contaccum.common.options import as_options
from contaccum.methods.config import TrainConfig, load_config, with_bank

if TYPE_CHECKING:
    from contaccum.memory.planner import Plan


PLANNED = (  # what bears on memory
    *("model", "passage_model", "tied", "pooling", "similarity", "max_seq_length", "method", "n_total", "n_local", "bank", "query_bank"),
    *("bank_dtype", "drift_correction", "hard_negatives", "precision", "gradient_checkpointing", "torch_compile", "memory"),
    *("weights_dtype", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "quantize"),
)


@app.command("plan", cls=Command)
@options_of(TrainConfig, PLANNED)
def plan(
    max_query_length: Annotated[Optional[int], typer.Option(help="tokens of the longest query (default: --max-seq-length)")] = None,  # noqa: UP045
    verify: Annotated[bool, typer.Option(help="on a GPU: check the plan by real updates in that memory")] = True,
    json_: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
    **options: Any,
) -> None:
    """Find the largest micro-batch that fits in a memory. The peak is predicted, so no GPU is needed.

    --n-local asks about that size alone. Without --hard-negatives, one is counted for each query.

    Example: contaccum plan --model bert-base-uncased --memory 11GB --n-total 128

    Example: contaccum plan --model runs/first/model --memory 24GB --n-total 512 --max-seq-length 512 --precision bf16
    """
    import torch

    from contaccum.memory.plan import plan as run_plan
    from contaccum.memory.prediction.towers import longest
    from contaccum.training.trial import try_in_process

    chosen = {"hard_negatives": 1, **{name: value for name, value in options.items() if value is not None}}
    config = load_config(None, chosen)
    config.check_values()
    if "max_seq_length" not in chosen:
        config = replace(config, max_seq_length=longest(config.model, config.passage_model, config.max_seq_length))
    try_out = try_in_process if verify and torch.cuda.is_available() else None
    n_local = config.n_local if "n_local" in chosen else None
    say = partial(print, file=sys.stderr, flush=True)
    found = run_plan(config, max_query_length, n_local=n_local, try_out=try_out, say=say)
    print(json.dumps(found.as_dict()) if json_ else text(found))


def text(plan: Plan) -> str:
    """The plan as text."""
    from contaccum.memory.planner import MARGIN, gigabytes

    config, prediction = plan.config, plan.prediction
    checkpointing = "gradient checkpointing" if config.gradient_checkpointing else "no gradient checkpointing"
    graphs = ", CUDA graphs" if config.cuda_graphs else ""
    bank = f"bank = {plan.bank:,} ({prediction.bank_bytes / 1e6:.0f} MB)" if plan.bank else "no bank"
    lines = [
        f"{config.method}: n = {config.n_local}, K = {plan.micro_batches}, {bank}, {config.precision}, {checkpointing}{graphs}",
        f"expected peak {gigabytes(prediction.peak_bytes)} of {gigabytes(plan.memory_bytes)}, {MARGIN:.0%} of which are kept free:",
    ]
    parts = sorted(prediction.parts.items(), key=lambda part: -part[1])
    lines += [f"  {kind:<12} {gigabytes(size):>10}" for kind, size in parts if size >= 5e6]
    unused = gigabytes(prediction.peak_bytes - prediction.allocated_bytes)
    lines += [f"  {'unused':<12} {unused:>10}   held by the allocator in larger pieces, and 1 % for the unforeseen"]
    if plan.more:
        lines += ["what would allow a larger n:"]
        lines += [f"  {a.options:<42} n = {a.n_local:<5} {gigabytes(a.peak_bytes):>9}   {a.price}" for a in plan.more]
    lines += [_speed(plan), f"to train so: {_command(plan.config)}"]
    return "\n".join(lines)


def _command(config: TrainConfig) -> str:
    """Without what does not bear on memory (data, output, learning rate), and without what is so by default."""
    bank = "auto" if with_bank(replace(config, bank="auto")).bank == config.bank else config.bank
    values = {name: getattr(replace(config, bank=bank), name) for name in (*PLANNED, "cuda_graphs") if name != "memory"}
    chosen = {name: value for name, value in values.items() if name == "n_local" or value != getattr(TrainConfig, name)}
    return f"contaccum train {as_options(chosen | {'memory': config.memory})} ..."


def _speed(plan: Plan) -> str:
    from contaccum.memory.planner import describe, gigabytes

    if plan.measured is None:
        return "speed is not predicted; the peak has not been measured here"
    return "\n".join(
        f"{verb} with {describe(found)}: peak {gigabytes(found.peak_bytes)}, {found.samples_per_second:.0f} samples/s over a few updates"
        for verb, found in [("measured", plan.measured), *(("slower", found) for found in plan.slower)]
    )
