"""The report's tables: rows over seeds, paired tests, the verdict and its figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.common.errors import DataError
from contaccum.report.folders import read_run_folder
from contaccum.report.numbers import amount, duration, percent_spread, points, probability, size
from contaccum.report.queries import query_browser
from contaccum.report.rows import Spread, differences, rows_of
from contaccum.report.summary import notes, summarise
from contaccum.report.tables import as_html, as_markdown, difference_tables, pair_table, summary_table
from contaccum.report.verdict import verdict
from contaccum.retrieval.compare import paired_comparison
from report_runs import make_data, make_run, rank_and_judge, summary_of, two_methods

runs = pytest.fixture(two_methods)


def cells(table: Any, column: str) -> dict[str, Any]:
    return {line[0].text: line[table.head.index(column)] for line in table.rows}


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
    for name, result in (("same", ["same #1", "same #2"]), ("run", ["a", "b"])):  # cells of `reproduce` are named by the folder above
        same = [make_run(tmp_path / place / name, data="x" * 60 + place) for place in ("a", "b")]
        assert [row.name for row in rows_of([read_run_folder(folder) for folder in same])] == result


def test_only_the_fields_that_differ_are_listed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", lr=1e-4, seed=1), make_run(tmp_path / "b", lr=2e-5, seed=2, tied=True)]
    (folders[1] / "run.json").write_text(json.dumps({"commit": "def", "device": "a CPU", "versions": {"torch": "2.9"}}))
    rows = rows_of([read_run_folder(folder) for folder in folders])
    assert differences(rows) == {"tied": [False, True], "lr": [1e-4, 2e-5], "commit (run.json)": ["abc", "def"], "seed": ["1", "2"]}
    (table,) = difference_tables(rows)
    assert [[cell.text for cell in line] for line in table.rows][:2] == [["tied", "no", "yes"], ["lr", "0.0001", "2e-05"]]
    assert differences(rows[:1]) == {}
    assert difference_tables(rows[:1]) == []


def test_many_configurations_are_lines_of_tables_that_fit_a_page(tmp_path: Path) -> None:
    fields = ("n_total", "n_local", "bank", "epochs", "max_seq_length", "hard_negatives", "warmup_updates", "log_every", "save_every")
    folders = [make_run(tmp_path / f"run{i}", **dict.fromkeys(fields, i)) for i in range(1, 10)]
    rows = rows_of([read_run_folder(folder) for folder in folders])
    tables = difference_tables(rows)
    assert [len(table.head) for table in tables] == [1 + 8, 1 + 1]
    assert {name for table in tables for name in table.head} == {"run", *fields}
    for table in tables:
        assert [[cell.text for cell in line] for line in table.rows] == [
            [row.name, *[str(i)] * (len(table.head) - 1)] for i, row in enumerate(rows, 1)
        ]
    (across,) = difference_tables(rows[:8])
    assert across.head == ["field", *(row.name for row in rows[:8])]


def test_a_field_that_an_older_run_lacks_is_at_its_default(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "old"), make_run(tmp_path / "new", seed=7)]
    config = (folders[0] / "config.yaml").read_text()
    (folders[0] / "config.yaml").write_text("".join(line for line in config.splitlines(keepends=True) if not line.startswith("lr:")))
    assert len(rows_of([read_run_folder(folder) for folder in folders])) == 1


def test_time_of_a_resumed_run_is_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    result = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(result | {"resumed_at_update": 50}))
    summary = summary_of([run])
    assert cells(summary_table(summary), "seconds")["contaccum"].text == "–"
    assert any("resumed" in note for note in notes(summary))


def test_memory_of_different_measures_is_never_mixed(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", method="gradaccum")]
    result = json.loads((folders[0] / "summary.json").read_text())
    (folders[0] / "summary.json").write_text(json.dumps(result | {"peak_bytes": None, "process_peak_bytes": 700_000_000}))
    assert {name: cell.text for name, cell in cells(summary_table(summary_of(folders)), "MB").items()} == {
        "contaccum": "–",
        "gradaccum": "2,500",
    }
    assert cells(summary_table(summary_of(folders[:1])), "MB")["contaccum"].text == "700"


def test_cells_are_escaped(tmp_path: Path) -> None:
    name = '<b>|"'
    summary = summarise(rows_of([read_run_folder(make_run(tmp_path / "a", method=name))]))
    table = summary_table(summary)
    assert "<b>" not in as_html(table, name)
    assert '\\|"' in as_markdown(table)


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
    result = verdict(summary)
    assert "not significant" in result
    assert result.startswith(f"{best.name} and {second.name} are tied by MRR@10: ")
    assert "prebatch is significantly worse" in result
    assert "One seed each" in result
    assert "Against the baseline" not in result
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
        result = json.loads((run / "evaluation.json").read_text())
        result["per_query"] = {
            metric: {f"x{key}": value for key, value in values.items()} for metric, values in result["per_query"].items()
        }
        (run / "evaluation.json").write_text(json.dumps(result))
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
    result = verdict(summary)
    assert result.startswith(
        f"contaccum is best by MRR@10: {percent_spread(best)} (2 seeds) against gradaccum's {percent_spread(second)} (2 seeds). "
    )
    assert "p < 0.001 over 30 queries" in result
    assert "contaccum trained for 1 min 31 s, gradaccum for 1 min 31 s; peak memory was 2,500 MB against 2,500 MB." in result
    assert "One seed" not in result
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
