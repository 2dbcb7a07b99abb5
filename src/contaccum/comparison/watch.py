"""Cells in processes of their own, and one bar over all of them: updates, losses, samples a second, memory and time left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.experiments.processes import in_processes
from contaccum.training.logfile import read_log

EVERY = 1.0  # seconds between looks at the logs


class Work(NamedTuple):
    name: str
    folder: Path
    updates: int  # 0: nothing is trained


def run_all(work: Sequence[Work], jobs: int, n_total: int, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Run them, at most `jobs` at once; a line as each ends."""
    started, ended = time.monotonic(), 0
    with _Watch(work, n_total) as watch:
        for name, good, seconds in in_processes([(one.name, one.folder) for one in work], jobs, environment):
            ended += 1
            watch.end(name)
            text = f"[{ended}/{len(work)}] {'done' if good else 'FAILED'}: {name}, {seconds:.0f} s"
            watch.write(say, text)
    say(f"{len(work)} runs in {time.monotonic() - started:.0f} s")


class _Watch:
    """Reads the logs of the runs that go on."""

    def __init__(self, work: Sequence[Work], n_total: int) -> None:
        self.work, self.n_total = work, n_total
        self.ended: set[str] = set()
        self.bar: Any = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        from tqdm import tqdm

        total = sum(one.updates for one in self.work)
        self.bar = tqdm(total=total or None, unit="update", dynamic_ncols=True, disable=None)
        self.begun, self.first = time.monotonic(), self._done()
        if not self.bar.disable:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        self.bar.close()

    def end(self, name: str) -> None:
        self.ended.add(name)

    def write(self, say: Callable[[str], None], text: str) -> None:
        if self.bar.disable:
            say(text)
        else:
            self.bar.write(text, file=sys.stderr)

    def _done(self) -> int:
        return sum(len(read_log(_log(one))) for one in self.work if one.updates)

    def _look(self) -> None:
        while not self.over.wait(EVERY):
            losses, done = [], 0
            for one in self.work:
                lines = read_log(_log(one)) if one.updates else []
                done += len(lines)
                if one.name not in self.ended and (lines or _begun(one)):
                    losses.append(f"{one.name} {lines[-1]['loss']:.2f}" if lines else f"{one.name} starts")
            rate = (done - self.first) * self.n_total / (time.monotonic() - self.begun)
            self.bar.n = done
            self.bar.set_postfix_str(f"loss {', '.join(losses)}; {rate:.0f} samples/s{_memory()}" if losses else "", refresh=True)


def _log(one: Work) -> Path:
    return one.folder / "run" / "log.jsonl"


def _begun(one: Work) -> bool:
    return (one.folder / "cell.log").exists() and one.updates > 0


def _memory() -> str:
    """What is in use on the GPU, or of main memory; nothing where the system does not say."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        used = int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return ""
    return f"; {used / 1e6:.1f} GB in use"
