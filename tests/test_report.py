"""The whole report: page, exports and command; what is missing is said, what is wrong is refused."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.cli import main
from contaccum.report.build import as_text, report
from contaccum.report.numbers import percent_spread
from contaccum.report.summary import notes
from contaccum.report.verdict import verdict
from report_runs import make_data, make_run, rank_and_judge, two_methods

runs = pytest.fixture(two_methods)


def test_exports_hold_what_the_page_shows(runs: list[Path], tmp_path: Path) -> None:
    files = {"json": tmp_path / "out" / "r.json", "markdown": tmp_path / "out" / "t.md"}
    summary = report(runs, tmp_path / "out" / "r.html", **files, compare=[("contaccum", "gradaccum")])
    result = json.loads(files["json"].read_text())
    assert result["headline"] == "MRR@10"
    assert result["reference"] == "contaccum"
    assert [row["name"] for row in result["results"]] == ["gradaccum", "contaccum"]
    first = result["results"][0]
    assert first["seeds"] == [1, 2]
    assert first["metrics"] == summary.rows[0].metrics
    assert statistics.fmean(run["metrics"]["MRR@10"] for run in first["runs"]) == pytest.approx(first["metrics"]["MRR@10"])
    assert first["deviations"]["MRR@10"] == pytest.approx(statistics.stdev(run["metrics"]["MRR@10"] for run in first["runs"]))
    assert first["tests"]["MRR@10"] == pytest.approx(summary.tests["MRR@10"]["gradaccum"])
    assert result["pairs"][0]["tests"]["MRR@10"]["difference"] > 0
    assert result["differences"] == {"method": {"gradaccum": "gradaccum", "contaccum": "contaccum"}}
    assert result["verdict"] == verdict(summary)
    text = files["markdown"].read_text()
    assert text == as_text(summary)
    assert text.startswith(verdict(summary))
    best = percent_spread(summary.rows[1].metric("MRR@10"))
    assert re.search(rf"^\| contaccum \| 2 \| 7 \|.*\*\*{best}\*\*.*\|$", text, re.MULTILINE)
    assert "| method | gradaccum | contaccum |" in text
    plots_folder = tmp_path / "out" / "r-plots"
    assert {file.suffix for file in plots_folder.iterdir()} == {".png", ".svg"}
    assert len(list(plots_folder.iterdir())) == 28
    assert (plots_folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_runs_give_the_same_page(runs: list[Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        report(runs, tmp_path / name / "r.html")
    for file in (tmp_path / "a").rglob("*.*"):
        if file.is_file():
            assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes(), file.name


def test_a_run_of_log_and_config_alone_gives_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", finished=False)
    (run / "run.json").unlink()
    (run / "log.jsonl").write_text((run / "log.jsonl").read_text() + '{"update": 131, "lo')  # cut off
    summary = report([run], tmp_path / "r.html", json=tmp_path / "r.json", markdown=tmp_path / "t.md")
    assert "none was evaluated" in verdict(summary)
    assert list(notes(summary)) == ["contaccum: the run is not finished (updates so far: 130)."]
    page = (tmp_path / "r.html").read_text()
    assert "There is no query browser: no run was evaluated." in page
    assert page.count("<svg") == 1
    (run / "log.jsonl").write_text("")  # just begun
    report([run], tmp_path / "r.html")
    assert "<svg" not in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("lost", ["run", "collection", "run.json of one seed", "sources", "per_query", "seed"])
def test_what_is_missing_is_said_and_nothing_crashes(lost: str, runs: list[Path], tmp_path: Path) -> None:
    for run in runs:
        (run / "diagnostics.jsonl").unlink(), (run / "dev.jsonl").unlink()
    result = json.loads((runs[0] / "evaluation.json").read_text())
    reason = "There is no query browser: "
    if lost == "run":
        (runs[0] / "test.trec").unlink()
        reason += f"{runs[0] / 'test.trec'} does not exist"
    elif lost == "collection":
        (tmp_path / "data" / "corpus.jsonl").unlink()
        reason += "where the texts of"
    elif lost == "run.json of one seed":
        (runs[0] / "run.json").unlink()
        reason = 'id="data"'
    elif lost in ("sources", "per_query"):
        del result[lost]
        (runs[0] / "evaluation.json").write_text(json.dumps(result))
        reason = reason + "evaluation.json does not say which run file it judged" if lost == "sources" else 'id="data"'
    else:
        (runs[0] / "evaluation.json").unlink()
        reason = "gradaccum: 1 of 2 seeds is without evaluation."
    report(runs, tmp_path / "r.html", json=tmp_path / "r.json", markdown=tmp_path / "t.md")
    assert reason in (tmp_path / "r.html").read_text()


def _break(run: Path, file: str, text: str) -> Path:
    (run / file).write_text(text)
    return run


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (lambda run: run / "nothing", {}, r"nothing is not a folder; give run folders that contaccum train wrote"),
        (lambda run: run.parent, {}, r"is not a run folder: it has no config.yaml; give one that contaccum train wrote"),
        (lambda run: _break(run, "config.yaml", "a: ["), {}, r"config.yaml cannot be read as YAML"),
        (lambda run: _break(run, "config.yaml", "- 1"), {}, r"config.yaml must hold fields and values"),
        (lambda run: _break(run, "log.jsonl", "{}\n"), {}, r"log.jsonl holds a line without an 'update' and a 'loss'"),
        (lambda run: _break(run, "log.jsonl", '{"upd\n{"update": 1, "loss": 1}\n'), {}, r"log.jsonl, line 1: a JSON object is needed"),
        (lambda run: _break(run, "evaluation.json", "{"), {}, r"evaluation.json cannot be read as JSON"),
        (lambda run: _break(run, "evaluation.json", "[]"), {}, r"evaluation.json must hold a JSON object"),
        (
            lambda run: _break(run, "evaluation.json", '{"metrics": {"MRR": "x"}}'),
            {},
            r"holds no numbers between 0 and 1 under 'metrics' .*; write it with",
        ),
        (lambda run: _break(run, "summary.json", "3"), {}, r"summary.json must hold a JSON object"),
        (lambda run: run, {"metric": "BLEU"}, r"metric 'BLEU' is in no run's evaluation.json; there are NDCG@10"),
        (lambda run: run, {"baseline": "x"}, r"'x' is none of the runs; choose one of contaccum"),
        (lambda run: run, {"compare": [("contaccum", "y")]}, r"'y' is none of the runs"),
        (lambda run: run, {"compare": [("contaccum", "contaccum")]}, r"contaccum and contaccum are the same row of the table"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(spoil: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    rank_and_judge(run, make_data(tmp_path / "data"), 0.5)
    with pytest.raises(ValueError, match=message) as caught:
        report([spoil(run)], tmp_path / "r.html", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r.html").exists()


def test_runs_must_be_given_once_and_the_output_be_a_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with pytest.raises(ValueError, match="no run was given"):
        report([], tmp_path / "r.html")
    with pytest.raises(ValueError, match="was given twice"):
        report([run, tmp_path / "." / "a"], tmp_path / "r.html")
    with pytest.raises(ValueError, match="is a folder; give --output a file"):
        report([run], tmp_path)
    for name, option in (("r.json", "--json"), ("r.md", "--markdown")):
        with pytest.raises(ValueError, match=f"{name} would hold a page of HTML; give it as {option}, or --output another name"):
            report([run], tmp_path / name)
    log = (run / "log.jsonl").read_bytes()
    for output, more in ((run / "log.jsonl", {}), (tmp_path / "r.html", {"json": run / "log.jsonl"})):
        with pytest.raises(ValueError, match=r"log.jsonl is also read or written here and would be replaced"):
            report([run], output, **more)
    assert (run / "log.jsonl").read_bytes() == log
    bare = make_run(tmp_path / "b", method="gradaccum")
    rank_and_judge(run, make_data(tmp_path / "data"), 0.5)
    with pytest.raises(ValueError, match="baseline gradaccum has no evaluation by MRR@10"):
        report([run, bare], tmp_path / "r.html", baseline="gradaccum")


def test_the_command_line_writes_all_and_refuses_in_one_line(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["contaccum", "report", *map(str, runs), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    more = ["--output", "p.html", "--json", "r.json", "--markdown", "t.md", "--compare", "contaccum", str(runs[0])]
    more += ["--compare", "gradaccum", "contaccum", "--baseline", "gradaccum", "--metric", "NDCG@10"]
    code, result, _ = command(*more)
    assert code == 0
    assert "contaccum is best by NDCG@10" in result
    assert "Page: p.html" in result
    assert len(json.loads((tmp_path / "r.json").read_text())["pairs"]) == 2
    assert (tmp_path / "t.md").exists()
    for wrong, message in ((["--compare", "gradaccum"], "needs two runs"), (["--baseline", "x"], "'x' is none of the runs")):
        code, _, complaint = command(*wrong)
        assert code == 2
        (line,) = complaint.splitlines()
        assert line.startswith("error: ")
        assert message in line
