"""Cells one after another in this process, or several at a time, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path

from contaccum.common.outputs import read_if_whole
from contaccum.experiments.cell import explained, run_cell

Ended = tuple[str, bool, float]  # a cell's name, whether it came to its end, seconds


def in_this_process(cells: Sequence[tuple[str, Path]]) -> Iterator[Ended]:
    for name, folder in cells:
        yield _timed(_run_here, name, folder)


def in_processes(cells: Sequence[tuple[str, Path]], jobs: int, environment: Mapping[str, str] | None = None) -> Iterator[Ended]:
    pool, running = ThreadPoolExecutor(min(jobs, len(cells))), set[subprocess.Popen[bytes]]()
    run = partial(run_apart, environment=environment, running=running)
    try:
        for ended in as_completed([pool.submit(_timed, run, name, folder) for name, folder in cells]):
            yield ended.result()
    except BaseException:  # an interrupt, which may be to this process alone
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _timed(run: Callable[[Path], bool], name: str, folder: Path) -> Ended:
    begun = time.monotonic()
    return name, run(folder), time.monotonic() - begun


def _run_here(folder: Path) -> bool:
    try:
        run_cell(folder)
    except Exception as error:  # reported at the end, like that of a process
        _note(folder, explained(error))
    return read_if_whole(folder / "result.json") is not None


def run_apart(folder: Path, environment: Mapping[str, str] | None = None, running: set[subprocess.Popen[bytes]] | None = None) -> bool:
    """Run a cell in its own process, what it prints in its log; whether it came to its end. It is in `running` until then."""
    words = [sys.executable, "-m", "contaccum.experiments.cell", str(folder)]
    try:
        with open(folder / "cell.log", "ab") as log:
            own = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **(environment or {})}
            with subprocess.Popen(words, stdout=log, stderr=log, env=own) as process:
                held = set() if running is None else running
                held.add(process)
                code = process.wait()
                held.discard(process)
    except OSError as error:  # no process, or no log, can be had: the cell's failure, not the grid's
        _note(folder, f"could not run: {error}")
        return False
    if code < 0:
        _note(folder, f"the process ended with {code}" + (" (killed: out of memory?)" if code == -9 else ""))
    return code == 0


def end_of(log: Path, lines: int) -> str:
    """The last lines of a cell's log, indented."""
    found = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    empty = "it is empty: where nothing can be written to the disk, make room and give the same command again"
    return "\n".join(f"    {line}" for line in found[-lines:] or [empty])


def _note(folder: Path, line: str) -> None:
    with suppress(OSError), open(folder / "cell.log", "a", encoding="utf-8") as log:
        print(line, file=log)
