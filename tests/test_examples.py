"""The scripts in examples/ run, with a tiny model on tiny data."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

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
    told = json.loads(out.read_text())
    assert [row["loss"] for row in told["results"]] == LOSSES
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == LOSSES
    assert all(math.isfinite(row["NDCG@10"]) and 0 <= row["NDCG@10"] <= 1 for row in told["results"])
    assert [row["updates"] for row in told["results"]] == [2, 2, 2]  # 18 rows: two updates of 8
    assert told["provenance"]["seed"] == 42
