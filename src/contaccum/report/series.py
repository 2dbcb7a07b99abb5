"""Curves as numbers, from logs and diagnostics: what the plots draw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from contaccum.report.folders import Run, number
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
    found = (over_seeds(slot, row.name, [points for run in row.runs if (points := curve(run))]) for slot, row in enumerate(rows))
    return [one for one in found if one.x]


def over_seeds(slot: int, name: str, curves: Sequence[Curve]) -> Series:
    """At the points that all curves have."""
    curves = _aligned(curves)
    shared = sorted(x for x in (curves[0] if curves else {}) if all(x in other for other in curves))
    values = [[points[x] for points in curves] for x in shared]
    return Series(slot, name, shared, [statistics.fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values])


def _aligned(curves: Sequence[Curve]) -> Sequence[Curve]:
    """Curves with as many points each, but over times that differ from seed to seed, at the mean of these."""
    if len({len(curve) for curve in curves}) != 1 or all(curve.keys() == curves[0].keys() for curve in curves):
        return curves
    if set.intersection(*(set(curve) for curve in curves)):
        return curves
    places = [statistics.fmean(x) for x in zip(*(sorted(curve) for curve in curves), strict=True)]
    return [dict(zip(places, (curve[x] for x in sorted(curve)), strict=True)) for curve in curves]


def windowed(points: Sequence[tuple[float, Any]], window: int | None = None) -> Curve:
    """Mean of the finite values over `window` updates (None: so many that about `POINTS` windows remain), at their mean update."""
    size = window or max(1, len(points) // POINTS)
    curve: Curve = {}
    for start in range(0, len(points), size):
        part = [(update, value) for update, written in points[start : start + size] if (value := number(written)) is not None]
        if part:
            curve[statistics.fmean(update for update, _ in part)] = statistics.fmean(value for _, value in part)
    return curve


def loss_curve(run: Run, window: int | None = None) -> Curve:
    return windowed([(line["update"], line["loss"]) for line in run.log], window)


def ratio_curve(run: Run, window: int | None = None) -> Curve:
    """Gradient norm of the passage tower over that of the query tower."""
    points = ((number(line.get("update")), line.get("grad_norm_ratio")) for line in run.diagnostics)
    return windowed([(update, ratio) for update, ratio in points if update is not None], window)


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
    kept = _by_age([line["sim_mass"]["by_age"] for line in run.diagnostics if _has(line.get("sim_mass"), "by_age")], "mass")
    return {age: 100 * math.fsum(masses) / len(kept) for age, masses in _ages(kept).items()}


def drift_curve(run: Run, tower: str) -> Curve:
    """age in updates -> cosine between a stored vector and the same text encoded now, mean over the second half of the measurements."""
    kept = _by_age([line["drift"] for line in run.diagnostics if isinstance(line.get("drift"), list)], f"{tower}_cosine")
    return {age: statistics.fmean(cosines) for age, cosines in _ages(kept).items()}


def _by_age(measured: Sequence[Sequence[Any]], name: str) -> list[Curve]:
    """age -> value of each measurement of the second half, where both are numbers."""
    kept = []
    for entries in measured[len(measured) // 2 :]:
        found = [(number(entry.get("age_updates")), number(entry.get(name))) for entry in entries if isinstance(entry, dict)]
        kept.append({age: value for age, value in found if age is not None and value is not None})
    return kept


def _ages(measured: Sequence[Curve]) -> dict[float, list[float]]:
    """age -> the values of those that have it."""
    ages = sorted({age for values in measured for age in values})
    return {age: [values[age] for values in measured if age in values] for age in ages}


def phase_seconds(row: ConfigRow) -> dict[str, float]:
    """phase -> mean seconds of an update, over all measurements of all seeds; empty where nothing was measured."""
    timed = [line["seconds"] for run in row.runs for line in run.diagnostics if _has(line.get("seconds"), *PHASES, kind=float)]
    return {phase: statistics.fmean(seconds[phase] for seconds in timed) for phase in PHASES} if timed else {}


def _has(value: Any, *names: str, kind: type = list) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name in names)
