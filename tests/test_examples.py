"""The scripts in examples/ run, with a tiny model on tiny data."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from conftest import texts

SCRIPT = Path(__file__).parents[1] / "examples" / "compare_losses.py"
LOSSES = ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss", "ContAccumLoss"]


def small_beir(folder: Path, train: int = 18, test: int = 6) -> Path:
    """Learnable: a passage repeats its query's words."""
    (folder / "qrels").mkdir(parents=True)
    queries = texts(train + test)
    for name, prefix, times in (("queries", "q", 1), ("corpus", "d", 2)):
        lines = [json.dumps({"_id": f"{prefix}{i}", "text": " ".join([text] * times)}) + "\n" for i, text in enumerate(queries)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for split, numbers in (("train", range(train)), ("test", range(train, train + test))):
        lines = [f"q{i}\td{i}\t1\n" for i in numbers]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def test_compare_losses(model_folder: str, tmp_path: Path) -> None:
    data, out = small_beir(tmp_path / "beir"), tmp_path / "out.json"
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
