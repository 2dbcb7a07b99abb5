"""What a report says of baselines, of runs that collapsed, of ties, and of times that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.report.build import report
from contaccum.report.figures import drawings
from contaccum.report.folders import read_run_folder
from contaccum.report.queries import query_browser
from contaccum.report.summary import notes
from contaccum.report.tables import summary_table
from contaccum.report.verdict import sentences
from report_runs import QUERIES, add_diagnostics, make_data, make_run, rank_and_judge, summary_of


def baseline(folder: Path, data: Path, skill: float) -> Path:
    folder.mkdir()
    rank_and_judge(folder, data, skill)
    return folder


def test_a_model_that_was_not_trained_is_a_row_without_costs(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    runs = [make_run(tmp_path / name, method=name) for name in ("gradaccum", "contaccum")]
    for run in runs:
        rank_and_judge(run, data, 0.8)
    runs += [baseline(tmp_path / "before", data, 0.3), baseline(tmp_path / "BM25", data, 0.2)]
    summary = report(runs, tmp_path / "r.html")
    assert [row.name for row in summary.rows] == ["gradaccum", "contaccum", "before", "BM25"]
    assert [row.trained for row in summary.rows] == [True, True, False, False]
    table = summary_table(summary)
    assert [line[table.head.index("seconds")].text for line in table.rows] == ["91", "91", "–", "–"]
    assert summary.as_json()["differences"] == {"method": {"gradaccum": "gradaccum", "contaccum": "contaccum"}}
    assert not [note for note in notes(summary) if "not finished" in note]


def test_equal_figures_are_marked_alike_and_called_tied(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    runs = [make_run(tmp_path / name, method=name) for name in ("gradaccum", "contaccum")]
    for run in runs:
        rank_and_judge(run, data, 0.6)
    summary = summary_of(runs)
    headline, *_ = sentences(summary)
    assert headline.startswith("gradaccum and contaccum are tied by MRR@10: ")
    assert "against" not in headline
    for line in summary_table(summary).rows:
        assert all(cell.best and not cell.alike for cell in line[2:6])


def test_a_run_that_finds_nothing_is_named(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    good, bad = make_run(tmp_path / "a", method="gradcache"), make_run(tmp_path / "b", method="contaccum")
    rank_and_judge(good, data, 0.9)
    rank_and_judge(bad, data, 0.0)
    lines = (line.split() for line in (bad / "test.trec").read_text().splitlines())
    (bad / "test.trec").write_text("".join(f"{q} Q0 d59 1 1 test\n" for q in dict.fromkeys(words[0] for words in lines)))
    from contaccum.retrieval.run_metrics import evaluate_run

    evaluate_run(bad / "test.trec", qrels=data, output=bad / "evaluation.json")
    summary = summary_of([good, bad])
    assert [note.split(",")[0] for note in notes(summary)] == ["contaccum: collapsed"]
    assert any(sentence.startswith("contaccum collapsed in training") for sentence in sentences(summary))


@pytest.mark.parametrize(("cpu", "busy"), [(180.0, False), (100.0, True)])
def test_times_of_a_busy_machine_are_not_compared(cpu: float, busy: bool, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    runs = [make_run(tmp_path / name, method=name) for name in ("gradaccum", "contaccum")]
    for run, skill in zip(runs, (0.3, 0.9), strict=True):
        rank_and_judge(run, data, skill)
        summary = json.loads((run / "summary.json").read_text())
        result = {**summary, "peak_bytes": None, "process_peak_bytes": 10**9, "threads": 2, "cpu_seconds": cpu}  # of 2 x 91 s
        (run / "summary.json").write_text(json.dumps(result))
    summary = summary_of(runs)
    assert any("had 55% of its threads' time" in note for note in notes(summary)) == busy
    assert any("the times cannot be compared" in sentence for sentence in sentences(summary)) == busy


def test_curves_of_dev_quality_by_samples_and_by_time(tmp_path: Path) -> None:
    runs = [add_diagnostics(make_run(tmp_path / f"{total}", n_total=total)) for total in (64, 128)]
    drawn = {drawing.name: drawing for drawing in drawings(summary_of(runs))}
    samples = [list(line.get_xdata()) for line in drawn["dev-ndcg-10"].figure.axes[0].lines]
    assert samples == [[50 * 64, 100 * 64], [50 * 128, 100 * 128]]
    times = [list(line.get_xdata()) for line in drawn["dev-ndcg-10-time"].figure.axes[0].lines]
    assert times[0] == pytest.approx([91 * 50 / 130, 91 * 100 / 130])


def test_quality_by_memory_comes_first(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    runs = [make_run(tmp_path / name, method=name) for name in ("gradaccum", "contaccum")]
    for run, skill in zip(runs, (0.3, 0.9), strict=True):
        rank_and_judge(run, data, skill)
    first = next(drawings(summary_of([*runs, baseline(tmp_path / "before", data, 0.1)])))
    assert first.name == "quality-by-memory"
    assert [text.get_text() for text in first.figure.axes[0].texts] == ["before"]


def test_the_browser_ranks_equal_scores_as_the_metric_does(tmp_path: Path) -> None:
    """All scores equal: trec_eval orders by falling id. The rank shown then gives the metric shown."""
    data, run = make_data(tmp_path / "data"), make_run(tmp_path / "a")
    rank_and_judge(run, data, 0.5)
    lines = [line.split() for line in (run / "test.trec").read_text().splitlines()]
    (run / "test.trec").write_text("".join(" ".join([*words[:4], "1.0", words[5]]) + "\n" for words in lines))
    from contaccum.retrieval.run_metrics import evaluate_run

    evaluate_run(run / "test.trec", qrels=data, output=run / "evaluation.json", metrics=["MRR"])
    browser = query_browser(summary_of([run]).rows, "MRR")
    assert len(browser.queries) == QUERIES
    for query in browser.queries:
        (rank,), (value,) = query["first"], query["values"]
        assert value == pytest.approx(0.0 if rank is None else 1 / rank)


def test_a_folder_with_nothing_is_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config.yaml"):
        read_run_folder(tmp_path / "empty")
