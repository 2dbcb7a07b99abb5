"""What a set of runs came to: rows, the best of each metric, paired tests. Tables, plots, page and JSON draw this."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from contaccum.report.rows import ConfigRow, differences, updates_with_odd_loss
from contaccum.retrieval.compare import paired_comparison

SIGNIFICANT = 0.05
COLLAPSED = 0.1  # of the best: a trained model below that is no rival but a failure
BUSY = 0.8  # of its threads' time: with less, a run shared its cores with others
HEADLINES = ("MRR@10", "MRR", "NDCG@10", "Top@20")  # by which runs are ranked, unless another is asked for


class Pair(NamedTuple):
    """Two rows and, per metric, how much higher the first is (`paired_comparison`)."""

    first: ConfigRow
    second: ConfigRow
    tests: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Summary:
    rows: list[ConfigRow]
    metrics: list[str]  # of all rows, in the order in which they first stand
    headline: str | None  # the metric that ranks them; None where no run was evaluated
    baseline: ConfigRow | None  # what all are compared with; None: of each metric the best method
    tests: dict[str, dict[str, dict[str, Any]]]  # metric -> row's name -> that row against the reference (`paired_comparison`)
    pairs: list[Pair]  # comparisons that were asked for

    def best(self, metric: str) -> ConfigRow | None:
        return best(self.rows, metric)

    def reference(self, metric: str) -> ConfigRow | None:
        return self.baseline or best_trained(self.rows, metric)

    def test(self, row: ConfigRow, metric: str) -> dict[str, Any] | None:
        """The row against the reference; None for the reference itself and where the two share no values per query."""
        return self.tests.get(metric, {}).get(row.name)

    def ranked(self) -> list[ConfigRow]:
        """The rows that were evaluated, best first."""
        metric = self.headline or ""
        return sorted((row for row in self.rows if metric in row.metrics), key=lambda row: -row.metrics[metric])

    def as_json(self) -> dict[str, Any]:
        reference = self.reference(self.headline) if self.headline else None
        trained = [row.name for row in self.rows if row.trained]
        return {
            "headline": self.headline,
            "reference": None if reference is None else reference.name,
            "results": [
                {**row.as_json(), "tests": {metric: tests[row.name] for metric, tests in self.tests.items() if row.name in tests}}
                for row in self.rows
            ],
            "pairs": [{"first": pair.first.name, "second": pair.second.name, "tests": pair.tests} for pair in self.pairs],
            "differences": {name: dict(zip(trained, values, strict=True)) for name, values in differences(self.rows).items()},
            "notes": list(notes(self)),
        }


def summarise(
    rows: list[ConfigRow], metric: str | None = None, baseline: str | None = None, pairs: Sequence[tuple[str, str]] = ()
) -> Summary:
    """`metric` ranks; `baseline` and the members of `pairs` are names of rows or run folders. ValueError where one is unknown."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    headline = _headline(rows, metrics, metric)
    chosen = None if baseline is None else find_row(baseline, rows)
    if chosen is not None and headline not in chosen.metrics:
        raise ValueError(f"the baseline {baseline} has no evaluation by {headline}; write its evaluation.json or choose another baseline")
    asked = [(find_row(first, rows), find_row(second, rows)) for first, second in pairs]
    if same := next((pair for pair, (first, second) in zip(pairs, asked, strict=True) if first is second), None):
        raise ValueError(f"{same[0]} and {same[1]} are the same row of the table; compare runs that differ in more than the seed")
    tests = {metric: _tests(rows, chosen or best_trained(rows, metric), metric) for metric in metrics}
    return Summary(rows, metrics, headline, chosen, tests, [_pair(first, second, metrics) for first, second in asked])


def best(rows: Sequence[ConfigRow], metric: str) -> ConfigRow | None:
    """The row of the highest mean, the first of equals."""
    return max((row for row in rows if metric in row.metrics), key=lambda row: row.metrics[metric], default=None)


def best_trained(rows: Sequence[ConfigRow], metric: str) -> ConfigRow | None:
    """Of the methods: a model before training, or BM25, may be above them all. Where none was trained, the best of all."""
    return best([row for row in rows if row.trained], metric) or best(rows, metric)


