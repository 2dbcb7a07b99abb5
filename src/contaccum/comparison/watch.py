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
    with Watch(work, n_total) as watch:
        for name, good, seconds in in_processes([(one.name, one.folder) for one in work], jobs, environment):
            ended += 1
            watch.end(name)
            text = f"[{ended}/{len(work)}] {'done' if good else 'FAILED'}: {name}, {seconds:.0f} s"
            watch.write(say, text)
    say(f"{len(work)} runs in {time.monotonic() - started:.0f} s")


class Watch:
    """Reads the logs of the runs that go on."""

    def __init__(self, work: Sequence[Work], n_total: int) -> None:
        self.work, self.n_total = work, n_total
        self.ended: set[str] = set()
        self.bar: Any = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        from tqdm import tqdm

        total, self.begun = sum(one.updates for one in self.work), time.monotonic()
        self.stale = {one.name: _Stale.of(one) for one in self.work if one.updates}
        self.first = sum(stale.kept for stale in self.stale.values())
        self.bar = tqdm(total=total or None, initial=self.first, unit="update", dynamic_ncols=True, disable=None)
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

    def lines(self, one: Work) -> list[dict[str, Any]]:
        """Of the updates that are done. Until its run goes on, a log also has those that will be done again."""
        lines = read_log(_log(one)) if one.updates else []
        stale = self.stale.get(one.name)
        return lines[: stale.kept] if stale is not None and _changed(one) == stale.changed else lines

    def _look(self) -> None:
        while not self.over.wait(EVERY):
            losses, done = [], 0
            for one in self.work:
                lines = self.lines(one)
                done += len(lines)
                if one.name not in self.ended and (lines or _begun(one)):
                    losses.append(f"{one.name} {lines[-1]['loss']:.2f}" if lines else f"{one.name} starts")
            rate = (done - self.first) * self.n_total / (time.monotonic() - self.begun)
            self.bar.n = done
            self.bar.set_postfix_str(f"loss {', '.join(losses)}; {rate:.0f} samples/s{_memory()}" if losses else "", refresh=True)


class _Stale(NamedTuple):
    """A log that an interrupted try left."""

    changed: int | None  # when; None: there is none
    kept: int  # updates that are not done again: those before the newest checkpoint, all of a run that only was not judged

    @staticmethod
    def of(one: Work) -> _Stale:
        run, lines = one.folder / "run", len(read_log(_log(one)))
        if not lines or (run / "summary.json").exists():
            return _Stale(_changed(one), lines)
        from contaccum.adapters.checkpoint_folders import checkpoints_in, is_complete

        saved = [int(folder.name.rpartition("-")[2]) for folder in checkpoints_in(run / "checkpoints") if is_complete(folder)]
        return _Stale(_changed(one), min(lines, max(saved, default=0)))


def _changed(one: Work) -> int | None:
    return _log(one).stat().st_mtime_ns if _log(one).exists() else None


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
