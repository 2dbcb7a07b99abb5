"""Results as a table in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from contaccum.report.results import RunResult, best


def show(results: list[RunResult]) -> None:
    """One row a run, the best of each metric in bold."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ["negatives", *results[0].metrics, "seconds", "MB"]:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        figures = [
            f"[bold]{100 * value:.1f}[/bold]" if value == best(results, metric) else f"{100 * value:.1f}"
            for metric, value in result.metrics.items()
        ]
        cost = [f"{result.seconds:.0f}", f"{result.peak_bytes / 1e6:.0f}"]
        table.add_row(result.name, str(result.negatives_per_query), *figures, *cost)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=120)).print(table)
