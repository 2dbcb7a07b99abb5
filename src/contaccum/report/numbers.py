"""Figures as one reads them."""

from __future__ import annotations

from contaccum.report.rows import Spread

MISSING = "–"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def percent_spread(spread: Spread | None) -> str:
    """28.1, or 28.1 ± 0.2 over seeds."""
    if spread is None:
        return MISSING
    return percent(spread.mean) if spread.deviation is None else f"{percent(spread.mean)} ± {percent(spread.deviation)}"


def points(difference: float) -> str:
    """A signed difference of percentages."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if text in ("-0.0", "+0.0") else text.replace("-", "−")


def probability(p_value: float) -> str:
    """`p < 0.001`, or two digits."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}" if p_value < 0.095 else f"p = {p_value:.2f}"


def amount(value: float | None) -> str:
    """A count, seconds or megabytes: whole, small ones with a decimal."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 20 or value == int(value) else f"{value:.1f}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{amount(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e10 else f"{bytes_ / 1e6:,.0f} MB" if bytes_ >= 1e7 else f"{bytes_ / 1e6:.2g} MB"
