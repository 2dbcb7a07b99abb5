"""Tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from contaccum.report.rows import ConfigRow
from contaccum.report.summary import summarise
from contaccum.report.tables import Table, plain_table, summary_table

GAP = 3  # between two columns


def show(rows: list[ConfigRow]) -> None:
    """A line per row, the best of each metric in bold. Metrics that a narrow terminal has no room for are named."""
    summary, terminal = summarise(rows), _terminal()
    table = summary_table(summary, tests=False)
    kept, left = table, list[str]()
    for name in [*reversed([metric for metric in summary.metrics if metric != summary.headline]), "negatives"]:
        if _width(kept) <= terminal.width:
            break
        if name in kept.head:
            kept, left = _without(kept, name), [name, *left]
    _print(kept, terminal)
    if left:
        terminal.print(f"no room for {', '.join(left)}: a wider terminal, or the page, shows them", highlight=False)


def _without(table: Table, name: str) -> Table:
    place = table.head.index(name)
    rest = [*range(place), *range(place + 1, len(table.head))]
    return Table([table.head[i] for i in rest], [[line[i] for i in rest] for line in table.rows])


def _width(table: Table) -> int:
    columns = zip(table.head, *([cell.text for cell in line] for line in table.rows), strict=True)
    return sum(max(map(len, texts)) + GAP for texts in columns)


def show_lines(lines: Sequence[Sequence[str]]) -> None:
    """Head and lines of texts."""
    _print(plain_table(lines))


def _print(table: Table, terminal: Console | None = None) -> None:
    drawn = Drawn(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(table.head):
        drawn.add_column(name, justify="right" if place else "left", no_wrap=True)
    for line in table.rows:
        drawn.add_row(*(Text(cell.text, "bold" if cell.best else "") for cell in line))
    (terminal or _terminal()).print(drawn)


def _terminal() -> Console:
    """Where nobody looks at once, as wide as it takes."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=240)
