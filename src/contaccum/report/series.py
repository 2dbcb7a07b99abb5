"""Curves as numbers, from logs and diagnostics: what the plots draw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from contaccum.report.folders import Line, Run, number
from contaccum.report.rows import ConfigRow

POINTS = 60  # of a curve over updates, about: each is the mean of a window
PHASES = ("forward", "loss", "backward", "update")

Curve = dict[float, float]  # x -> y of one run


class Series(NamedTuple):
    """A row's curve: the mean over its seeds where all of them have a point, and their lowest and highest."""

    slot: int  # the row's place, which gives its colour
    name: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def series(rows: Sequence[ConfigRow], curve: Callable[[Run], Curve]) -> list[Series]:
    """Of every row that has at least one point."""
    found = []
    for slot, row in enumerate(rows):
        curves = _aligned([points for run in row.runs if (points := curve(run))])
        shared = sorted(x for x in (curves[0] if curves else {}) if all(x in other for other in curves))
        values = [[points[x] for points in curves] for x in shared]
        if shared:
            found.append(
                Series(slot, row.name, shared, [statistics.fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values])
            )
    return found


def _aligned(curves: list[Curve]) -> list[Curve]:
    """Curves with as many points each, but over times that differ from seed to seed, at the mean of these."""
    if len({len(curve) for curve in curves}) != 1 or all(curve.keys() == curves[0].keys() for curve in curves):
        return curves
    if set.intersection(*(set(curve) for curve in curves)):
        return curves
    places = [statistics.fmean(x) for x in zip(*(sorted(curve) for curve in curves), strict=True)]
    return [dict(zip(places, (curve[x] for x in sorted(curve)), strict=True)) for curve in curves]


def windowed(lines: Sequence[Line], name: str, window: int | None = None) -> Curve:
    """Mean of the finite values of `name` over `window` updates (None: so many that about `POINTS` remain), at their mean update."""
    size = window or max(1, len(lines) // POINTS)
    curve: Curve = {}
    for start in range(0, len(lines), size):
        part = [(line["update"], value) for line in lines[start : start + size] if (value := number(line.get(name))) is not None]
        if part:
            curve[statistics.fmean(update for update, _ in part)] = statistics.fmean(value for _, value in part)
    return curve


def loss_curve(run: Run, window: int | None = None) -> Curve:
    return windowed(run.log, "loss", window)


def ratio_curve(run: Run, window: int | None = None) -> Curve:
    """Gradient norm of the passage tower over that of the query tower."""
    return windowed([line for line in run.diagnostics if number(line.get("update")) is not None], "grad_norm_ratio", window)


def dev_curve(run: Run, metric: str) -> Curve:
    points = ((number(line.get("update")), number(line.get(metric))) for line in run.dev)
    return {update: 100 * value for update, value in points if update is not None and value is not None}


def by_samples(run: Run, curve: Curve) -> Curve:
    """The same against samples seen: methods of other batches meet at the same place."""
    return {update * run.config["n_total"]: value for update, value in curve.items()}


def by_time(run: Run, curve: Curve) -> Curve:
    """The same against seconds of training, which updates share evenly; empty where the time of the whole run is not known."""
    seconds, updates = run.measured("seconds"), number(run.summary.get("updates"))
    return {update / updates * seconds: value for update, value in curve.items()} if seconds and updates else {}


def dev_metrics(rows: Sequence[ConfigRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for run in row.runs for line in run.dev for name in line if name != "update"))


def mass_curve(run: Run) -> Curve:
    """age in updates -> share of the softmax that falls on passages of that age, mean over the second half of the measurements.

    An age that a measurement does not have counts as 0 there: positives and all ages then still sum to 1.
    """
    measured = [line["sim_mass"]["by_age"] for line in run.diagnostics if _has(line.get("sim_mass"), "by_age")]
    kept = [dict(_pairs(entries, "mass")) for entries in measured[len(measured) // 2 :]]
    ages = sorted({age for masses in kept for age in masses})
    return {age: 100 * math.fsum(masses.get(age, 0.0) for masses in kept) / len(kept) for age in ages}


def drift_curve(run: Run, tower: str) -> Curve:
    """age in updates -> cosine between a stored vector and the same text encoded now, mean over the second half of the measurements."""
    measured = [line["drift"] for line in run.diagnostics if isinstance(line.get("drift"), list)]
    kept = [dict(_pairs(entries, f"{tower}_cosine")) for entries in measured[len(measured) // 2 :]]
    ages = sorted({age for cosines in kept for age in cosines})
    return {age: statistics.fmean(cosines[age] for cosines in kept if age in cosines) for age in ages}


def phase_seconds(row: ConfigRow) -> dict[str, float]:
    """phase -> mean seconds of an update, over all measurements of all seeds; empty where nothing was measured."""
    timed = [line["seconds"] for run in row.runs for line in run.diagnostics if _has(line.get("seconds"), *PHASES, kind=float)]
    return {phase: statistics.fmean(seconds[phase] for seconds in timed) for phase in PHASES} if timed else {}


def _has(value: Any, *names: str, kind: type = list) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name in names)


def _pairs(entries: Sequence[Any], name: str) -> list[tuple[float, float]]:
    """(age, value) of the entries that have both."""
    found = [(number(entry.get("age_updates")), number(entry.get(name))) for entry in entries if isinstance(entry, dict)]
    return [(age, value) for age, value in found if age is not None and value is not None]
