"""The report's curves and bars: means over windows, bands over seeds, drawn as they were logged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.report import plots
from contaccum.report.build import report
from contaccum.report.figures import drawings
from contaccum.report.folders import read_run_folder
from contaccum.report.palette import STYLES, style
from contaccum.report.plots import Bar
from contaccum.report.rows import rows_of
from contaccum.report.series import Series, dev_curve, drift_curve, loss_curve, mass_curve, phase_seconds, ratio_curve, series
from contaccum.report.summary import notes
from report_runs import add_diagnostics, make_run, summary_of, two_methods, write_lines

runs = pytest.fixture(two_methods)


def test_sixteen_rows_are_told_apart() -> None:
    found = [style(slot) for slot in range(16)]
    assert tuple(found[:8]) == STYLES
    assert len({(one.light, one.line, one.marker) for one in found}) == 16
    assert all(old.line != new.line and old.marker != new.marker for old, new in zip(found[:8], found[8:], strict=True))


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
        *("quality", "time", "memory", "loss", "dev-ndcg-10", "dev-ndcg-10-time", "dev-mrr-10", "gradient-norm-ratio", "similarity-mass"),
        *("drift-passages", "drift-queries", "phases", "quality-by-memory", "dev-mrr-10-time"),
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


def test_a_loss_that_is_not_finite_is_left_out_and_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [1.0, math.nan, 3.0])
    summary = summary_of([run])
    assert loss_curve(summary.rows[0].runs[0]) == {1: 1.0, 3: 3.0}
    assert "contaccum: the loss of 1 updates is not finite; they are left out of the curve." in list(notes(summary))
    report([run], tmp_path / "r.html", json=tmp_path / "r.json")
    assert "NaN" not in (tmp_path / "r.json").read_text()


def test_more_rows_than_colours_are_still_drawn(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"r{i}", bank=i + 1) for i in range(11)]
    summary = report(folders, tmp_path / "r.html")
    assert len(summary.rows) == 11
