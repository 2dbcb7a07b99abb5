"""`bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.cli.base import app, show_table, whole_numbers


@app.command("bench")
def bench(
    model: Annotated[str, typer.Option(help="size of the towers: tiny, minilm-l3, minilm-l6, bert-base or bert-large")] = "bert-base",
    n_total: Annotated[str, typer.Option(help="samples per update, with commas between")] = "128",
    n_local: Annotated[str, typer.Option(help="samples per micro-batch, with commas between")] = "8",
    bank: Annotated[str, typer.Option(help="tuples in the bank, with commas between")] = "1024",
    query_tokens: Annotated[int, typer.Option(help="tokens per query")] = 32,
    passage_tokens: Annotated[int, typer.Option(help="tokens per passage")] = 256,
    hard_negatives: Annotated[int, typer.Option(help="per query")] = 1,
    precision: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    lengths: Annotated[str, typer.Option(help="of texts: fixed, or varied between a quarter of them and all")] = "fixed",
    compile_: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--compile", help="compile the towers: layers, or stacks (slower to compile)"),
    ] = None,
    unpad: Annotated[bool, typer.Option("--unpad", help="compute no padding")] = False,
    checkpointing: Annotated[bool, typer.Option("--gradient-checkpointing", help="recompute activations in the backward pass")] = False,
    graphs: Annotated[bool, typer.Option("--cuda-graphs", help="launch a tower's layers at once")] = False,
    memory: Annotated[Optional[str], typer.Option(help="hold the CUDA allocator to this, as 11GB")] = None,  # noqa: UP045
    variants: Annotated[Optional[str], typer.Option(help="some of them, with commas between (default: all)")] = None,  # noqa: UP045
    rounds: Annotated[int, typer.Option(help="turns of each variant")] = 3,
    updates: Annotated[int, typer.Option(help="updates timed per turn")] = 3,
    output: Annotated[Optional[Path], typer.Option(help="JSON file to write")] = None,  # noqa: UP045
    json_: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Time and (on a GPU) peak memory of one update by our methods, sentence-transformers' losses and the paper's own way, side by side.

    Example: contaccum bench --model minilm-l3 --n-total 64 --passage-tokens 64 --rounds 1
    """
    from contaccum.common.outputs import check_file, write_json
    from contaccum.common.provenance import provenance
    from contaccum.common.sizes import parse_bytes
    from contaccum.experiments.bench import measure
    from contaccum.experiments.workloads import VARIANTS, Workload
    from contaccum.memory.limit import limit_memory

    check_file(output)
    if memory is not None and (cannot := limit_memory(parse_bytes(memory))):
        print(f"note: {cannot}", file=sys.stderr)
    chosen = list(VARIANTS) if variants is None else [name.strip() for name in variants.split(",")]
    shape: dict[str, Any] = {
        "query_tokens": query_tokens,
        "passage_tokens": passage_tokens,
        "hard_negatives": hard_negatives,
        "precision": precision,
        "lengths": lengths,
        "compile": compile_,
        "unpad": unpad,
        "checkpointing": checkpointing,
        "graphs": graphs,
    }
    rows = []
    for total in _numbers("n-total", n_total):
        for local in _numbers("n-local", n_local):
            for size in _numbers("bank", bank):
                rows += measure(model, Workload(total, local, size, **shape), chosen, rounds, updates)
    if output is not None:
        write_json(output, {"provenance": provenance(0), "rows": rows})
    if json_:
        print(json.dumps(rows))
        return
    show_table(table(rows))


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of `measure` as a table."""
    head = ["variant", "N_total", "n", "bank", "towers", "ms an update", "over gradaccum", "samples/s", "peak MB", "of bf16 peak"]
    return [head, *map(_line, rows)]


def _line(row: dict[str, Any]) -> list[str]:
    ratio, memory, share = row["time_over_gradaccum"], row["peak_bytes"], row["peak_share"]
    sizes = [f"{row['n_total']:,}", f"{row['n_local']:,}", f"{row['bank']:,}" if row["banked"] else ""]
    how = [f"{row['compile']} compiled"] * bool(row["compile"]) + ["unpadded"] * row["unpad"] + ["checkpointing"] * row["checkpointing"]
    how += ["graphs"] * row["graphs"]
    towers = " ".join([row["precision"], *how])
    if row["failed"]:
        return [row["way"], *sizes, towers, row["failed"], *[""] * 4]
    low, high = min(row["all_seconds"]), max(row["all_seconds"])
    spread = f"{1000 * row['seconds']:.1f} ({1000 * low:.1f} to {1000 * high:.1f})"
    times = [spread, "" if ratio is None else f"x{ratio:.2f}", f"{row['samples_per_second']:.0f}"]
    return [row["way"], *sizes, towers, *times, "" if memory is None else f"{memory / 1e6:,.0f}", "" if share is None else f"{share:.0%}"]


def _numbers(name: str, text: str) -> list[int]:
    return whole_numbers(f"--{name}", text, "128,512")
