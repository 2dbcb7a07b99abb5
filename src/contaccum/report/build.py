"""`contaccum report`: run folders in; one page, its plots as files, and the same as JSON and Markdown out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

from contaccum.common.outputs import check_file, sole_path, write_text
from contaccum.report.figures import drawings
from contaccum.report.folders import read_run_folder
from contaccum.report.page import page
from contaccum.report.queries import query_browser
from contaccum.report.rows import rows_of
from contaccum.report.summary import Summary, notes, summarise
from contaccum.report.svg import save
from contaccum.report.tables import as_markdown, difference_tables, legend, pair_table, summary_table
from contaccum.report.verdict import Answer, sentences, verdict

RUN_FILES = ("config.yaml", "run.json", "log.jsonl", "diagnostics.jsonl", "dev.jsonl", "summary.json", "evaluation.json")
OTHER_OUTPUTS = {".json": "--json", ".md": "--markdown"}
TITLE = "Training runs compared"


def report(
    runs: Sequence[str | Path],
    output: str | Path = "report.html",
    *,
    json: str | Path | None = None,
    markdown: str | Path | None = None,
    metric: str | None = None,
    baseline: str | None = None,
    compare: Sequence[tuple[str, str]] = (),
    names: Mapping[Path, str] | None = None,
    title: str = TITLE,
    introduction: str = "",
    provenance: Mapping[str, Any] | None = None,
    answer: Callable[[Summary], Answer] | None = None,
) -> Summary:
    """Compare runs on one page: what happened, and which is better?

    Args:
        runs: folders that contaccum train wrote; those that differ only in seed become one row, with mean and deviation
        output: page to write; plots go to the folder OUTPUT-plots beside it
        json: also write the results as JSON
        markdown: also write the tables as Markdown
        metric: metric that ranks the runs (default: MRR@10, or another that all have)
        baseline: run folder, or name in the table, that all are tested against (default: the best)
        compare: two run folders, or names in the table, to compare by every metric; repeatable
        names: of rows, by the folder of their first run; None: made of the configuration
        introduction: plain text, below the verdict; a blank line begins a paragraph
        provenance: of the whole, besides that of each run
        answer: what the page says first, where it is not the verdict

    Returns what the page shows. The first pair of `compare` also opens its query browser.
    """
    folders = [Path(run) for run in runs]
    _check(folders, {"--output": output, "--json": json, "--markdown": markdown})
    rows = rows_of([read_run_folder(folder) for folder in folders], names)
    summary = summarise(rows, metric, baseline, compare)
    drawn = list(drawings(summary))
    plots = Path(output).with_name(f"{Path(output).stem}-plots")
    pictures = {drawing.name: save(drawing.figure, plots, drawing.name) for drawing in drawn}
    browser, reason = None, "" if summary.headline else "There is no query browser: no run was evaluated."
    if summary.headline is not None:
        try:
            browser = query_browser(rows, summary.headline)
        except (ValueError, OSError) as error:
            reason = f"There is no query browser: {error}."
    words = answer(summary) if answer else Answer(sentences(summary))
    _write(output, page(summary, drawn, pictures, browser, reason, title, introduction, provenance or {}, words))
    if json is not None:
        results = {"verdict": words.text(), **summary.as_json(), **({"provenance": dict(provenance)} if provenance else {})}
        _write(json, dumps(_finite(results), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if markdown is not None:
        _write(markdown, as_text(summary, words))
    return summary


def _write(file: str | Path, text: str) -> None:
    with sole_path(file) as part:
        write_text(part, text)


def as_text(summary: Summary, answer: Answer | None = None) -> str:
    """Verdict and tables as Markdown."""
    parts = [answer.text() if answer else verdict(summary), as_markdown(summary_table(summary)), legend(summary), *notes(summary)]
    for pair in summary.pairs:
        parts += [f"{pair.first.name} against {pair.second.name}:", as_markdown(pair_table(pair))]
    differing = difference_tables(summary.rows)
    parts += ["Differences of configuration:", *map(as_markdown, differing)] if differing else []
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _check(folders: Sequence[Path], outputs: Mapping[str, str | Path | None]) -> None:
    if not folders:
        raise ValueError("no run was given; give folders that contaccum train wrote")
    resolved = [os.path.realpath(folder) for folder in folders]
    if twice := next((folder for place, folder in enumerate(folders) if resolved[place] in resolved[:place]), None):
        raise ValueError(f"{twice} was given twice; give each run once")
    taken: list[str | Path | None] = [folder / name for folder in folders for name in RUN_FILES]
    if (asked := Path(outputs["--output"] or "")).suffix in OTHER_OUTPUTS:
        raise ValueError(f"{asked} would hold a page of HTML; give it as {OTHER_OUTPUTS[asked.suffix]}, or --output another name")
    for option, output in outputs.items():
        check_file(output, taken, option)
        taken.append(output)


def _finite(value: Any) -> Any:
    """The same with null for what JSON cannot hold, as the loss of a run that diverged."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
