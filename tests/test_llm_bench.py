"""`benchmarks/llm.py`: on a CPU it runs through, and what fits is judged by what was reserved."""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark_files import load_benchmark
from contaccum.experiments.workloads import Workload

WORK = Workload(n_total=4, bank=8, query_tokens=4, passage_tokens=8, hard_negatives=0)
LIMITS = [(24, "24B"), (11, "11B")]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_benchmark("llm")


def test_every_cell_is_measured_on_a_cpu(bench, tmp_path, monkeypatch) -> None:
    words = "--tiny --n-total 4 --n 1 4 --bank 8 --query-tokens 4 --passage-tokens 8"
    monkeypatch.setattr("sys.argv", ["llm.py", *words.split(), "--json", str(tmp_path / "out.json")])
    bench.main()
    content = json.loads((tmp_path / "out.json").read_text())
    assert 0 < content["gradient_error"] < 1e-5
    assert len(content["rows"]) == 2 * 2 * 2 * 2  # trained, checkpointing, n, loss
    assert all(row["failed"] is None and row["samples_per_second"] > 0 for row in content["rows"])
    assert {"commit", "command", "versions", "device", "seed"} <= content["provenance"].keys()


def test_a_wrong_loss_shows_in_the_gradients(bench, monkeypatch) -> None:
    naive = bench.naive_dual_bank_infonce
    monkeypatch.setattr(bench, "naive_dual_bank_infonce", lambda rows, columns, *past: naive(rows, columns, *past[:2], 19.0))
    assert bench.gradient_error("cpu") > 1e-3


CASES = {  # (reserved, allocated) in a cap of 24, in one of 11 -> what is said
    "little": ({24: (9, 8)}, {"24B": True, "11B": True}),
    "much": ({24: (20, 18)}, {"24B": True, "11B": False}),
    "more was reserved than needed": ({24: (14, 10), 11: (11, 10)}, {"24B": True, "11B": True}),
    "pieces do not fit": ({24: (14, 10), 11: None}, {"24B": True, "11B": False}),
    "too much": ({24: None}, {"24B": False, "11B": False}),
}


@pytest.mark.parametrize(("found", "fits"), CASES.values(), ids=CASES.keys())
def test_what_fits(bench, monkeypatch, found: dict[int, Any], fits: dict[str, bool]) -> None:
    held: list[int] = []

    def timed(*_: Any) -> dict[str, Any] | None:
        memory = found[held[-1]]
        return memory and {"seconds": 2.0, "samples_per_second": 2.0, "reserved_bytes": memory[0], "allocated_bytes": memory[1]}

    monkeypatch.setattr(bench, "limit_memory", held.append)
    monkeypatch.setattr(bench, "timed", timed)
    model = SimpleNamespace(parameters=lambda: [], device=torch.device("cuda"))
    row = bench.run_cell(model, bench.Cell(bench.ALL, False, 4, bench.OURS), WORK, LIMITS, has_time=True)
    assert row["fits"] == fits
    assert held == list(found), "run no more often than needed"
    assert row["reserved_bytes"] == (found[24] and found[24][0]), "figures are those of the largest cap"
    assert row["failed"] == (None if found[24] else "out of memory")


def test_cells_without_time_say_so(bench) -> None:
    model = SimpleNamespace(parameters=lambda: [], device=torch.device("cuda"))
    row = bench.run_cell(model, bench.Cell(bench.ALL, False, 4, bench.OURS), WORK, LIMITS, has_time=False)
    assert row["failed"] == "no time was left"
    assert row["seconds"] is None
