"""`report` and `push`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from contaccum.cli.base import Command
from contaccum.cli.functions import command
from contaccum.common.console import note

if TYPE_CHECKING:
    from contaccum.report.summary import Summary


class PairsCommand(Command):
    """Takes `--compare A B` any number of times, for which typer has no type."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        rest = super().parse_args(context, list(one_each(arguments, "--compare")))
        named = context.params["compare"] or []
        if len(named) % 2:
            raise ValueError(f"--compare {named[-1]!r} needs two runs, as --compare runs/first runs/second")
        return rest


def one_each(words: Sequence[str], option: str) -> Iterator[str]:
    """The same words, `option A B` as `option A option B`."""
    waiting = 0
    for word in words:
        if waiting == 1 and not word.startswith("--"):
            yield option
        waiting = 2 if word == option else max(0, waiting - 1)
        yield word


@command("contaccum.report.build", "report", cls=PairsCommand)
def show_report(summary: Summary, output: str = "report.html", **_: Any) -> None:
    """Metrics and the query browser come from evaluation.json in the run folders:
    contaccum evaluate RUNFILE ... --output RUN/evaluation.json

    Example: contaccum report runs/gradaccum runs/contaccum-1 runs/contaccum-2 --output report.html --markdown table.md
    """
    from contaccum.report.terminal import show
    from contaccum.report.verdict import verdict

    show(summary.rows)
    print(f"{verdict(summary)}\nPage: {output}")


@command("contaccum.report.card", "push")
def show_pushed(pushed: dict[str, Any], **_: Any) -> None:
    """Example: contaccum push runs/final me/my-encoder --private"""
    print(f"{pushed['model']} -> {pushed['name']}" if pushed["uploaded"] else f"card: {pushed['card']}; nothing was uploaded")
    if pushed["note"]:
        note(pushed["note"])
