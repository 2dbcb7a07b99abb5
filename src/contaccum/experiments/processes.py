"""Cells one after another in this process, or in several processes that each serve many (`contaccum.experiments.cell.serve`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from contaccum.experiments.cell import run_cell

Ended = tuple[str, bool, float]  # a cell's name, whether it came to its end, seconds


def in_this_process(cells: Sequence[tuple[str, Path]]) -> Iterator[Ended]:
    for name, folder in cells:
        begun = time.monotonic()
        try:
            run_cell(folder)
        except Exception:  # told at the end, like that of a process
            (folder / "cell.log").write_text(traceback.format_exc(), encoding="utf-8")
        yield name, (folder / "result.json").exists(), time.monotonic() - begun


def in_processes(cells: Sequence[tuple[str, Path]], jobs: int) -> Iterator[Ended]:
    waiting, ended = deque(cells), SimpleQueue[Ended]()
    servers = [Server() for _ in range(min(jobs, len(cells)))]

    def work(server: Server) -> None:
        while waiting:
            try:
                name, folder = waiting.popleft()
            except IndexError:  # another thread took the last
                return
            begun, good = time.monotonic(), False
            try:
                good = server.run(folder)
            except OSError as error:  # no process, or no log, can be had: the cell's failure, not the grid's
                _note(folder, f"could not run: {error}")
            ended.put((name, good, time.monotonic() - begun))

    threads = [threading.Thread(target=work, args=(server,), daemon=True) for server in servers]
    try:
        for thread in threads:
            thread.start()
        for _ in cells:
            yield ended.get()
    finally:
        waiting.clear()
        for server in servers:
            server.stop()


class Server:
    """A process that runs one cell after another; a new one where it died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, folder: Path) -> bool:
        """Whether the cell came to its end."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._start(folder)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(folder, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if answer != "done":  # it ends, by itself after a failed cell
            code = self.process.wait()
            if answer != "failed":
                _note(folder, f"the process ended with {code}" + (" (killed: out of memory?)" if code == -9 else ""))
        return answer == "done"

    def _start(self, folder: Path) -> subprocess.Popen[str]:
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        words = [sys.executable, "-m", "contaccum.experiments.cell"]
        with open(folder / "cell.log", "ab") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            return subprocess.Popen(words, text=True, env={**os.environ, **quiet}, **pipes)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def _note(folder: Path, line: str) -> None:
    with suppress(OSError), open(folder / "cell.log", "a", encoding="utf-8") as log:
        print(line, file=log)
