"""Figures from numbers; matplotlib is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from contaccum.report.palette import INK, RULE, style
from contaccum.report.series import PHASES, Series

WIDTH = 4.6  # inches: as wide as a phone, so that 12 points remain legible there
LOOK: dict[Any, Any] = {
    "font.size": 12,
    "legend.fontsize": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.9,
    "lines.markersize": 5.5,
    "hatch.color": INK,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
}


class Bar(NamedTuple):
    slot: int
    name: str
    value: float
    deviation: float | None = None  # over seeds


class Point(NamedTuple):
    slot: int
    name: str
    x: float
    y: float
    deviation: float = 0.0  # of y, over seeds


def look(**more: Any) -> AbstractContextManager[Any]:
    """Our settings of matplotlib, for drawing and for saving."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise ValueError("matplotlib is not installed; pip install 'contaccum[report]'") from error
    return rc_context(LOOK | more)


def lines(drawn: Sequence[Series], x: str, y: str, zero: bool = True, level: float | None = None) -> Any:
    """A line per series with its band over seeds. `zero`: the axis starts there; `level`: a line to compare with, in a ratio's plot."""
    from matplotlib.ticker import MaxNLocator

    with look():
        figure, axes = _figure(2.9 + 0.25 * _legend_lines(drawn))
        if level is not None:
            axes.axhline(level, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), label="_level")
        for one in drawn:
            _line(axes, one)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if level is not None:
            _logarithmic(axes, drawn)
        elif zero:
            axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=_columns(drawn), frameon=False, handlelength=3, columnspacing=1.4)
        return figure


def _line(axes: Any, one: Series) -> None:
    look_of, points = style(one.slot), len(one.x)
    step = max(1, points // 6)
    start = one.slot * step // 8 if points > 12 else 0  # markers of lines that lie on each other stay apart
    axes.plot(one.x, one.y, label=one.name, color=look_of.light, linestyle=look_of.line, marker=look_of.marker, markevery=(start, step))
    if one.low != one.high:
        axes.fill_between(one.x, one.low, one.high, color=look_of.light, alpha=0.18, linewidth=0)


def _logarithmic(axes: Any, drawn: Sequence[Series]) -> None:
    """A logarithmic axis with plain figures, where the values span more than a factor of five."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = min(min(one.low) for one in drawn), max(max(one.high) for one in drawn)
    if high / low > 5:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def bars(drawn: Sequence[Bar], x: str, text: Callable[[float], str]) -> Any:
    """A bar per row, its name above and its figure beside it, with the deviation over seeds where there are several."""
    with look():
        figure, axes = _figure(0.8 + 0.56 * len(drawn))
        places = list(range(len(drawn)))
        errors = [bar.deviation or 0.0 for bar in drawn]
        axes.barh(places, [bar.value for bar in drawn], height=0.42, color=[style(bar.slot).light for bar in drawn])
        for place, bar, error in zip(places, drawn, errors, strict=True):
            if error:
                axes.errorbar(bar.value, place, xerr=error, color=INK, capsize=3, linewidth=1.2)
            _named(axes, place, bar.name)
            axes.annotate(text(bar.value), (bar.value + error, place), (5, 0), textcoords="offset points", va="center")
        _finish_bars(axes, len(drawn), max(bar.value + error for bar, error in zip(drawn, errors, strict=True)), x)
        return figure


def points(drawn: Sequence[Point], levels: Sequence[tuple[str, float]], x: str, y: str) -> Any:
    """A mark per row, and a dotted line for each of what has no x; names are in the legend."""
    with look():
        figure, axes = _figure(2.9 + 0.25 * -(-(len(drawn)) // 2))
        for point in drawn:
            chosen = style(point.slot)
            axes.errorbar(
                point.x,
                point.y,
                yerr=point.deviation or None,
                color=chosen.light,
                marker=chosen.marker,
                markersize=9,
                capsize=3,
                linestyle="none",
                label=point.name,
            )
        for name, level in levels:
            axes.axhline(level, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), label=f"_{name}")
            axes.annotate(name, (0.01, level), xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(2, 2), fontsize=10)
        span = max(point.x for point in drawn) - min(point.x for point in drawn) or max(point.x for point in drawn) * 0.1
        axes.set_xlim(max(0, min(point.x for point in drawn) - 0.5 * span), max(point.x for point in drawn) + 0.5 * span)
        axes.margins(y=0.15)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, columnspacing=1.4)
        return figure


def stacked(drawn: Sequence[tuple[int, str, dict[str, float]]], x: str) -> Any:
    """A bar per (slot, name, phase -> value), its phases from the left in shades and hatches that stay apart in grey."""
    with look():
        figure, axes = _figure(1.15 + 0.56 * len(drawn))
        left = [0.0] * len(drawn)
        for phase, shade, hatch in zip(PHASES, (0.75, 0.5, 0.28, 0.1), ("", "////", "", "...."), strict=True):
            widths = [phases[phase] for _, _, phases in drawn]
            axes.barh(
                range(len(drawn)), widths, left=left, height=0.42, color=[(*_rgb(INK), shade)], hatch=hatch, edgecolor=INK, label=phase
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, (_, name, _) in enumerate(drawn):
            _named(axes, place, name)
        _finish_bars(axes, len(drawn), max(left), x)
        figure.legend(loc="outside lower center", ncols=4, frameon=False, handlelength=1.4, columnspacing=1.2)
        return figure


def _named(axes: Any, place: int, name: str) -> None:
    axes.annotate(name, (0, place - 0.24), (0, 1), textcoords="offset points", va="bottom", ha="left")


def _finish_bars(axes: Any, count: int, largest: float, x: str) -> None:
    axes.set_ylim(count - 0.6, -0.75)
    axes.set_yticks([])
    axes.set_xlim(0, largest * 1.18 or 1)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.set_xlabel(x)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    return figure, axes


def _columns(drawn: Sequence[Series]) -> int:
    longest = max((len(one.name) for one in drawn), default=0)
    return min(len(drawn), 3 if longest <= 8 else 2 if longest <= 18 else 1) or 1


def _legend_lines(drawn: Sequence[Series]) -> int:
    return -(-len(drawn) // _columns(drawn))


def _rgb(colour: str) -> tuple[float, float, float]:
    return (int(colour[1:3], 16) / 255, int(colour[3:5], 16) / 255, int(colour[5:7], 16) / 255)