def _tests(rows: Sequence[ConfigRow], reference: ConfigRow | None, metric: str) -> dict[str, dict[str, Any]]:
    others = [row for row in rows if row is not reference]
    return {} if reference is None else {row.name: test for row in others if (test := compared(row, reference, metric)) is not None}


def _headline(rows: Sequence[ConfigRow], metrics: Sequence[str], asked: str | None) -> str | None:
    """The metric asked for, else the first of `HEADLINES`, else any, preferably one that all evaluated rows have."""
    if asked is not None and asked not in metrics:
        raise ValueError(f"metric {asked!r} is in no run's evaluation.json; there are {', '.join(metrics) or 'none'}")
    order = [name for name in HEADLINES if name in metrics] + list(metrics)
    shared = [name for name in order if all(name in row.metrics for row in rows if row.metrics)]
    return asked or next(iter(shared or order), None)


def find_row(asked: str, rows: Sequence[ConfigRow]) -> ConfigRow:
    """The row of this name, or the one that holds the run of this folder."""
    for row in rows:
        if asked == row.name or any(os.path.realpath(asked) == os.path.realpath(run.folder) for run in row.runs):
            return row
    raise ValueError(f"{asked!r} is none of the runs; choose one of {', '.join(row.name for row in rows)}, or a run's folder")


def _pair(first: ConfigRow, second: ConfigRow, metrics: Sequence[str]) -> Pair:
    return Pair(first, second, {metric: test for metric in metrics if (test := compared(first, second, metric)) is not None})


def compared(first: ConfigRow, second: ConfigRow, metric: str) -> dict[str, Any] | None:
    """`paired_comparison` of the values per query, each the mean over seeds; None where they were not judged on the same two or more."""
    one, other = first.per_query(metric), second.per_query(metric)
    if len(one) < 2 or one.keys() != other.keys():
        return None
    try:
        return paired_comparison(one, other)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'contaccum[search]'") from error


def significant(test: dict[str, Any]) -> bool:
    return bool(test["p_value"] < SIGNIFICANT)


def notes(summary: Summary) -> Iterator[str]:
    """What a reader of the table must know: what is missing, unfinished or odd."""
    for row in summary.rows:
        yield from _row_notes(row, summary)
    if len(judged := [row for row in summary.rows if row.metrics]) > 1 and summary.headline is not None:
        untested = [row for row in judged if row is not summary.reference(summary.headline) and summary.test(row, summary.headline) is None]
        if untested:
            names = ", ".join(row.name for row in untested)
            yield f"No test of {names}: values per query of the same queries are missing, so the figures may not be comparable."


def _row_notes(row: ConfigRow, summary: Summary) -> Iterator[str]:
    count = len(row.runs)
    if unfinished := [run for run in row.runs if run.trained and not run.summary]:
        updates = ", ".join(f"{run.log[-1]['update']:,.0f}" if run.log else "0" for run in unfinished)
        yield f"{row.name}: {_of(len(unfinished), count)} not finished (updates so far: {updates})."
    missing = count - len(row.evaluations)
    if missing and summary.metrics:
        yield f"{row.name}: {_of(missing, count)} without evaluation."
    if any(run.summary.get("resumed_at_update") for run in row.runs):
        yield f"{row.name}: was resumed; the time of the whole run is not known."
    if collapsed(row, summary):
        yield f"{row.name}: collapsed, its model finds next to nothing; try a lower learning rate or a longer warm-up."
    if (share := row.share_of_cores) is not None and share < BUSY:
        yield f"{row.name}: had {share:.0%} of its threads' time, the machine was busy; its seconds are not comparable."
    if odd := sum(updates_with_odd_loss(run) for run in row.runs):
        yield f"{row.name}: the loss of {odd:,} updates is not finite; they are left out of the curve."


def collapsed(row: ConfigRow, summary: Summary) -> bool:
    """Whether training went wrong: the model has less than a tenth of the best of all."""
    metric = summary.headline or ""
    if not row.trained or metric not in row.metrics:
        return False
    return row.metrics[metric] < COLLAPSED * max(other.metrics[metric] for other in summary.rows if metric in other.metrics)


def _of(some: int, count: int) -> str:
    return "the run is" if count == 1 else f"{some} of {count} seeds {'is' if some == 1 else 'are'}"
