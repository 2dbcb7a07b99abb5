"""The script and the notebook in examples/ run."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from conftest import texts, write_beir

SCRIPT = Path(__file__).parents[1] / "examples" / "compare_losses.py"
LOSSES = ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss", "ContAccumLoss"]


def test_compare_losses(model_folder: str, tmp_path: Path) -> None:
    queries, out = texts(24), tmp_path / "out.json"
    passages = [f"{text} {text}" for text in queries]  # learnable
    data = write_beir(tmp_path / "beir", queries, passages, train=range(18), test=range(18, 24))
    options = ["--data", data, "--model", model_folder, "--batch-size", 2, "--update-size", 8, "--json", out]
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [row["loss"] for row in result["results"]] == LOSSES
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == LOSSES
    assert all(math.isfinite(row["NDCG@10"]) and 0 <= row["NDCG@10"] <= 1 for row in result["results"])
    assert [row["updates"] for row in result["results"]] == [2, 2, 2]  # 18 rows: two updates of 8
    assert result["provenance"]["seed"] == 42


NOTEBOOK = Path(__file__).parents[1] / "examples" / "compare.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_small_shows_what_it_gave_and_names_what_exists() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(text) < 400_000
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 1  # reading rows prints nothing
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]) == 2
    pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(r"/(home|root|tmp|work|usr)/", pictures)
    imported = [node for cell in code_cells() for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, name.name) for node in imported if node.module.startswith("contaccum") for name in node.names]
    assert len(ours) >= 4
    for module, name in ours:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, on as many pairs as it says; a picture is a file that is there."""
    monkeypatch.chdir(tmp_path)
    shown: list[Path] = []
    display = types.ModuleType("IPython.display")
    display.Image = lambda filename, width: filename  # type: ignore[attr-defined]
    display.display = shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict[str, Any] = {}
    for cell in code_cells():
        exec(cell, names)
    assert names["found"].page.exists()
    assert len(shown) == 2
    assert all(file.exists() for file in shown)
