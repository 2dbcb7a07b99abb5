"""`report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import typer.core

from contaccum.cli.base import app


class PairsCommand(typer.core.TyperCommand):
    """Takes `--compare A B` any number of times, for which typer has no type."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        return super().parse_args(context, list(one_each(arguments, "--compare")))


def one_each(words: Sequence[str], option: str) -> Iterator[str]:
    """The same words, `option A B` as `option A option B`."""
    waiting = 0
    for word in words:
        if waiting == 1 and not word.startswith("--"):
            yield option
        waiting = 2 if word == option else max(0, waiting - 1)
        yield word


@app.command("report", cls=PairsCommand)
def report(
    runs: Annotated[list[Path], typer.Argument(help="folders that contaccum train wrote; those that differ only in seed become one row")],
    output: Annotated[Path, typer.Option(help="page to write; plots go to a folder beside it")] = Path("report.html"),
    json_output: Annotated[Optional[Path], typer.Option("--json", help="also write the results as JSON")] = None,  # noqa: UP045
    markdown: Annotated[Optional[Path], typer.Option(help="also write the tables as Markdown")] = None,  # noqa: UP045
    metric: Annotated[Optional[str], typer.Option(help="ranks the runs (default: MRR@10 or what else all have)")] = None,  # noqa: UP045
    baseline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="run folder, or name in the table, that all are tested against (default: the best)"),
    ] = None,
    compare: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="A B", help="two run folders, or names in the table: every metric's difference, interval and test; repeatable"
        ),
    ] = None,
) -> None:
    """Any set of runs as one page: what happened, and which is better?

    Metrics and the query browser come from evaluation.json in the run folders: contaccum evaluate RUNFILE ... --output RUN/evaluation.json

    Example: contaccum report runs/gradaccum runs/contaccum-1 runs/contaccum-2 --output report.html --markdown table.md
    """
    from contaccum.report.build import report as write_report
    from contaccum.report.terminal import show
    from contaccum.report.verdict import verdict

    chosen = compare or []
    if len(chosen) % 2:
        raise ValueError(f"--compare {chosen[-1]!r} needs two runs, as --compare runs/first runs/second")
    summary = write_report(
        runs,
        output,
        json_output=json_output,
        markdown=markdown,
        metric=metric,
        baseline=baseline,
        compare=list(zip(chosen[::2], chosen[1::2], strict=True)),
    )
    show(summary.rows)
    print(f"{verdict(summary)}\nPage: {output}")
