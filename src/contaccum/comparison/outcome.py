"""What a comparison came to: the page, and in words which method to use, by how much, how sure, at what cost, and the next command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contaccum.common.errors import FailedRunsError
from contaccum.common.options import as_options
from contaccum.common.provenance import provenance
from contaccum.comparison.compare import BEFORE, METRICS, WORDS, Comparison
from contaccum.comparison.source import Prepared
from contaccum.methods.config import TrainConfig
from contaccum.report.build import report
from contaccum.report.numbers import duration, percent, points, size
from contaccum.report.rows import ConfigRow, memory_measure
from contaccum.report.summary import BUSY, Summary, collapsed, compared, significant
from contaccum.report.verdict import Answer, listed, test_in_words

BASELINES = (BEFORE, WORDS)
ALL_SPLITS = "train+dev+test"


def outcome(
    folder: Path,
    runs: Mapping[str, tuple[str, Path]],
    options: Mapping[str, dict[str, Any]],
    data: Prepared,
    failed: list[str],
    title: str,
    introduction: str,
    training: list[str],
) -> Comparison:
    """`runs`: cell -> (method as the table shows it, run folder); `options`: method -> fields to train it with on everything; `training`:
    what was trained, in words."""
    if not runs:
        raise FailedRunsError(f"no run came to its end; why is in cell.log in {folder / 'cells'}")
    answered: list[Answer] = []
    names = {run: group for group, run in runs.values()}
    commands = {name: command(data, own, folder / "final") for name, own in options.items()}

    def answer(summary: Summary) -> Answer:
        answered.append(answer_of(summary, commands, failed))
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
        introduction="\n\n".join([*training, introduction]),
        provenance=described,
        answer=answer,
    )
    final = answered[-1]
    winner = recommended(summary)
    name = winner.name if winner else None
    return Comparison(folder, summary, final.sentences[0], final.sentences[1:], name, final.command, final.command_for, failed, training)


def recommended(summary: Summary) -> ConfigRow | None:
    """What to train with; None where no training clearly beats the model before it."""
    trained = _trained(summary)
    before = next((row for row in summary.rows if row.name == BEFORE and row.metrics), None)
    pays = bool(trained) and (before is None or _above(trained[0], before))
    return _quickest(trained) if pays else None


def _quickest(trained: Sequence[ConfigRow]) -> ConfigRow:
    """Of those that do not differ clearly from the best; the best where their times cannot be compared."""
    tied = _tied(trained)
    return min(tied, key=_seconds) if _comparable(tied) else tied[0]


def _trained(summary: Summary) -> list[ConfigRow]:
    """Those that came to something, best first."""
    return [row for row in summary.ranked() if row.trained and not collapsed(row, summary)]


def _tied(trained: Sequence[ConfigRow]) -> list[ConfigRow]:
    return [row for row in trained if row is trained[0] or not _above(trained[0], row)]


def _above(first: ConfigRow, second: ConfigRow) -> bool:
    """By more than chance."""
    test = compared(first, second, METRICS[0])
    return test is not None and test["difference"] > 0 and significant(test)


def _seconds(row: ConfigRow) -> float:
    spread = row.measured("seconds")
    return float("inf") if spread is None else spread.mean


def _comparable(rows: Sequence[ConfigRow]) -> bool:
    return all((row.share_of_cores or 1.0) >= BUSY and _seconds(row) < float("inf") for row in rows)


def answer_of(summary: Summary, commands: Mapping[str, str], failed: Sequence[str]) -> Answer:
    lines = list(_sentences(summary))
    lines += [f"Failed, and not in the table: {listed(list(failed))}."] if failed else []
    winner, trained = recommended(summary), _trained(summary)
    if not trained:
        return Answer(lines)
    chosen = _quickest(trained)
    tied = _tied(trained)
    quickest = " (the quickest of those that are tied)" if len(tied) > 1 and _comparable(tied) else ""
    to_train = f"To train {chosen.name}" if winner else f"To train all the same, by {chosen.name}{quickest},"
    return Answer(lines, commands[chosen.name], f"{to_train} on all rows, those for testing included:")


def _sentences(summary: Summary) -> Iterator[str]:
    trained, baselines = _trained(summary), [row for row in summary.ranked() if not row.trained]
    if lost := [row.name for row in summary.ranked() if collapsed(row, summary)]:
        its = "its" if len(lost) == 1 else "their"
        lost = [f"{listed(lost)} collapsed in training, {its} figures say nothing of the method: try a lower --lr."]
    if not trained:
        yield from lost or ["No method came to its end: there is nothing to recommend."]
        return
    winner, chosen = recommended(summary), _quickest(trained)
    yield _headline(trained, baselines, winner)
    if winner is None:
        yield "What may help: more rows, more --epochs, or another --lr. With more test queries smaller differences show."
    yield from lost
    for row in [*(row for row in trained if row is not chosen), *baselines]:
        if (test := compared(chosen, row, METRICS[0])) is not None:
            yield f"{chosen.name} against {row.name} ({_at(row)}): {test_in_words(test)}{'' if significant(test) else ': tied'}."
    yield from _cost(trained)
    if len(chosen.runs) == 1:
        first = chosen.runs[0].seed or 0
        yield f"One seed: another may change a small difference. The same with --seeds {first},{first + 1},{first + 2} adds two."


def _headline(trained: Sequence[ConfigRow], baselines: Sequence[ConfigRow], winner: ConfigRow | None) -> str:
    """Which to use, by how much it is above gradient accumulation and the model before training."""
    best, metric = trained[0], METRICS[0]
    by_name = {row.name: row for row in [*trained, *baselines]}
    before, words = by_name.get(BEFORE), by_name.get(WORDS)
    first = f"{WORDS} finds most, {_at(words)}. " if words is not None and _above(words, best) else ""
    if winner is None and before is not None:
        if _above(before, best):
            reason = "training makes it worse here"
        else:
            reason = f"on {len(best.per_query(metric)):,} test queries no training differs clearly from none"
        return f"{first}Keep the model as it is: {reason}. {metric} {_at(before)} before training, {_at(best)} with the best, {best.name}."
    assert winner is not None
    rise = "" if before is None else f", {_at(before)} before training"
    tied = _tied(trained)
    if len(tied) > 1:
        reason = "the quickest of them" if _comparable(tied) else "as good as any"
        names = listed([winner.name, *(row.name for row in tied if row is not winner)])
        return f"{first}Use {winner.name}, {reason}: {names} are tied, {metric} {_at(winner)}{rise}."
    plain = by_name.get("gradaccum")
    gain = "" if plain in (None, winner) else f", {points(best.metrics[metric] - plain.metrics[metric])} against gradaccum"
    return f"{first}Use {winner.name}: {metric} {_at(winner)}{gain}{rise}."


def _at(row: ConfigRow) -> str:
    return percent(row.metrics[METRICS[0]])


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


def command(data: Prepared, options: Mapping[str, Any], output: Path) -> str:
    """`contaccum train` with these fields, on every row, also where only a part was trained on."""
    fields = {**options, "data": data.folder, "model": _from_here(options["model"]), "split": ALL_SPLITS, "output": str(output)}
    fields |= {"n_local": options["n_local"] or "auto", "warmup_updates": None, "limit": None}
    shown = [name for name in _ORDER if name in fields] + sorted(set(fields) - set(_ORDER) - set(_NOT_SHOWN))
    always = ("method", "n_local", "n_total", "lr")
    chosen = {name: fields[name] for name in shown if name in always or fields[name] != getattr(TrainConfig, name, None)}
    return f"contaccum train {as_options(chosen)}"


def _from_here(place: str) -> str:
    """A path below the present folder without what leads there, for a line that is read."""
    path = Path(place)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else place


_ORDER = ("data", "split", "model", "method", "tied", "pooling", "similarity", "n_total", "n_local", "memory", "epochs", "lr")
_NOT_SHOWN = (
    *("dev", "dev_every", "dev_passages", "log_every", "save_every", "keep_checkpoints", "checkpoints_at_end"),
    *("limit", "warmup_updates"),
)
