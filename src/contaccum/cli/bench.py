"""`bench`."""

from __future__ import annotations

from typing import Any

from contaccum.cli.functions import command


@command("contaccum.experiments.bench", "bench")
def show_times(rows: list[dict[str, Any]], **_: Any) -> None:
    """Example: contaccum bench --model minilm-l3 --n-total 64 --passage-tokens 64 --rounds 1"""
    from contaccum.report.terminal import show_lines

    show_lines(table(rows))


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of `measure` as a table."""
    head = ["variant", "N_total", "n", "bank", "towers", "ms an update", "over gradaccum", "samples/s", "peak MB", "of bf16 peak"]
    return [head, *map(_line, rows)]


def _line(row: dict[str, Any]) -> list[str]:
    ratio, memory, share = row["time_over_gradaccum"], row["peak_bytes"], row["peak_share"]
    sizes = [f"{row['n_total']:,}", f"{row['n_local']:,}", f"{row['bank']:,}" if row["banked"] else ""]
    how = ["compiled"] * bool(row["compile"]) + ["unpadded"] * row["unpad"] + ["checkpointing"] * row["checkpointing"]
    how += ["graphs"] * row["graphs"]
    towers = " ".join([row["precision"], *how])
    if row["failed"]:
        return [row["way"], *sizes, towers, row["failed"], *[""] * 4]
    low, high = min(row["all_seconds"]), max(row["all_seconds"])
    spread = f"{1000 * row['seconds']:.1f} ({1000 * low:.1f} to {1000 * high:.1f})"
    times = [spread, "" if ratio is None else f"x{ratio:.2f}", f"{row['samples_per_second']:.0f}"]
    return [row["way"], *sizes, towers, *times, "" if memory is None else f"{memory / 1e6:,.0f}", "" if share is None else f"{share:.0%}"]
