"""Result rows of an experiment as figures. A row is a group of cells: mean and deviation over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from contaccum.report.plots import Bar
from contaccum.report.plots import bars as bar_figure
from contaccum.report.plots import lines as line_figure
from contaccum.report.series import Series, over_seeds, windowed

Row = dict[str, Any]


def bars(rows: Sequence[Row], metric: str) -> Any:
    """A bar per group."""
    drawn = [Bar(i, row["group"], 100 * row["mean"][metric], 100 * row["deviation"][metric]) for i, row in enumerate(rows)]
    return bar_figure(drawn, f"{metric} (%)", lambda value: f"{value:.1f}")


def lines(rows: Sequence[Row], x: str, y: str, curve: str) -> Any:
    """`y` by the fact `x`, one line per value of the fact `curve`."""
    found = []
    for slot, value in enumerate(dict.fromkeys(row["facts"][curve] for row in rows)):
        points = sorted((r["facts"][x], 100 * r["mean"][y], 100 * r["deviation"][y]) for r in rows if r["facts"][curve] == value)
        found.append(_banded(slot, f"{curve} = {value}", points))
    return line_figure(found, x, f"{y} (%)", zero=False)


def curves(rows: Sequence[Row], name: str, x: str, y: str, level: float | None = None) -> Any:
    """A diagnostic over the updates, a line per group, each point the mean over a window and over the seeds."""
    found = [over_seeds(slot, row["group"], [windowed(d[name]) for d in row["diagnostics"]]) for slot, row in enumerate(rows)]
    return line_figure([one for one in found if one.x], x, y, zero=False, level=level)


def mass_by_age(rows: Sequence[Row]) -> Any:
    """Mass per negative passage by age in updates, as a multiple of that of age 0, mean over all measurements."""
    found = [over_seeds(slot, row["group"], [mass_per_passage(d["sim_mass"]) for d in row["diagnostics"]]) for slot, row in enumerate(rows)]
    if not any(one.x for one in found):
        raise ValueError("no run was long enough for a mass by age to be measured; --set diagnose_every=1")
    return line_figure([one for one in found if one.x], "age in updates", "mass / mass at age 0", level=1.0)


def mass_per_passage(measured: Sequence[dict[str, Any]]) -> dict[float, float]:
    """age in updates -> mass per passage over that of this update's own, averaged over the measurements that reach that age.

    Of the oldest update a bank may hold a few passages only; less than a tenth of an update's tell nothing and are left out.
    """
    found: dict[float, list[float]] = {}
    for one in measured:
        newest = one["by_age"][0]["mass"] / one["by_age"][0]["passages"]
        most = max(entry["passages"] for entry in one["by_age"])
        for entry in one["by_age"]:
            if newest > 0 and 10 * entry["passages"] >= most:
                found.setdefault(entry["age_updates"], []).append(entry["mass"] / entry["passages"] / newest)
    return {age: statistics.fmean(values) for age, values in sorted(found.items())}


def time_by(rows: Sequence[Row]) -> Any:
    """Seconds of an update by samples per update, a line per way; at the bank that most rows have."""
    banks = [row["facts"]["bank"] for row in rows]
    bank = max(dict.fromkeys(banks), key=banks.count)
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row, way in [(one, way) for one in rows if one["facts"]["bank"] == bank for way in one["ways"]]:
        of_way = points.setdefault(way["way"], [])  # keeps its slot, hence its colour, also where all of it ran out of memory
        if way["seconds"] is not None:
            of_way.append((row["facts"]["N_total"], way["seconds"], 0.0))
    drawn = [_banded(slot, name, sorted(values)) for slot, (name, values) in enumerate(points.items()) if values]
    return line_figure(drawn, "N_total", "seconds of an update")


def memory_by_bank(rows: Sequence[Row]) -> Any:
    """Bytes by bank: vectors as predicted, the whole bank as seen, and the matrix that is not built."""
    kinds = {"vectors, predicted": "predicted_bytes", "bank, seen": "bank_bytes", "whole score matrix": "matrix_bytes"}
    found = [
        _banded(slot, name, sorted((row["facts"]["bank"], row["values"][key] / 1e6, 0.0) for row in rows))
        for slot, (name, key) in enumerate(kinds.items())
    ]
    return line_figure(found, "bank (tuples)", "MB")


def _banded(slot: int, name: str, points: Sequence[tuple[float, float, float]]) -> Series:
    x, y, spread = ([point[i] for point in points] for i in range(3))
    low, high = [a - b for a, b in zip(y, spread, strict=True)], [a + b for a, b in zip(y, spread, strict=True)]
    return Series(slot, name, list(x), list(y), low, high)
