"""What a comparison came to: the page, and in words which method to use, by how much, how sure, at what cost, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contaccum.common.provenance import provenance
from contaccum.comparison.compare import BEFORE, METRICS, WORDS, Comparison
from contaccum.comparison.sizing import Sizes
from contaccum.comparison.source import Prepared
from contaccum.methods.config import TrainConfig
from contaccum.report.build import report
from contaccum.report.numbers import duration, percent, size
from contaccum.report.rows import ConfigRow, memory_measure
from contaccum.report.summary import BUSY, Summary, compared, significant
from contaccum.report.verdict import Answer, listed, told_test

BASELINES = (BEFORE, WORDS)
ALL_SPLITS = "train+dev+test"


def outcome(
    folder: Path,
    runs: Mapping[str, tuple[str, Path]],
    options: Mapping[str, dict[str, Any]],
    data: Prepared,
    sizes: Sizes,
    failed: list[str],
    title: str,
    introduction: str,
) -> Comparison:
    """`runs`: cell -> (method as the table shows it, run folder); `options`: method -> fields of its training."""
    if not runs:
        raise RuntimeError(f"no run came to its end; see the logs in {folder / 'cells'}")
    answered: list[Answer] = []
    names = {run: group for group, run in runs.values()}
    commands = {name: command(data, sizes, own) for name, own in options.items()}

    def answer(summary: Summary) -> Answer:
        answered.append(_answer(summary, commands, failed))
        return answered[-1]

    order = [*options, *BASELINES]
    folders = sorted(names, key=lambda run: order.index(names[run]))
    files: dict[str, Any] = {"json": folder / "results.json", "markdown": folder / "table.md"}
    described: dict[str, Any] = {"data": data.lines, **provenance()}
    summary = report(
        folders,
        folder / "report.html",
        **files,
        metric=METRICS[0],
        names=names,
        title=title,
        introduction=introduction,
        provenance=described,
        answer=answer,
    )
    told = answered[-1]
    winner = recommended(summary)
    return Comparison(folder, summary, told.sentences[0], told.sentences[1:], winner.name if winner else None, told.command, failed)


def recommended(summary: Summary) -> ConfigRow | None:
    """Of the trained methods that cannot be told from the best, the quickest; None where no training beats the model before it."""
    trained = [row for row in summary.ranked() if row.trained]
    if not trained:
        return None
    before = next((row for row in summary.rows if row.name == BEFORE and row.metrics), None)
    if before is not None and not _above(trained[0], before):
        return None
    tied = [row for row in trained if row is trained[0] or not _above(trained[0], row)]
    return min(tied, key=_seconds) if all(_seconds(row) < float("inf") for row in tied) and _comparable(tied) else tied[0]


def _above(first: ConfigRow, second: ConfigRow) -> bool:
    """By more than chance."""
    test = compared(first, second, METRICS[0])
    return test is not None and test["difference"] > 0 and significant(test)


def _seconds(row: ConfigRow) -> float:
    spread = row.measured("seconds")
    return float("inf") if spread is None else spread.mean


def _comparable(rows: Sequence[ConfigRow]) -> bool:
    return all((row.share_of_cores or 1.0) >= BUSY for row in rows)


def _answer(summary: Summary, commands: Mapping[str, str], failed: Sequence[str]) -> Answer:
    told = list(_sentences(summary))
    told += [f"Failed, and not in the table: {listed(list(failed))}."] if failed else []
    winner = recommended(summary)
    if winner is None:
        return Answer(told)
    return Answer(told, commands[winner.name], f"To train {winner.name} on all rows, those for testing included:")


def _sentences(summary: Summary) -> Iterator[str]:
    trained = [row for row in summary.ranked() if row.trained]
    baselines = [row for row in summary.ranked() if not row.trained]
    if not trained:
        yield "No method came to its end: there is nothing to recommend."
        return
    winner = recommended(summary)
    yield from _headline(trained, baselines, winner)
    chosen = winner or trained[0]
    for row in [*(row for row in trained if row is not chosen), *baselines]:
        if (test := compared(chosen, row, METRICS[0])) is not None:
            yield f"Against {row.name} ({_at(row)}): {told_test(test)}{'' if significant(test) else ': tied'}."
    yield from _cost(trained)
    if len(chosen.runs) == 1:
        yield "One seed: another may change a small difference. --seeds 1,2,3 tells more."


def _headline(trained: list[ConfigRow], baselines: list[ConfigRow], winner: ConfigRow | None) -> Iterator[str]:
    metric, best = METRICS[0], trained[0]
    if winner is None:
        yield f"Training does not pay here: {metric} is {_at(best)} with {best.name} and {_by_name(baselines, BEFORE)} before training."
        return
    gain = f"from {_by_name(baselines, BEFORE)} before training" if any(row.name == BEFORE for row in baselines) else ""
    words = next((row for row in baselines if row.name == WORDS), None)
    if words is not None and _above(words, winner):
        yield f"{WORDS} finds more than any trained model: {metric} {_at(words)}. Of the methods, use {winner.name}: {_at(winner)}, {gain}."
    else:
        yield f"Use {winner.name}: {metric} {_at(winner)}{', ' + gain if gain else ''}."
    tied = [row for row in trained if row is not winner and not _above(best, row)]
    if tied and _comparable([winner, *tied]) and _seconds(winner) < min(map(_seconds, tied)):
        yield f"It is tied with {listed([row.name for row in tied])}, and the quickest of them."


def _at(row: ConfigRow) -> str:
    return percent(row.metrics[METRICS[0]])


def _by_name(rows: Sequence[ConfigRow], name: str) -> str:
    return next((_at(row) for row in rows if row.name == name), "unknown")


def _cost(trained: Sequence[ConfigRow]) -> Iterator[str]:
    measure = memory_measure(trained)
    parts = []
    for row in trained:
        seconds, peak = row.measured("seconds"), row.measured(measure) if measure else None
        if seconds is not None:
            parts.append(f"{row.name} {duration(seconds.mean)}" + (f" and {size(peak.mean)}" if peak and measure != "bank_bytes" else ""))
    if parts:
        busy = "" if _comparable(trained) else " (the machine was busy: do not compare the times)"
        yield f"Training took {listed(parts)}{busy}."


def command(data: Prepared, sizes: Sizes, options: Mapping[str, Any]) -> str:
    """`contaccum train` with these fields, on every row; where small data were passed over in part, on all of it."""
    told = {**options, "data": data.folder, "model": _from_here(options["model"]), "split": ALL_SPLITS, "output": "runs/final"}
    told |= {"n_local": options["n_local"] or "auto", "warmup_updates": None, "limit": None}
    shown = [name for name in _ORDER if name in told] + sorted(set(told) - set(_ORDER) - set(_NOT_SHOWN))
    words = ["contaccum train"]
    for name in shown:
        value = told[name]
        if value == getattr(TrainConfig, name, None) and name not in ("method", "n_local", "n_total", "lr"):
            continue
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag} {shlex.quote(_word(value))}")
    return " ".join(words)


def _word(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _from_here(place: str) -> str:
    """A path below the present folder without what leads there, for a line that is read."""
    path = Path(place)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else place


_ORDER = ("data", "split", "model", "method", "tied", "pooling", "similarity", "n_total", "n_local", "memory", "epochs", "lr")
_NOT_SHOWN = ("dev", "dev_every", "dev_passages", "log_every", "save_every", "keep_checkpoints", "limit", "warmup_updates")
