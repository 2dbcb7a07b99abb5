"""Results of cells as rows: one per group, mean and deviation over its seeds; and rows as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from contaccum.experiments.figures import mass_per_passage
from contaccum.experiments.grid import Cell

ResultRow = dict[str, Any]
COSTS = ("seconds", "cpu_seconds", "process_peak_bytes")  # of pre-training


def rows_of(results: Sequence[tuple[Cell, dict[str, Any]]]) -> list[ResultRow]:
    """In the cells' order."""
    groups: dict[str, list[tuple[Cell, dict[str, Any]]]] = {}
    for cell, result in results:
        groups.setdefault(cell.group, []).append((cell, result))
    return [_row(group, members) for group, members in groups.items()]


def _row(group: str, members: list[tuple[Cell, dict[str, Any]]]) -> ResultRow:
    cells, results = [cell for cell, _ in members], [result for _, result in members]
    row: ResultRow = {"group": group, "facts": cells[0].facts, "seeds": [cell.seed for cell in cells]}
    if cells[0].kind == "speed":
        return {**row, "ways": results[0]["ways"]}
    if cells[0].kind == "memory":
        return {**row, "values": {name: results[0][name] for name in results[0] if name.endswith("_bytes")}}
    values = {name: [result["metrics"][name] for result in results] for name in results[0]["metrics"]}
    return {
        **row,
        "values": values,
        "mean": {name: statistics.fmean(of_seeds) for name, of_seeds in values.items()},
        "deviation": {name: statistics.stdev(of_seeds) if len(of_seeds) > 1 else 0.0 for name, of_seeds in values.items()},
        "samples_per_second": _mean_of(results, "samples_per_second"),
        **({name: _mean_of(results, name) for name in COSTS} if cells[0].kind == "pretrain" else {}),
        "diagnostics": [] if cells[0].evaluated else [result["diagnostics"] for result in results],  # megabytes: only what is drawn
    }


def _mean_of(results: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(result["summary"][name] for result in results)


def table_of(rows: Sequence[ResultRow]) -> list[list[str]]:
    """Head and lines, as text."""
    first = rows[0]
    if "ways" in first:
        names = [way["way"] for way in first["ways"]]
        body = [[row["group"], *map(_time, row["ways"])] for row in rows]
        return [["", *names], *body]
    if "mean" not in first:
        names = list(first["values"])
        sizes = [[row["group"], *("" if row["values"][n] is None else f"{row['values'][n] / 1e6:,.2f} MB" for n in names)] for row in rows]
        return [["", *(name.removesuffix("_bytes").replace("_", " ") for name in names)], *sizes]
    metrics = list(first["mean"])
    diagnosed = any(d["grad_norm_ratio"] for row in rows for d in row["diagnostics"])
    head = ["", *metrics, *(["gradient norm ratio at the end", "oldest / newest mass"] if diagnosed else []), "samples/s", "seeds"]
    if costly := any("cpu_seconds" in row for row in rows):
        head[-1:-1] = ["seconds of the processor", "MB"]
    return [head, *([*_cells(row, metrics, diagnosed), *_costs(row, costly), str(len(row["seeds"]))] for row in rows)]


def _costs(row: ResultRow, costly: bool) -> list[str]:
    known = [f"{row['cpu_seconds']:,.0f}", f"{row['process_peak_bytes'] / 1e6:,.0f}"] if "cpu_seconds" in row else ["", ""]
    return [f"{row['samples_per_second']:.0f}", *(known if costly else [])]


def _cells(row: ResultRow, metrics: Sequence[str], diagnosed: bool) -> list[str]:
    shown = [
        f"{100 * row['mean'][name]:.1f}" + (f" ± {100 * row['deviation'][name]:.1f}" if len(row["seeds"]) > 1 else "") for name in metrics
    ]
    if not diagnosed:
        return [row["group"], *shown]
    ends = [statistics.fmean(y for _, y in d["grad_norm_ratio"][-max(1, len(d["grad_norm_ratio"]) // 10) :]) for d in row["diagnostics"]]
    masses = [list(mass_per_passage(d["sim_mass"]).values()) for d in row["diagnostics"] if d["sim_mass"]]
    return [row["group"], f"{statistics.fmean(ends):.2f}", f"{statistics.fmean(m[-1] for m in masses):.2f}" if masses else ""]


def _time(way: dict[str, Any]) -> str:
    if way["seconds"] is None:
        return str(way["failed"])
    ratio = way["time_over_gradaccum"]
    return f"{1000 * way['seconds']:.1f} ms" + ("" if ratio is None else f" (x{ratio:.2f})")
