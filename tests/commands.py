"""The command line in this process."""

from __future__ import annotations

import sys

import pytest

from contaccum.cli import main


class Commands:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def run(self, *words: object) -> tuple[int, str]:
        """(exit code, what it said on stderr)."""
        self.monkeypatch.setattr(sys, "argv", ["contaccum", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), self.capsys.readouterr().err

    def refused(self, *words: object, code: int = 2) -> str:
        """The one line of an error that the user can mend; nothing else went wrong."""
        found, said = self.run(*words)
        last = said.rstrip().splitlines()[-1]
        assert (found, last.startswith("error: ")) == (code, True), said
        assert "unexpected" not in last
        return last.removeprefix("error: ")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(monkeypatch, capsys)
