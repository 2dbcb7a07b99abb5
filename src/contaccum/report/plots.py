"""Plots as matplotlib figures; matplotlib is imported only when something is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from contaccum.report.results import RunResult

COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee", "#bbbbbb")  # told apart by most colour-blind readers


def loss_curves(results: list[RunResult], window: int = 10) -> Any:
    """Loss by update, each point the mean over `window` updates. Heights are comparable only for equal numbers of negatives."""
    figure, axes = _figure()
    for result, colour in zip(results, COLOURS, strict=False):
        losses = [line["loss"] for line in result.log]
        means = [sum(losses[i : i + window]) / len(losses[i : i + window]) for i in range(0, len(losses), window)]
        axes.plot([i * window + 1 for i in range(len(means))], means, label=result.name, color=colour, linewidth=2)
    axes.set_xlabel("update")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def metric_bars(results: list[RunResult], metric: str) -> Any:
    """One bar a run, in percent, with its figure."""
    figure, axes = _figure(height=0.6 + 0.5 * len(results))
    values = [100 * result.metrics[metric] for result in results]
    bars = axes.barh([result.name for result in results], values, color=list(COLOURS[: len(results)]))
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(f"{metric} (%)")
    axes.set_xlim(0, max(values) * 1.15 or 1)
    return figure


def as_svg(figure: Any) -> str:
    """The figure as an <svg> element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save_png(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=150, bbox_inches="tight")


def _figure(height: float = 3.6) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes
