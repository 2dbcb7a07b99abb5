"""A slice of the fuzz run: malformed inputs over all commands end in a line or a result, with nothing half written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resource", reason="processes are forked and limited as POSIX has it")

INPUTS = 30
SLOW = ("bench", "compare", "quickstart", "reproduce")


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import fuzz

    return fuzz


def test_malformed_inputs_end_in_a_line_or_a_result(fuzz: Any, tmp_path: Path) -> None:
    fuzzer, ended, number = fuzz.Fuzzer(tmp_path, seed=1), Counter[str](), 0
    while ended.total() < INPUTS:
        given = fuzzer.input(number)
        number += 1
        if given.start.command not in SLOW:
            found = fuzzer.run(given)
            assert found.how != "fault", (given.words, given.spoilt, found.why, found.errors)
            ended[found.how] += 1
    assert min(ended["refused"], ended["finished"]) > 2


@pytest.mark.parametrize(
    ("code", "errors", "how"),
    [
        (0, "", "finished"),
        (2, "note: x\nerror: y\n", "refused"),
        (1, "error: out of memory\n", "failed"),
        (1, "error: unexpected KeyError: 'x'; the traceback is in ...\n", "fault"),
        (2, "error: a\nb\n", "fault"),
        (2, "", "fault"),
        (1, "Traceback (most recent call last):\nerror: x", "fault"),
        (-11, "", "fault"),
        (None, "", "fault"),
    ],
)
def test_what_counts_as_a_fault(code: int | None, errors: str, how: str, fuzz: Any) -> None:
    assert fuzz.judged(code, errors)[0] == how


def test_what_is_half_written_is_a_fault(fuzz: Any, tmp_path: Path) -> None:
    fuzzer = fuzz.Fuzzer(tmp_path, seed=1)
    given = fuzzer.input(0)

    def left(name: str, content: str, how: str) -> str:
        before = fuzz.listing(fuzzer.folder.parent)
        file = fuzzer.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        return fuzzer.left(before, how)

    assert left("out/a.json", "{}", "finished") == ""
    assert left("out/b.json", "{}", "refused") == "refused, but written: inputs/out/b.json"
    assert left("out/c.json.7.part", "", "finished").startswith("left behind")
    assert left("../evil", "", "finished").startswith("left behind")
    assert left("out/d.json", "[NaN]", "finished") == "not finite: d.json"
    assert left("out/d.json", "[1", "finished").startswith("not JSON: d.json")
    assert given.words
