"""Tables as data, and how HTML, Markdown and a terminal draw them."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from contaccum.report.numbers import MISSING, amount, percent, percent_spread, points, probability
from contaccum.report.rows import ConfigRow, differences, memory_measure, value_text
from contaccum.report.summary import SIGNIFICANT, Pair, Summary, significant

ACROSS = 8  # columns of configurations that a printed page has room for


class Cell(NamedTuple):
    text: str
    value: float | None = None  # by which a column of figures is sorted
    best: bool = False
    alike: bool = False  # not significantly different from the reference


class Table(NamedTuple):
    head: list[str]
    rows: list[list[Cell]]  # the first cell of each names it


def summary_table(summary: Summary, tests: bool = True) -> Table:
    """A line per row: metrics with the best marked, the p-value of the headline metric's test (`tests`), time and memory."""
    columns: dict[str, Callable[[ConfigRow], Cell]] = {"method": lambda row: Cell(row.name)}
    if any(len(row.runs) > 1 for row in summary.rows):
        columns["seeds"] = lambda row: _plain(len(row.runs))
    columns["negatives"] = lambda row: _plain(row.negatives_per_query)
    columns |= {metric: partial(_metric, summary, metric) for metric in summary.metrics}
    if tests and summary.headline is not None and len(summary.ranked()) > 1:
        columns[f"p ({summary.headline})"] = partial(_probability, summary, summary.headline)
    columns["seconds"] = partial(_measured, "seconds", 1.0)
    if (measure := memory_measure(summary.rows)) is not None:
        columns["bank MB" if measure == "bank_bytes" else "MB"] = partial(_measured, measure, 1e6)
    return Table(list(columns), [[cell(row) for cell in columns.values()] for row in summary.rows])


def _metric(summary: Summary, metric: str, row: ConfigRow) -> Cell:
    spread, best, test = row.metric(metric), summary.best(metric), summary.test(row, metric)
    if spread is None or best is None:
        return Cell(MISSING)
    shown, reference = percent(spread.mean), summary.reference(metric)
    is_best = shown == percent(best.metrics[metric])  # as far as the table shows
    equal = reference is not None and shown == percent(reference.metrics[metric])
    return Cell(percent_spread(spread), spread.mean, is_best, not (is_best or equal) and test is not None and not significant(test))


def _probability(summary: Summary, metric: str, row: ConfigRow) -> Cell:
    if row is summary.reference(metric):
        return Cell("baseline" if row is summary.baseline else "reference")
    test = summary.test(row, metric)
    return Cell(MISSING) if test is None else Cell(probability(test["p_value"]).removeprefix("p ").removeprefix("= "), test["p_value"])


def _plain(value: float | None) -> Cell:
    return Cell(amount(value), value)


def _measured(name: str, unit: float, row: ConfigRow) -> Cell:
    spread = row.measured(name)
    return _plain(None if spread is None else spread.mean / unit)


def pair_table(pair: Pair) -> Table:
    """A line per metric: both means, the difference with its interval, test and effect."""
    head = ["metric", pair.first.name, pair.second.name, "difference", "95 % interval", "p", "effect size", "queries higher / lower"]
    lines = []
    for metric, test in pair.tests.items():
        effect = test["effect_size"]
        means = [percent(row.metrics[metric]) for row in (pair.first, pair.second)]
        cells = [
            points(test["difference"]),
            f"{points(test['low'])} to {points(test['high'])}",
            probability(test["p_value"])[2:].lstrip("= "),
        ]
        cells += [MISSING if effect is None else f"{effect:.2f}".replace("-", "−"), f"{test['wins']:,} / {test['losses']:,}"]
        lines.append([Cell(text) for text in (metric, *means, *cells)])
    return Table(head, lines)


def difference_tables(rows: Sequence[ConfigRow]) -> list[Table]:
    """A line per field in which the configurations differ. Where there are too many rows for a page's width, a line per row, and as many
    tables as the fields need; none where nothing differs."""
    rows = [row for row in rows if row.trained]
    found = differences(rows)
    names, columns = [row.name for row in rows], [[name, *map(value_text, values)] for name, values in found.items()]
    if len(rows) <= ACROSS:
        return [plain_table([["field", *names], *columns])] if found else []
    parts = [columns[start : start + ACROSS] for start in range(0, len(columns), ACROSS)]
    return [plain_table(list(zip(["run", *names], *part, strict=True))) for part in parts]


def plain_table(lines: Sequence[Sequence[str]]) -> Table:
    return Table(list(lines[0]), [[Cell(text) for text in line] for line in lines[1:]])


def legend(summary: Summary) -> str:
    """What the marks mean, in words."""
    metric = summary.headline
    reference = None if metric is None else summary.reference(metric)
    if metric is None or reference is None:
        return ""
    seeds = ", mean ± standard deviation over seeds" if any(len(row.runs) > 1 for row in summary.rows) else ""
    cells = f"Metrics in percent{seeds}. Bold: the best."
    if len(summary.ranked()) < 2:
        return cells
    best = "the best of its column" if all(row.trained for row in summary.rows) else "the best trained method of its column"
    than = f"the baseline, {reference.name}" if summary.baseline else best
    unmarked = f"{'The baseline' if summary.baseline else 'That'} itself, what equals it as shown, and what is bold have no mark."
    return (
        f"{cells} ≈: not significantly different from {than} (p ≥ {SIGNIFICANT}). {unmarked} Of other equal figures one may have it and "
        "one not: the test goes query by query. p: two-sided paired t-test over queries, values averaged "
        "over seeds. It says whether other queries would give the same order, not other seeds, and is not corrected for the number of "
        "comparisons."
    )


def as_html(table: Table, caption: str, kind: str = "") -> str:
    """A table in a box of its own that scrolls. `kind`: "sortable" by its heads; "wrapped": long values take several lines."""
    head = "".join(f'<th scope="col">{_sort_button(name) if kind == "sortable" else _name(name)}</th>' for name in table.head)
    body = "".join(f"<tr>{''.join(_html_cell(cell, place) for place, cell in enumerate(line))}</tr>" for line in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table class="{kind}">'
        f'<caption class="unseen">{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _sort_button(name: str) -> str:
    return f'<button type="button">{_name(name)}</button>'


def _name(name: str) -> str:
    """A name that may be broken behind its underscores."""
    return html.escape(name).replace("_", "_<wbr>")


def _html_cell(cell: Cell, place: int) -> str:
    if place == 0:
        return f'<th scope="row">{_name(cell.text)}</th>'
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    text = f'<strong>{html.escape(cell.text)}</strong><span class="unseen"> best</span>' if cell.best else html.escape(cell.text)
    mark = '<span class="alike" title="not significantly different">≈</span>' if cell.alike else ""
    kind = ' class="best"' if cell.best else ""
    return f"<td{kind}{value}>{mark}{text}</td>"


def as_markdown(table: Table) -> str:
    lines = [table.head, ["---", *["---:"] * (len(table.head) - 1)]]
    lines += [[_markdown_cell(cell) for cell in line] for line in table.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown_cell(cell: Cell) -> str:
    text = " ".join(cell.text.split()).replace("\\", "\\\\").replace("|", "\\|")
    return ("≈ " if cell.alike else "") + (f"**{text}**" if cell.best else text)
