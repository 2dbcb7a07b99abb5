"""`benchmarks/shared_grid.py`: each setting is computed once, by one process; what failed is tried again; a row a setting in the table."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmark_files import load_benchmark

GRID = load_benchmark("shared_grid")


@dataclass(frozen=True)
class Setting:
    name: str
    lr: float = 1.0
    seed: int = 0


def test_a_grid_is_computed_once_and_what_failed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [Setting("a"), Setting("a", seed=1), Setting("b", lr=2.0), Setting("broken")]
    (tmp_path / "grid.jsonl").write_text("".join(json.dumps(asdict(setting)) + "\n" for setting in settings))
    a = Namespace(grid=tmp_path / "grid.jsonl", output=tmp_path / "out.jsonl", processes=1, seconds=60.0, until=None)
    trained: list[Setting] = []

    def train(setting: Setting) -> dict[str, Any]:
        trained.append(setting)
        if setting.name == "broken":
            raise ValueError("of no use")
        return {"score": setting.lr + setting.seed}

    GRID.compute(a, Setting, lambda: train, lambda found: f"score {found['score']}")
    assert trained == settings
    assert "of no use" in capsys.readouterr().out
    GRID.compute(a, Setting, lambda: train, lambda found: "")
    assert trained[4:] == [Setting("broken")]
    GRID.compute(Namespace(**{**vars(a), "until": 2e9}), Setting, lambda: train, lambda found: "")
    assert trained[5:] == [], "another process has taken it"
    runs = GRID.runs_of([a.output, tmp_path / "missing.jsonl"])
    GRID.write_table(runs, Setting, lambda same: {"scores": [run["score"] for run in same]}, {"more": 1}, tmp_path / "table.json")
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["rows"] == [{"name": "a", "seeds": [0, 1], "scores": [1.0, 2.0]}, {"name": "b", "lr": 2.0, "seeds": [0], "scores": [2.0]}]
    assert table["defaults"] == {"lr": 1.0, "seed": 0}
    assert table["more"] == 1
