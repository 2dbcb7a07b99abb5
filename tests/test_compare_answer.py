"""What `compare` says first: which method to use, by how much, and no surer than the queries allow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.comparison.compare import BEFORE, WORDS
from contaccum.comparison.outcome import answer_of, recommended
from contaccum.report.folders import read_run_folder
from contaccum.report.rows import rows_of
from contaccum.report.summary import Summary, summarise
from contaccum.report.tables import legend, summary_table
from contaccum.report.terminal import show
from report_runs import make_data, make_run, rank_and_judge

COMMANDS = {name: f"train {name}" for name in ("gradaccum", "gradcache", "contaccum")}


def compared(tmp_path: Path, skills: dict[str, float], **summaries: dict[str, Any]) -> Summary:
    """Rows of these names that find the passage first so often; `summaries` change what a run says of itself."""
    data, names = make_data(tmp_path / "data"), {}
    for place, (name, skill) in enumerate(skills.items()):
        run = tmp_path / str(place)
        if name in (BEFORE, WORDS):
            run.mkdir()
        else:
            make_run(run, method=name)
            file = run / "summary.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | summaries.get(name, {})))
        rank_and_judge(run, data, skill)
        names[run] = name
    return summarise(rows_of([read_run_folder(run) for run in names], names), "MRR@10")


@pytest.mark.parametrize(
    ("skills", "headline", "winner"),
    [
        (
            {"gradaccum": 0.2, "contaccum": 0.9, BEFORE: 0.0},
            r"Use contaccum: MRR@10 \S+, \+\S+ against gradaccum, \S+ before training",
            "contaccum",
        ),
        (
            {"gradaccum": 0.2, "gradcache": 0.9, "contaccum": 0.9, BEFORE: 0.0},
            r"Use gradcache, the quickest of them: gradcache and contaccum are tied, MRR@10 \S+, \S+ before training\.",
            "gradcache",
        ),
        (
            {"contaccum": 0.5, BEFORE: 0.5},
            r"Keep the model as it is: on 30 test queries no training differs clearly from none\. MRR@10 \S+ before training, ",
            None,
        ),
        (
            {"contaccum": 0.1, BEFORE: 0.9},
            r"Keep the model as it is: training makes it worse here\. MRR@10 \S+ before training, \S+ with the best, contaccum\.",
            None,
        ),
        ({"contaccum": 0.5, BEFORE: 0.5, WORDS: 1.0}, r"BM25 finds most, 100\.0\. Keep the model as it is: on 30 test queries", None),
        ({"contaccum": 0.6, BEFORE: 0.0, WORDS: 1.0}, r"BM25 finds most, 100\.0\. Use contaccum: MRR@10", "contaccum"),
    ],
)
def test_the_headline_says_what_the_test_says(skills: dict[str, float], headline: str, winner: str | None, tmp_path: Path) -> None:
    summary = compared(tmp_path, skills)
    answer = answer_of(summary, COMMANDS, [])
    assert re.match(headline, answer.sentences[0]), answer.sentences[0]
    found = recommended(summary)
    assert (found.name if found else None) == winner
    assert answer.command is not None, "whoever wants to train can, whatever the answer"
    assert ("all the same" in answer.command_for) is (winner is None)
    assert any("may help: more rows, more --epochs, or another --lr" in sentence for sentence in answer.sentences) is (winner is None)


def test_where_nothing_is_gained_the_command_is_the_quickest_of_the_tied(tmp_path: Path) -> None:
    slow, quick = {"seconds": 90.0}, {"seconds": 9.0}
    skills = {"gradcache": 0.55, "contaccum": 0.5, BEFORE: 0.5}
    summary = compared(tmp_path, skills, gradcache=slow, contaccum=quick)
    assert recommended(summary) is None
    answer = answer_of(summary, COMMANDS, [])
    assert answer.command == "train contaccum"
    assert answer.command_for.startswith("To train all the same, by contaccum (the quickest of those that are tied), on all rows, ")


def test_a_collapsed_run_is_named_and_is_no_rival(tmp_path: Path) -> None:
    summary = compared(tmp_path, {"gradaccum": 0.9, "contaccum": 0.9, BEFORE: 0.3})
    row = next(row for row in summary.rows if row.name == "contaccum")
    for run in row.runs:
        assert run.evaluation is not None
        run.evaluation.metrics["MRR@10"] = 0.001
    answer = answer_of(summary, COMMANDS, [])
    assert answer.sentences[0].startswith("Use gradaccum: ")
    assert answer.sentences[1].startswith("contaccum collapsed in training, its figures say nothing of the method")
    assert not any("against contaccum" in sentence for sentence in answer.sentences)


def test_of_runs_on_a_busy_machine_none_is_called_the_quickest(tmp_path: Path) -> None:
    busy = {"cpu_seconds": 40.0, "threads": 1, "peak_bytes": None}
    summary = compared(tmp_path, {"gradcache": 0.9, "contaccum": 0.9, BEFORE: 0.0}, gradcache=busy, contaccum=busy)
    answer = answer_of(summary, COMMANDS, [])
    assert "Use gradcache, as good as any: gradcache and contaccum are tied" in answer.sentences[0]
    assert any("do not compare the times" in sentence for sentence in answer.sentences)


def test_equal_figures_have_the_same_mark_where_a_baseline_is_best(tmp_path: Path) -> None:
    summary = compared(tmp_path, {"gradcache": 0.5, "contaccum": 0.5, WORDS: 1.0})
    table = summary_table(summary)
    place = table.head.index("MRR@10")
    first, second, words = (line[place] for line in table.rows)
    assert words.best
    assert first.text == second.text
    assert (first.alike, second.alike) == (False, False)
    assert "That itself, what equals it as shown, and what is bold have no mark." in legend(summary)
    assert "Of other equal figures one may have it and one not: the test goes query by query." in legend(summary)


@pytest.mark.parametrize(("width", "shown"), [(200, True), (60, False)])
def test_a_narrow_terminal_shows_whole_figures(
    width: int, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = compared(tmp_path, {"gradcache": 0.5, "contaccum": 1.0, BEFORE: 0.2})
    for name, value in {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    show(summary.rows)
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(text in printed for text in ("method", "MRR@10", "100.0", "seconds", "MB", "before training"))
    assert ("no room for" not in printed) is shown
    assert max(len(line) for line in printed.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()) <= width
