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


def show(rows: list[ConfigRow]) -> None:
    """A line per row, the best of each metric in bold."""
    _print(summary_table(summarise(rows), tests=False))


def show_lines(lines: Sequence[Sequence[str]]) -> None:
    """Head and lines of texts."""
    _print(plain_table(lines))


def _print(table: Table) -> None:
    drawn = Drawn(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(table.head):
        drawn.add_column(name, justify="right" if place else "left", no_wrap=True)
    for line in table.rows:
        drawn.add_row(*(Text(cell.text, "bold" if cell.best else "") for cell in line))
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=240)).print(drawn)
