"""`plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from contaccum.cli.base import app
from contaccum.methods.config import TrainConfig, load_config, with_bank

if TYPE_CHECKING:
    from contaccum.memory.planner import Plan


@app.command("plan")
def plan(
    memory: Annotated[str, typer.Option(help="memory of the GPU that PyTorch may take, as 11GB or 10.5GiB")],
    model: Annotated[str, typer.Option(help="hub name or model folder; only its configuration is read")] = TrainConfig.model,
    passage_model: Annotated[Optional[str], typer.Option(help="the passage tower's, where it is another")] = None,  # noqa: UP045
    n_total: Annotated[int, typer.Option(help="samples per update")] = TrainConfig.n_total,
    n_local: Annotated[Optional[int], typer.Option(help="judge this micro-batch instead of looking for the largest")] = None,  # noqa: UP045
    seq: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="tokens of the longest passage (default: 256, or as many as the model has positions)"),
    ] = None,
    query_seq: Annotated[Optional[int], typer.Option(help="tokens of the longest query (default: as --seq)")] = None,  # noqa: UP045
    method: Annotated[str, typer.Option(help="as in train")] = TrainConfig.method,
    hard_negatives: Annotated[int, typer.Option(help="hard negatives per query")] = 1,
    bank: Annotated[str, typer.Option(help="tuples in the bank; auto: 8 updates' worth")] = str(TrainConfig.bank),
    query_bank: Annotated[Optional[int], typer.Option(help="queries in the bank, where fewer")] = None,  # noqa: UP045
    bank_dtype: Annotated[Optional[str], typer.Option(help="precision of the bank: float32 or bfloat16")] = None,  # noqa: UP045
    drift_correction: Annotated[str, typer.Option(help="auto, mean+zero-sum, mean or none")] = str(TrainConfig.drift_correction),
    similarity: Annotated[str, typer.Option(help="dot or cosine")] = TrainConfig.similarity,
    pooling: Annotated[str, typer.Option(help="cls, mean or lasttoken")] = TrainConfig.pooling,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16 (autocast)")] = TrainConfig.precision,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="recompute activations in the backward pass")
    ] = False,
    torch_compile: Annotated[bool, typer.Option("--torch-compile", help="try it out with compiled layers; predicted without")] = False,
    tied: Annotated[bool, typer.Option("--tied", help="one tower for queries and passages")] = False,
    verify: Annotated[bool, typer.Option(help="where there is a GPU: run real updates in that memory")] = True,
    json_: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Find the largest micro-batch that fits in a memory, without a GPU: parameters, optimizer, activations, bank and allocator predicted.

    Example: contaccum plan --model bert-base-uncased --memory 11GB --n-total 128

    Example: contaccum plan --model runs/first/model --memory 24GB --n-total 512 --seq 512 --precision bf16
    """
    import torch

    from contaccum.memory.plan import plan as run_plan
    from contaccum.memory.prediction.towers import longest
    from contaccum.training.trial import try_in_process

    asked = {
        "model": model,
        "passage_model": passage_model,
        "memory": memory,
        "n_total": n_total,
        "max_seq_length": longest(model, passage_model, TrainConfig.max_seq_length) if seq is None else seq,
        "method": method,
        "hard_negatives": hard_negatives,
        "bank": bank,
        "query_bank": query_bank,
        "bank_dtype": bank_dtype,
        "drift_correction": drift_correction,
        "similarity": similarity,
        "pooling": pooling,
        "precision": precision,
        "gradient_checkpointing": gradient_checkpointing,
        "torch_compile": torch_compile,
        "tied": tied,
    }
    say = partial(print, file=sys.stderr, flush=True)
    try_out = try_in_process if verify and torch.cuda.is_available() else None
    found = run_plan(load_config(None, asked), query_seq, n_local=n_local, try_out=try_out, say=say)
    print(json.dumps(found.as_dict()) if json_ else text(found))


def text(plan: Plan) -> str:
    """For people."""
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
    told = ["contaccum train"]
    for name in (
        *(
            "model",
            "passage_model",
            "tied",
            "pooling",
            "similarity",
            "max_seq_length",
            "method",
            "n_total",
            "n_local",
            "bank",
            "query_bank",
        ),
        *("bank_dtype", "drift_correction", "hard_negatives", "precision", "gradient_checkpointing", "torch_compile", "cuda_graphs"),
    ):
        value, flag = getattr(replace(config, bank=bank), name), f"--{name.replace('_', '-')}"
        if name == "n_local" or value != getattr(TrainConfig, name):
            told.append(flag if value is True else f"{flag} {'none' if value is None else value}")
    return " ".join([*told, f"--memory {config.memory}", "..."])


def _speed(plan: Plan) -> str:
    from contaccum.memory.planner import gigabytes, way

    if plan.measured is None:
        return "speed is not predicted; the peak has not been measured here"
    return "\n".join(
        f"{verb} with {way(found)}: peak {gigabytes(found.peak_bytes)}, {found.samples_per_second:.0f} samples/s over a few updates"
        for verb, found in [("measured", plan.measured), *(("slower", found) for found in plan.slower)]
    )
