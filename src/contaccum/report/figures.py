"""Which figures a report has: those for which there are data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from contaccum.report import plots
from contaccum.report.numbers import duration, percent, size
from contaccum.report.plots import Bar
from contaccum.report.rows import MEMORY, ConfigRow, Spread, memory_measure
from contaccum.report.series import (
    POINTS,
    Series,
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


def drawings(summary: Summary) -> Iterator[Drawing]:
    """Those of the results first; in each part in the order in which they are read."""
    yield from _quality(summary)
    yield from _learning(summary.rows, summary.headline)
    yield from _inside(summary.rows)
    yield from _cost(summary.rows)


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
            name = f"dev-{metric.lower().replace('@', '-')}"
            caption = f"{metric} on the dev queries during training."
            figure = plots.lines(curves, "update", f"{metric} (%)", zero=False)
            yield Drawing(_file_name(name), "training", f"Dev {metric}", caption + _band(curves), figure)


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
        caption = f"Training time{_spread(rows)}. Comparable for runs on the same machine."
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
