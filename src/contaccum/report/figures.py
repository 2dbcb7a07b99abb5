"""Which figures a report has: those for which there are data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from contaccum.report import plots
from contaccum.report.folders import MEMORY
from contaccum.report.numbers import duration, percent, size
from contaccum.report.plots import Bar, Point
from contaccum.report.rows import ConfigRow, Spread, memory_measure
from contaccum.report.series import (
    POINTS,
    Series,
    by_samples,
    by_time,
    dev_curve,
    dev_metrics,
    drift_curve,
    loss_curve,
    mass_curve,
    phase_seconds,
    ratio_curve,
    series,
)
from contaccum.report.summary import Summary


class Drawing(NamedTuple):
    name: str  # of its files
    part: str  # of the page: "results" or "training"
    title: str
    caption: str
    figure: Any  # matplotlib's


COMPARABLE_TIMES = "Times are comparable for runs on the same machine that had it to themselves."


def drawings(summary: Summary) -> Iterator[Drawing]:
    """Those of the results first; in each part in the order in which they are read."""
    yield from _quality_by_memory(summary)
    yield from _quality(summary)
    yield from _learning(summary.rows, summary.headline)
    yield from _inside(summary.rows)
    yield from _cost(summary.rows)


def _quality_by_memory(summary: Summary) -> Iterator[Drawing]:
    """A point per method: up is better, left is cheaper."""
    metric, measure = summary.headline, memory_measure(summary.rows)
    if metric is None or measure in (None, "bank_bytes"):
        return
    points = [
        Point(slot, row.name, peak.mean / 1e6, 100 * quality.mean, 100 * (quality.deviation or 0.0))
        for slot, row in enumerate(summary.rows)
        if (peak := row.measured(measure or "")) and (quality := row.metric(metric))
    ]
    if len(points) > 1:
        caption = f"{metric} on the test queries by {MEMORY[str(measure)]}. Up is better, left is cheaper."
        levels = [(row.name, 100 * row.metrics[metric]) for row in summary.rows if not row.trained and metric in row.metrics]
        figure = plots.points(points, levels, "MB", f"{metric} (%)")
        yield Drawing("quality-by-memory", "results", f"{metric} by memory", caption, figure)


def _quality(summary: Summary) -> Iterator[Drawing]:
    metric = summary.headline
    if metric is None:
        return
    if drawn := _bars(summary.rows, lambda row: row.metric(metric), 0.01):
        figure = plots.bars(drawn, f"{metric} (%)", lambda value: percent(value / 100))
        yield Drawing("quality", "results", metric, f"{metric} on the test queries{_spread(summary.rows)}.", figure)


def _learning(rows: list[ConfigRow], headline: str | None) -> Iterator[Drawing]:
    if losses := series(rows, loss_curve):
        caption = "A point is the mean of several updates. " if any(len(run.log) >= 2 * POINTS for row in rows for run in row.runs) else ""
        caption += "The loss grows with the number of negatives: compare shapes, not heights."
        yield Drawing("loss", "training", "Training loss", caption + _band(losses), plots.lines(losses, "update", "loss"))
    logged = dev_metrics(rows)
    for metric in dict.fromkeys([*logged[:1], *(name for name in logged if name == headline)]):  # what chose the model, and the headline
        if curves := series(rows, partial(dev_curve, metric=metric)):
            name = _file_name(f"dev-{metric.lower().replace('@', '-')}")
            caption = f"{metric} on the dev queries during training."
            yield from _dev_drawings(rows, metric, name, caption, curves)


def _dev_drawings(rows: list[ConfigRow], metric: str, name: str, caption: str, curves: list[Series]) -> Iterator[Drawing]:
    """Against samples, and where it is known against time."""
    y = f"{metric} (%)"
    samples = series(rows, lambda run: by_samples(run, dev_curve(run, metric)))
    figure = plots.lines(samples, "samples", y, zero=False)
    yield Drawing(name, "training", f"Dev {metric} by samples", caption + _band(curves), figure)
    if times := series(rows, lambda run: by_time(run, dev_curve(run, metric))):
        more = f" {COMPARABLE_TIMES}" + _band(times)
        yield Drawing(f"{name}-time", "training", f"Dev {metric} by time", caption + more, plots.lines(times, "seconds", y, zero=False))


def _inside(rows: list[ConfigRow]) -> Iterator[Drawing]:
    if ratios := [one for one in series(rows, ratio_curve) if min(one.low) > 0]:
        caption = "Gradient norm of the passage tower over that of the query tower. At 1 both learn at the same pace."
        figure = plots.lines(ratios, "update", "passage / query norm", level=1.0)
        yield Drawing("gradient-norm-ratio", "training", "Gradient-norm ratio", caption + _band(ratios), figure)
    if masses := series(rows, mass_curve):
        caption = "Share of the queries' softmax on passages of each age (0: this update), positives left out; second half of training."
        yield Drawing(
            "similarity-mass",
            "training",
            "Similarity mass by age",
            caption + _band(masses),
            plots.lines(masses, "age (updates)", "mass (%)"),
        )
    for tower, what in (("passage", "passages"), ("query", "queries")):
        if drifts := series(rows, partial(drift_curve, tower=tower)):
            caption = f"Cosine of stored {what} with the same texts encoded now, by age; second half of training."
            figure = plots.lines(drifts, "age (updates)", "cosine", zero=False)
            yield Drawing(f"drift-{what}", "training", f"Drift of banked {what}", caption + _band(drifts), figure)


def _cost(rows: list[ConfigRow]) -> Iterator[Drawing]:
    if seconds := _bars(rows, lambda row: row.measured("seconds")):
        caption = f"Training time{_spread(rows)}. {COMPARABLE_TIMES}"
        yield Drawing("time", "results", "Time", caption, plots.bars(seconds, "seconds", duration))
    measure = memory_measure(rows)
    if measure is not None and (peaks := _bars(rows, lambda row: row.measured(measure), 1e6)):
        what = MEMORY[measure][0].upper() + MEMORY[measure][1:]
        figure = plots.bars(peaks, "MB", lambda value: size(value * 1e6))
        yield Drawing(
            "memory",
            "results",
            "Memory of the bank" if measure == "bank_bytes" else "Memory",
            f"{what}{_spread(rows)}.",
            figure,
        )
    phases = [(slot, row.name, seconds_of) for slot, row in enumerate(rows) if (seconds_of := phase_seconds(row))]
    if phases:
        caption = "Mean seconds of an update by what it does; data loading is not part of it."
        yield Drawing("phases", "training", "Where an update's time goes", caption, plots.stacked(phases, "seconds per update"))


def _bars(rows: list[ConfigRow], measure: Callable[[ConfigRow], Spread | None], unit: float = 1.0) -> list[Bar]:
    found = [(slot, row.name, measure(row)) for slot, row in enumerate(rows)]
    return [Bar(slot, label, s.mean / unit, None if s.deviation is None else s.deviation / unit) for slot, label, s in found if s]


def _band(drawn: list[Series]) -> str:
    return " Lines are means over seeds, bands their lowest to highest." if any(one.low != one.high for one in drawn) else ""


def _spread(rows: list[ConfigRow]) -> str:
    return ", mean and standard deviation over seeds" if any(len(row.runs) > 1 for row in rows) else ""


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in text)
