"""What commands print besides their results: one line for what is wrong, nothing of the libraries, nothing with --quiet."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from contaccum import __version__
from contaccum.cli import main
from contaccum.common import hub
from contaccum.common.console import hide_usual_load_reports

REPORT = """BertModel LOAD REPORT from: somewhere
Key                     | Status     |
------------------------+------------+-
{}
Notes:
- MISSING: those params were newly initialized"""


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["contaccum", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], monkeypatch) == 0
    assert capsys.readouterr().out == f"contaccum {__version__}\n"


def test_an_unexpected_error_is_one_line_and_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("contaccum.data.prepare.prepare", broken)
    assert run(["prepare", "a.csv", "--output", "b"], monkeypatch) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: unexpected KeyError: 'lost'; the traceback is in ")
    assert len(printed.splitlines()) == 1
    file = Path(printed.split(" is in ")[1].split(",")[0])
    assert "in broken" in file.read_text(encoding="utf-8")
    file.unlink()
    monkeypatch.setattr(sys, "argv", ["contaccum", "prepare", "a.csv", "--output", "b", "--debug"])
    with pytest.raises(KeyError, match="lost"):
        main()


def test_quiet_leaves_the_result_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"query": "q {i}", "positive": "p {i}"}}\n' for i in range(3)))
    assert run(["prepare", str(file), "--quiet", "--output", str(tmp_path / "out")], monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "train" in printed.out
    assert run(["--quiet", "prepare", str(tmp_path / "none.csv"), "--output", str(tmp_path / "other")], monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("weights", "shown"),
    [(["pooler.dense.weight | MISSING | "], False), (["encoder.layer.0.weight | MISSING | ", "pooler.bias | MISSING |"], True)],
)
def test_only_reports_of_weights_that_matter_are_shown(weights: list[str], shown: bool) -> None:
    hide_usual_load_reports()
    logger = logging.getLogger("transformers.modeling_utils")
    record = logger.makeRecord(logger.name, logging.WARNING, "f", 1, REPORT.format("\n".join(weights)), (), None)
    assert bool(logger.filter(record)) == shown


def test_without_a_network_the_hub_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(host: object, timeout: float) -> None:
        asked.append(host)
        raise TimeoutError

    monkeypatch.setattr(hub.socket, "create_connection", unreachable)
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror")
    hub.go_offline_without_network()
    assert not asked
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    hub.go_offline_without_network()
    assert asked == [hub.HOST]
    assert hub.os.environ["HF_HUB_OFFLINE"] == "1"
