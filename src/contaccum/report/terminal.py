"""Results as a table in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contaccum.report.rows import ConfigRow
from contaccum.report.summary import summarise
from contaccum.report.tables import summary_table


def show(rows: list[ConfigRow]) -> None:
    """A line per row, the best of each metric in bold."""
    shown = summary_table(summarise(rows), tests=False)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(shown.head):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for line in shown.rows:
        table.add_row(*(Text(cell.text, "bold" if cell.best else "") for cell in line))
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=240)).print(table)
