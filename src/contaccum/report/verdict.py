"""The answer in words: what happened, and which is better, no surer than the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from contaccum.report.numbers import duration, percent_spread, points, probability, size
from contaccum.report.rows import ConfigRow, memory_measure
from contaccum.report.summary import BUSY, Summary, collapsed, compared, significant


class Answer(NamedTuple):
    """What a page says first."""

    sentences: list[str]  # the headline, then what supports it
    command: str | None = None  # what to do next
    command_for: str = ""

    def text(self) -> str:
        return " ".join(self.sentences) + (f"\n\n{self.command_for}\n\n    {self.command}" if self.command else "")


def verdict(summary: Summary) -> str:
    """One paragraph, plain text."""
    return " ".join(sentences(summary))


def sentences(summary: Summary) -> list[str]:
    """The headline, then what supports it."""
    return list(_sentences(summary))


def _sentences(summary: Summary) -> Iterator[str]:
    metric, ranked = summary.headline, summary.ranked()
    if metric is None or not ranked:
        yield f"{_count(summary)} trained, but none was evaluated: which is better is unknown."
        yield "Write metrics with contaccum evaluate RUN/model DATA --output RUN."
        return
    best = ranked[0]
    if len(ranked) == 1:
        queries = len(best.per_query(metric))
        yield f"{best.name} reaches {_figure(best, metric)} by {metric}" + (f" on {queries:,} queries." if queries else ".")
    else:
        yield from _ranking(ranked, metric)
        yield from _against_baseline(summary, ranked, metric)
        yield from _cost(best, ranked[1])
        yield from _seeds(ranked)
    if failed := [row.name for row in ranked if collapsed(row, summary)]:
        yield f"{listed(failed)} collapsed in training: {'its' if len(failed) == 1 else 'their'} figures are no comparison of methods."
    if missing := [row.name for row in summary.rows if row not in ranked]:
        yield f"Without evaluation by {metric}, and not ranked: {listed(missing)}."


def _ranking(ranked: list[ConfigRow], metric: str) -> Iterator[str]:
    """The best, the next, and which rows cannot be distinguished from the best."""
    best, second = ranked[0], ranked[1]
    figures = f"{_figure(best, metric)} against {second.name}'s {_figure(second, metric)}"
    test = compared(best, second, metric)
    if test is None:
        yield f"{best.name} has the highest {metric}: {figures}."
        yield "Nothing was tested: values of the same queries are missing."
        return
    if significant(test):
        yield f"{best.name} is best by {metric}: {figures}."
        yield f"The difference is {test_in_words(test)}."
        if (spread := _larger_spread(best, second, metric)) is not None and test["difference"] < spread:
            yield "Seeds differ by more than that."
        return
    alike = [row.name for row in ranked[1:] if (other := compared(best, row, metric)) is not None and not significant(other)]
    tied = listed([best.name, *alike])
    yield f"{tied} are tied by {metric}: {_figure(best, metric)}{_range(best, ranked, alike, metric)}."
    yield f"The difference between {best.name} and {second.name} is not significant: {test_in_words(test)}."
    worse = [row.name for row in ranked[1:] if (other := compared(best, row, metric)) is not None and significant(other)]
    if worse:
        yield f"{listed(worse)} {'is' if len(worse) == 1 else 'are'} significantly worse."


def _range(best: ConfigRow, ranked: list[ConfigRow], alike: list[str], metric: str) -> str:
    """Down to the lowest of those that are tied, where the figures show a difference."""
    lowest = [_figure(row, metric) for row in ranked if row.name in alike][-1]
    return "" if lowest == _figure(best, metric) else f" to {lowest}"


def _against_baseline(summary: Summary, ranked: list[ConfigRow], metric: str) -> Iterator[str]:
    """The best against a baseline that was not yet spoken of."""
    test = None if summary.baseline in ranked[:2] else summary.test(ranked[0], metric)
    if summary.baseline is not None and test is not None:
        yield f"Against the baseline {summary.baseline.name}: {test_in_words(test)}{'' if significant(test) else ', not significant'}."


def _cost(best: ConfigRow, second: ConfigRow) -> Iterator[str]:
    """Time and memory of the two, where both are known and were measured on the same kind of machine."""
    devices = {run.provenance.get("device") for row in (best, second) for run in row.runs}
    seconds = [row.measured("seconds") for row in (best, second)]
    if seconds[0] and seconds[1] and len(devices) == 1:
        sentence = f"{best.name} trained for {duration(seconds[0].mean)}, {second.name} for {duration(seconds[1].mean)}"
        measure = memory_measure([best, second])
        peaks = [row.measured(measure) for row in (best, second)] if measure else [None, None]
        if peaks[0] and peaks[1] and measure != "bank_bytes":
            sentence += f"; peak memory was {size(peaks[0].mean)} against {size(peaks[1].mean)}"
        shares = [share for row in (best, second) if (share := row.share_of_cores) is not None]
        yield sentence + (", but on a busy machine: the times cannot be compared." if min(shares, default=1) < BUSY else ".")


def _seeds(ranked: list[ConfigRow]) -> Iterator[str]:
    single = [row.name for row in ranked[:2] if len(row.evaluations) == 1]
    if single:
        yield f"{'One seed each' if len(single) == 2 else f'{single[0]} has one seed'}: another seed may change this."


def _larger_spread(first: ConfigRow, second: ConfigRow, metric: str) -> float | None:
    spreads = [spread.deviation for row in (first, second) if (spread := row.metric(metric)) and spread.deviation is not None]
    return max(spreads, default=None)


def test_in_words(test: dict[str, Any]) -> str:
    difference, low, high = (points(test[name]) for name in ("difference", "low", "high"))
    return f"{difference} points, 95 % interval {low} to {high}, {probability(test['p_value'])} over {test['queries']:,} queries"


def _figure(row: ConfigRow, metric: str) -> str:
    seeds = len(row.evaluations)
    return percent_spread(row.metric(metric)) + (f" ({seeds} seeds)" if seeds > 1 else "")


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(summary: Summary) -> str:
    runs = sum(len(row.runs) for row in summary.rows)
    return "One run was" if runs == 1 else f"{runs} runs were"
