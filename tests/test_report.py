"""The report's data: rows over seeds, tests, curves, differences, exports; what is missing is said, what is wrong is refused."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.cli import main
from contaccum.errors import DataError
from contaccum.report import plots
from contaccum.report.build import as_text, report
from contaccum.report.figures import drawings
from contaccum.report.folders import read_run_folder
from contaccum.report.numbers import amount, duration, percent_spread, points, probability, size
from contaccum.report.plots import Bar
from contaccum.report.queries import choose, query_browser
from contaccum.report.rows import Spread, differences, rows_of
from contaccum.report.series import Series, dev_curve, drift_curve, loss_curve, mass_curve, phase_seconds, ratio_curve, series
from contaccum.report.summary import Summary, notes, summarise
from contaccum.report.tables import as_html, as_markdown, difference_table, pair_table, summary_table
from contaccum.report.verdict import verdict
from contaccum.retrieval.compare import paired_comparison
from contaccum.retrieval.evaluate import evaluate
from report_runs import QUERIES, add_diagnostics, make_data, make_run, rank_and_judge, two_methods, write_lines


def summary_of(folders: list[Path], **options: Any) -> Summary:
    return summarise(rows_of([read_run_folder(folder) for folder in folders]), **options)


def cells(table: Any, column: str) -> dict[str, Any]:
    return {line[0].text: line[table.head.index(column)] for line in table.rows}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return two_methods(tmp_path)


# Rows ----------------------------------------------------------------------------------------------------------------------


def test_runs_that_differ_only_in_seed_are_one_row(runs: list[Path]) -> None:
    summary = summary_of(runs)
    assert [(row.name, len(row.runs)) for row in summary.rows] == [("gradaccum", 2), ("contaccum", 2)]
    values = [json.loads((run / "evaluation.json").read_text())["metrics"]["MRR@10"] for run in runs[:2]]
    assert values[0] != values[1]
    spread = summary.rows[0].metric("MRR@10")
    assert spread == Spread(statistics.fmean(values), statistics.stdev(values), values)
    table = summary_table(summary)
    assert cells(table, "seeds")["gradaccum"].text == "2"
    assert cells(table, "MRR@10")["gradaccum"].text == f"{100 * spread.mean:.1f} ± {100 * statistics.stdev(values):.1f}"


def test_any_other_difference_makes_another_row_and_names_it(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"r{i}", bank=bank, seed=i, drift_correction=drift) for i, (bank, drift) in enumerate(((8, None), (9, "mean")))
    ]
    folders.append(make_run(tmp_path / "other", method="gradaccum"))
    rows = rows_of([read_run_folder(folder) for folder in folders])
    assert [row.name for row in rows] == ["contaccum (bank=8)", "contaccum (bank=9, drift_correction=mean)", "gradaccum"]
    towers = [make_run(tmp_path / f"t{tied}", tied=tied) for tied in (False, True)]
    assert [row.name for row in rows_of([read_run_folder(folder) for folder in towers])] == ["contaccum", "contaccum (tied)"]
    assert [row.name for row in rows_of([rows[0].runs[0]], {folders[0]: "ours"})] == ["ours"]
    long = [make_run(tmp_path / f"{name}-seed{seed}", data="x" * 60 + name, seed=seed) for name in ("first", "second") for seed in (1, 2)]
    assert [row.name for row in rows_of([read_run_folder(folder) for folder in long])] == ["first", "second"]
    same = [make_run(tmp_path / place / "run", data="x" * 60 + place) for place in ("a", "b")]
    assert [row.name for row in rows_of([read_run_folder(folder) for folder in same])] == ["run #1", "run #2"]


def test_only_the_fields_that_differ_are_listed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", lr=1e-4, seed=1), make_run(tmp_path / "b", lr=2e-5, seed=2, tied=True)]
    (folders[1] / "run.json").write_text(json.dumps({"commit": "def", "device": "a CPU", "versions": {"torch": "2.9"}}))
    rows = rows_of([read_run_folder(folder) for folder in folders])
    assert differences(rows) == {"tied": [False, True], "lr": [1e-4, 2e-5], "commit (run.json)": ["abc", "def"], "seed": ["1", "2"]}
    assert [[cell.text for cell in line] for line in difference_table(rows).rows][:2] == [["tied", "no", "yes"], ["lr", "0.0001", "2e-05"]]
    assert differences(rows[:1]) == {}


def test_a_field_that_an_older_run_lacks_is_at_its_default(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "old"), make_run(tmp_path / "new", seed=7)]
    config = (folders[0] / "config.yaml").read_text()
    (folders[0] / "config.yaml").write_text("".join(line for line in config.splitlines(keepends=True) if not line.startswith("lr:")))
    assert len(rows_of([read_run_folder(folder) for folder in folders])) == 1


# Tests ---------------------------------------------------------------------------------------------------------------------


def test_the_best_is_marked_and_the_test_is_paired_over_queries(runs: list[Path]) -> None:
    summary = summary_of(runs)
    evaluations = [json.loads((run / "evaluation.json").read_text())["per_query"]["MRR@10"] for run in runs]
    means = [{key: (one[key] + other[key]) / 2 for key in one} for one, other in (evaluations[:2], evaluations[2:])]
    wanted = paired_comparison(*means)
    assert summary.headline == "MRR@10"
    assert summary.tests["MRR@10"] == {"gradaccum": pytest.approx(wanted)}
    assert wanted["p_value"] < 1e-6
    table = summary_table(summary)
    assert {name: (cell.best, cell.alike) for name, cell in cells(table, "MRR@10").items()} == {
        "gradaccum": (False, False),
        "contaccum": (True, False),
    }
    assert {name: cell.text for name, cell in cells(table, "p (MRR@10)").items()} == {"gradaccum": "< 0.001", "contaccum": "reference"}


def test_a_difference_by_chance_is_said_to_be_none(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    folders = [make_run(tmp_path / name, method=name) for name in ("gradaccum", "contaccum", "prebatch")]
    for folder, skill, seed in zip(folders, (0.9, 0.9, 0.05), (1, 2, 3), strict=True):
        rank_and_judge(folder, data, skill, seed)
    summary = summary_of(folders)
    best, second = summary.ranked()[:2]
    assert {best.name, second.name} == {"gradaccum", "contaccum"}
    assert cells(summary_table(summary), "MRR@10")[second.name].alike
    told = verdict(summary)
    assert "not significant" in told
    assert f"do not tell which of {best.name} and {second.name} is better" in told
    assert "prebatch is significantly worse" in told
    assert "One seed each" in told
    assert "Against the baseline" not in told
    assert "Against the baseline prebatch: +" in verdict(summary_of(folders, baseline="prebatch"))


def test_a_baseline_is_what_all_are_tested_against(runs: list[Path]) -> None:
    for baseline in ("gradaccum", str(runs[0]), str(runs[1])):
        summary = summary_of(runs, baseline=baseline)
        assert list(summary.tests["NDCG@10"]) == ["contaccum"]
        assert summary.tests["NDCG@10"]["contaccum"]["difference"] > 0
        assert cells(summary_table(summary), "p (MRR@10)")["gradaccum"].text == "baseline"


def test_chosen_pairs_are_compared_by_every_metric(runs: list[Path]) -> None:
    summary = summary_of(runs, pairs=[("contaccum", str(runs[0])), ("gradaccum", "contaccum")])
    there, back = summary.pairs
    assert list(there.tests) == summary.metrics == ["NDCG@10", "Recall@100", "MRR@10", "MAP@100"]
    assert there.tests["MRR@10"]["difference"] == pytest.approx(-back.tests["MRR@10"]["difference"])
    table = pair_table(there)
    assert [line[0].text for line in table.rows] == summary.metrics
    assert cells(table, "difference")["MRR@10"].text == points(there.tests["MRR@10"]["difference"])


def test_runs_judged_on_other_queries_are_not_tested(runs: list[Path]) -> None:
    for run in runs[:2]:
        told = json.loads((run / "evaluation.json").read_text())
        told["per_query"] = {metric: {f"x{key}": value for key, value in values.items()} for metric, values in told["per_query"].items()}
        (run / "evaluation.json").write_text(json.dumps(told))
    summary = summary_of(runs, pairs=[("gradaccum", "contaccum")])
    assert summary.tests["MRR@10"] == {}
    assert summary.pairs[0].tests == {}
    assert "Nothing was tested" in verdict(summary)
    assert any("No test of gradaccum" in note for note in notes(summary))
    with pytest.raises(DataError, match="different queries"):
        query_browser(summary.rows, "MRR@10")


def test_the_verdict_is_made_of_the_figures(runs: list[Path]) -> None:
    summary = summary_of(runs, baseline=str(runs[0]))
    best, second = (row.metric("MRR@10") for row in summary.ranked())
    told = verdict(summary)
    assert told.startswith(
        f"contaccum is best by MRR@10: {percent_spread(best)} (2 seeds) against gradaccum's {percent_spread(second)} (2 seeds) ("
    )
    assert "p < 0.001 over 30 queries" in told
    assert "contaccum trained for 1 min 31 s, gradaccum for 1 min 31 s; peak memory was 2,500 MB against 2,500 MB." in told
    assert "One seed" not in told
    alone = verdict(summary_of(runs[:2]))
    assert alone == f"gradaccum reaches {percent_spread(second)} (2 seeds) by MRR@10 on 30 queries."


def test_figures_as_one_reads_them() -> None:
    assert [probability(p) for p in (0.0, 0.0004, 0.012, 0.0499, 0.2, 1.0)] == [
        *["p < 0.001"] * 2,
        "p = 0.012",
        "p = 0.050",
        "p = 0.20",
        "p = 1.00",
    ]
    assert [duration(s) for s in (8.06, 91.4, 3725)] == ["8.1 s", "1 min 31 s", "1 h 2 min"]
    assert [size(b) for b in (3.2e6, 717e6, 21.5e9)] == ["3.2 MB", "717 MB", "21.5 GB"]
    assert [amount(v) for v in (None, 7, 8.06, 91.4, 1234.5)] == ["–", "7", "8.1", "91", "1,234"]
    assert [points(v) for v in (0.04, -0.012)] == ["+4.0", "−1.2"]


# Curves --------------------------------------------------------------------------------------------------------------------


def test_curves_are_means_of_the_log(tmp_path: Path) -> None:
    losses = [4.0 - 0.1 * i for i in range(20)]
    run = read_run_folder(make_run(tmp_path / "a", losses))
    assert loss_curve(run, window=10) == {5.5: pytest.approx(3.55), 15.5: pytest.approx(2.55)}
    assert loss_curve(run) == {update: pytest.approx(loss) for update, loss in enumerate(losses, 1)}


def test_bands_span_the_seeds(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"s{seed}", [float(seed)] * 3, seed=seed) for seed in (1, 2, 6)]
    (one,) = series(rows_of([read_run_folder(folder) for folder in folders]), loss_curve)
    assert one == Series(0, "contaccum", [1, 2, 3], [3.0] * 3, [1.0] * 3, [6.0] * 3)


def test_diagnostics_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = read_run_folder(add_diagnostics(make_run(tmp_path / "a"), ratio=1.5))
    assert ratio_curve(run, window=60) == {30.5: 1.5, 90.5: 1.5}
    assert mass_curve(run) == {0.0: pytest.approx(50), 1.0: pytest.approx(30), 2.0: pytest.approx(10)}  # the second half
    assert drift_curve(run, "query") == {1.0: pytest.approx(0.9), 2.0: pytest.approx(0.8)}
    assert drift_curve(run, "passage") == {1.0: pytest.approx(0.8), 2.0: pytest.approx(0.6)}
    assert dev_curve(run, "NDCG@10") == {50: pytest.approx(25), 100: pytest.approx(30)}
    assert phase_seconds(rows_of([run])[0]) == pytest.approx({"forward": 0.5, "loss": 0.1, "backward": 1.0, "update": 0.2})


def test_plots_hold_their_data(runs: list[Path]) -> None:
    summary = summary_of(runs)
    drawn = {drawing.name: drawing for drawing in drawings(summary)}
    assert set(drawn) == {
        *("quality", "time", "memory", "loss", "dev-ndcg-10", "dev-mrr-10", "gradient-norm-ratio", "similarity-mass"),
        *("drift-passages", "drift-queries", "phases"),
    }
    lines = {name: [line for line in d.figure.axes[0].lines if not line.get_label().startswith("_")] for name, d in drawn.items()}
    assert [line.get_label() for line in lines["loss"]] == ["gradaccum", "contaccum"]
    wanted = loss_curve(summary.rows[0].runs[0])
    assert dict(zip(*lines["loss"][0].get_data(), strict=True)) == pytest.approx(wanted)
    assert set(lines["gradient-norm-ratio"][0].get_ydata()) == {2.5}  # mean of the seeds' 2 and 3
    assert list(lines["similarity-mass"][0].get_ydata()) == pytest.approx([50, 30, 10])
    assert list(lines["dev-mrr-10"][1].get_ydata()) == pytest.approx([15, 20])
    widths = {name: [patch.get_width() for patch in drawn[name].figure.axes[0].patches] for name in ("quality", "time", "memory", "phases")}
    assert widths["quality"] == pytest.approx([100 * row.metrics["MRR@10"] for row in summary.rows])
    assert widths["time"] == [91.0, 91.0]
    assert widths["memory"] == [2500.0, 2500.0]
    assert widths["phases"] == pytest.approx([0.5, 0.5, 0.1, 0.1, 1.0, 1.0, 0.2, 0.2])
    styles = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines["loss"]]
    assert all(a != b for a, b in zip(*styles, strict=True))  # apart in grey, too


def test_a_tied_tower_has_no_ratio_and_a_ratio_of_zero_no_logarithm(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write_lines(run / "diagnostics.jsonl", [{"update": 1, "both_grad_norm": 1.0, "grad_norm_ratio": None}, {"update": 2, "sim_mass": None}])
    assert "gradient-norm-ratio" not in {drawing.name for drawing in drawings(summary_of([run]))}
    write_lines(run / "diagnostics.jsonl", [{"update": 1, "grad_norm_ratio": 0.0}, {"update": 2, "grad_norm_ratio": 9.0}])
    assert "gradient-norm-ratio" not in {drawing.name for drawing in drawings(summary_of([run]))}


def test_bars_show_the_deviation() -> None:
    figure = plots.bars([Bar(0, "a", 20.0, 2.0), Bar(1, "b", 30.0)], "x", lambda value: f"{value:.0f}")
    (container,) = [c for c in figure.axes[0].containers if type(c).__name__ == "ErrorbarContainer"]
    ((start, end),) = [segment[:, 0] for segment in container.lines[2][0].get_segments()]
    assert (start, end) == (18.0, 22.0)


def test_a_loss_that_is_not_finite_is_left_out_and_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [1.0, math.nan, 3.0])
    summary = summary_of([run])
    assert loss_curve(summary.rows[0].runs[0]) == {1: 1.0, 3: 3.0}
    assert "contaccum: the loss of 1 updates is not finite; they are left out of the curve." in list(notes(summary))
    report([run], tmp_path / "r.html", json_output=tmp_path / "r.json")
    assert "NaN" not in (tmp_path / "r.json").read_text()


# Queries -------------------------------------------------------------------------------------------------------------------


def test_the_queries_that_differ_most_are_chosen_and_some_by_chance() -> None:
    first, second = {f"q{i}": i / 1000 for i in range(900)}, {f"q{i}": 0.0 for i in range(900)}
    judged, chosen = choose([first, second], by_difference=40, at_random=10)
    assert judged == 900
    assert [key for key, drawn in chosen.items() if not drawn] == [f"q{i}" for i in range(899, 859, -1)]
    assert sum(chosen.values()) == 10
    assert list(chosen.values())[:10] == [False] * 4 + [True] + [False] * 4 + [True]
    assert choose([first, second], 40, 10) == (judged, chosen)
    assert sum(choose([first], 40, 10)[1].values()) == 50  # one run differs from none


def test_the_browser_holds_rankings_texts_and_ranks(runs: list[Path]) -> None:
    browser = query_browser(summary_of(runs).rows, "MRR@10")
    assert browser.runs == ["gradaccum, seed 1", "gradaccum, seed 2", "contaccum, seed 1", "contaccum, seed 2"]
    assert browser.judged == len(browser.queries) == QUERIES
    assert "30 of 30 queries" in browser.told()
    ranked = {}
    for line in (runs[3] / "test.trec").read_text().splitlines():
        query, _, key, *_ = line.split()
        ranked.setdefault(query, []).append(key)
    values = json.loads((runs[3] / "evaluation.json").read_text())["per_query"]["MRR@10"]
    for entry in browser.queries:
        relevant, hits = f"d{entry['id'][1:]}", ranked[entry["id"]]
        assert entry["top"][3] == hits[:10]
        assert entry["values"][3] == values[entry["id"]]
        assert entry["wanted"] == [relevant]
        assert entry["relevant"] == [relevant]
        assert entry["first"][3] == entry["ranks"][3][0] == (hits.index(relevant) + 1 if relevant in hits else None)
        assert {key for keys in entry["top"] for key in keys} <= browser.texts.keys()
    assert all(len(text) <= 500 for _, text in browser.texts.values())
    assert max(len(text) for _, text in browser.texts.values()) == 500


def test_texts_stay_within_the_page(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contaccum.report.queries.BUDGET_BYTES", 12_000)
    browser = query_browser(summary_of(runs).rows, "MRR@10")
    assert 0 < len(browser.queries) < QUERIES
    assert len(json.dumps(browser.as_json(), ensure_ascii=False)) < 16_000
    assert f"{len(browser.queries)} of 30 queries" in browser.told()


def test_answers_decide_where_there_are_no_judgements(tmp_path: Path) -> None:
    passages = [{"id": f"p{i}", "text": f"The capital is {city}."} for i, city in enumerate(("Paris", "Rome", "Bonn"))]
    write_lines(tmp_path / "passages.jsonl", passages)
    queries = [
        {"id": "a", "question": "capital of Italy?", "answers": ["rome"]},
        {"id": "b", "question": "capital of Peru?", "answers": ["Lima"]},
    ]
    write_lines(tmp_path / "queries.jsonl", queries)
    run = make_run(tmp_path / "run")
    (run / "test.trec").write_text("".join(f"{q} Q0 p{i} {i + 1} {9 - i} t\n" for q in "ab" for i in range(3)))
    files = {"queries": tmp_path / "queries.jsonl", "collection": tmp_path / "passages.jsonl"}
    result = evaluate(run / "test.trec", **files, top=[1, 2], output=run / "evaluation.json")
    assert result["sources"] == {
        "run": str(run / "test.trec"),
        "qrels": None,
        **{k: str(v) for k, v in files.items()},
        "split": None,
        "match": "string",
    }
    browser = query_browser(summary_of([run]).rows, "Top@2")
    entries = {entry["id"]: entry for entry in browser.queries}
    assert (entries["a"]["relevant"], entries["a"]["first"], entries["a"]["answers"]) == (["p1"], [2], ["rome"])
    assert (entries["b"]["relevant"], entries["b"]["first"]) == ([], [None])
    assert browser.texts["p1"] == ("", "The capital is Rome.")


def test_the_retrievers_own_output_is_enough(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    record = {"id": "a", "question": "q?", "answers": ["Rome"], "ctxs": [{"id": "p1", "text": "It is Rome.", "score": "1"}]}
    (run / "found.json").write_text(json.dumps([record, record | {"id": "b"}]))
    evaluate(run / "found.json", top=[1], output=run / "evaluation.json")
    browser = query_browser(summary_of([run]).rows, "Top@1")
    assert [entry["first"] for entry in browser.queries] == [[1], [1]]
    assert browser.texts == {"p1": ("", "It is Rome.")}


def test_a_qrels_file_finds_the_texts_of_its_folder_or_those_given(tmp_path: Path) -> None:
    data, run = make_data(tmp_path / "data"), make_run(tmp_path / "run")
    rank_and_judge(run, data, 0.5)
    qrels = data / "qrels" / "test.tsv"
    evaluate(run / "test.trec", qrels=qrels, output=run / "evaluation.json")
    assert query_browser(summary_of([run]).rows, "MRR@10").judged == QUERIES
    alone = tmp_path / "judged.tsv"
    alone.write_text(qrels.read_text())
    evaluate(run / "test.trec", qrels=alone, output=run / "evaluation.json")
    with pytest.raises(DataError, match=r"where the texts of .* are is not known"):
        query_browser(summary_of([run]).rows, "MRR@10")
    texts = {"queries": data / "queries.jsonl", "collection": data / "corpus.jsonl"}  # queries without answers: only their texts are wanted
    evaluate(run / "test.trec", qrels=alone, **texts, output=run / "evaluation.json")
    assert query_browser(summary_of([run]).rows, "MRR@10").judged == QUERIES


# The whole -----------------------------------------------------------------------------------------------------------------


def test_exports_hold_what_the_page_shows(runs: list[Path], tmp_path: Path) -> None:
    files = {"json_output": tmp_path / "out" / "r.json", "markdown": tmp_path / "out" / "t.md"}
    summary = report(runs, tmp_path / "out" / "r.html", **files, compare=[("contaccum", "gradaccum")])
    told = json.loads(files["json_output"].read_text())
    assert told["headline"] == "MRR@10"
    assert told["reference"] == "contaccum"
    assert [row["name"] for row in told["results"]] == ["gradaccum", "contaccum"]
    first = told["results"][0]
    assert first["seeds"] == [1, 2]
    assert first["metrics"] == summary.rows[0].metrics
    assert statistics.fmean(run["metrics"]["MRR@10"] for run in first["runs"]) == pytest.approx(first["metrics"]["MRR@10"])
    assert first["deviations"]["MRR@10"] == pytest.approx(statistics.stdev(run["metrics"]["MRR@10"] for run in first["runs"]))
    assert first["tests"]["MRR@10"] == pytest.approx(summary.tests["MRR@10"]["gradaccum"])
    assert told["pairs"][0]["tests"]["MRR@10"]["difference"] > 0
    assert told["differences"] == {"method": {"gradaccum": "gradaccum", "contaccum": "contaccum"}}
    assert told["verdict"] == verdict(summary)
    text = files["markdown"].read_text()
    assert text == as_text(summary)
    assert text.startswith(verdict(summary))
    best = percent_spread(summary.rows[1].metric("MRR@10"))
    assert re.search(rf"^\| contaccum \| 2 \| 7 \|.*\*\*{best}\*\*.*\|$", text, re.MULTILINE)
    assert "| method | gradaccum | contaccum |" in text
    plots_folder = tmp_path / "out" / "r-plots"
    assert {file.suffix for file in plots_folder.iterdir()} == {".png", ".svg"}
    assert len(list(plots_folder.iterdir())) == 22
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
    summary = report([run], tmp_path / "r.html", json_output=tmp_path / "r.json", markdown=tmp_path / "t.md")
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
    told = json.loads((runs[0] / "evaluation.json").read_text())
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
        del told[lost]
        (runs[0] / "evaluation.json").write_text(json.dumps(told))
        reason = reason + "evaluation.json does not say which run file it judged" if lost == "sources" else 'id="data"'
    else:
        (runs[0] / "evaluation.json").unlink()
        reason = "gradaccum: 1 of 2 seeds is without evaluation."
    report(runs, tmp_path / "r.html", json_output=tmp_path / "r.json", markdown=tmp_path / "t.md")
    assert reason in (tmp_path / "r.html").read_text()


def test_time_of_a_resumed_run_is_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    told = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(told | {"resumed_at_update": 50}))
    summary = summary_of([run])
    assert cells(summary_table(summary), "seconds")["contaccum"].text == "–"
    assert any("resumed" in note for note in notes(summary))


def test_memory_of_different_measures_is_never_mixed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", method="gradaccum")]
    told = json.loads((folders[0] / "summary.json").read_text())
    (folders[0] / "summary.json").write_text(json.dumps(told | {"peak_bytes": None, "process_peak_bytes": 700_000_000}))
    assert {name: cell.text for name, cell in cells(summary_table(summary_of(folders)), "MB").items()} == {
        "contaccum": "–",
        "gradaccum": "2,500",
    }
    assert cells(summary_table(summary_of(folders[:1])), "MB")["contaccum"].text == "700"


def _break(run: Path, file: str, text: str) -> Path:
    (run / file).write_text(text)
    return run


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (lambda run: run / "nothing", {}, r"nothing is no folder; give run folders that contaccum train wrote"),
        (lambda run: run.parent, {}, r"is no run folder: it has no config.yaml; give one that contaccum train wrote"),
        (lambda run: _break(run, "config.yaml", "a: ["), {}, r"config.yaml cannot be read as YAML"),
        (lambda run: _break(run, "config.yaml", "- 1"), {}, r"config.yaml must hold fields and values"),
        (lambda run: _break(run, "log.jsonl", "{}\n"), {}, r"log.jsonl holds a line without 'update' and 'loss'"),
        (lambda run: _break(run, "log.jsonl", '{"upd\n{"update": 1, "loss": 1}\n'), {}, r"log.jsonl, line 1: a JSON object is needed"),
        (lambda run: _break(run, "evaluation.json", "{"), {}, r"evaluation.json cannot be read as JSON"),
        (lambda run: _break(run, "evaluation.json", "[]"), {}, r"evaluation.json must hold a JSON object"),
        (lambda run: _break(run, "evaluation.json", '{"metrics": {"MRR": "x"}}'), {}, r"holds no numbers under 'metrics'; write it with"),
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
    bare = make_run(tmp_path / "b", method="gradaccum")
    rank_and_judge(run, make_data(tmp_path / "data"), 0.5)
    with pytest.raises(ValueError, match="baseline gradaccum has no evaluation by MRR@10"):
        report([run, bare], tmp_path / "r.html", baseline="gradaccum")


def test_cells_are_escaped(tmp_path: Path) -> None:
    name = '<b>|"'
    summary = summarise(rows_of([read_run_folder(make_run(tmp_path / "a", method=name))]))
    table = summary_table(summary)
    assert "<b>" not in as_html(table, name)
    assert '\\|"' in as_markdown(table)


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
    code, told, _ = command(*more)
    assert code == 0
    assert "contaccum is best by NDCG@10" in told
    assert "Page: p.html" in told
    assert len(json.loads((tmp_path / "r.json").read_text())["pairs"]) == 2
    assert (tmp_path / "t.md").exists()
    for wrong, message in ((["--compare", "gradaccum"], "needs two runs"), (["--baseline", "x"], "'x' is none of the runs")):
        code, _, complaint = command(*wrong)
        assert code == 2
        (line,) = complaint.splitlines()
        assert line.startswith("error: ")
        assert message in line


def test_more_rows_than_colours_are_still_drawn(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"r{i}", bank=i + 1) for i in range(11)]
    summary = report(folders, tmp_path / "r.html")
    assert len(summary.rows) == 11
