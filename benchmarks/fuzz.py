"""Malformed inputs over all commands: each must end in one clear line or in a result, within a minute, with nothing half written.

    python benchmarks/fuzz.py --inputs 2000 --json results/fuzz-cpu.json
    python benchmarks/fuzz.py --inputs 300 --only train --keep faults       # what went wrong stays in the folder

An input is a command line that works (`fuzz_files.py`) with one or two files or options spoilt (`fuzz_mutations.py`). Its number and the
seed decide it. Each runs in a process forked from this one, so that nothing is imported again, and in a folder of its own. How it ended:

    refused      exit code 2 and one line that begins with "error:"; nothing was written
    finished     exit code 0; what was written is whole and all numbers in it are finite
    failed       exit code 1 with a line that says why: memory ran out, training diverged, or a cell of a grid, whose log is shown, failed
    fault        anything else: a traceback, a signal, an unexpected error, more than a line, a hang, or something half written
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with several threads cannot be forked
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from typer.main import get_command

import contaccum.cli
from contaccum.common.outputs import write_json
from contaccum.common.provenance import provenance
from contaccum.comparison import watch
from contaccum.experiments.processes import in_this_process
from fuzz_files import OUTPUT, STARTS, Start, make
from fuzz_mutations import WORKING, change_bytes, change_words, spoils_of

LIMIT_SECONDS = 60.0
MEMORY_BYTES = 8 * 2**30  # of address space
CRASHED = 70  # exit code of what left `main` other than by exiting
# Inputs of a start in a round; else 10. Some take long.
WEIGHTS = {"compare": 4, "quickstart": 1, "reproduce": 4, "bench": 2, "plan": 6, "train": 6, "report": 8}


@dataclass
class Input:
    number: int
    start: Start
    words: list[str]
    spoilt: list[str] = field(default_factory=list)  # what was done, in words

    @property
    def kind(self) -> str:
        return "+".join(sorted({entry.split()[0] for entry in self.spoilt}))


@dataclass
class Ended:
    how: str  # refused, finished, failed or fault
    why: str  # what kind of fault; else the last line
    seconds: float
    errors: str


class Row(NamedTuple):
    """Of one input, what is counted."""

    command: str
    kind: str
    how: str
    why: str
    seconds: float


class Share(NamedTuple):
    """The inputs of one process, and the file of their rows."""

    numbers: Sequence[int]
    file: Path

    def add(self, row: Row) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[Row]:
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return [Row(*json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", help="inputs of this command alone")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds that an input may take")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="copy the folders of faults here")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    numbers = range(args.first, args.first + args.inputs)
    with tempfile.TemporaryDirectory(prefix="contaccum-fuzz-") as scratch:
        shares = [Share(numbers[place :: args.processes], Path(scratch) / f"rows-{place}.jsonl") for place in range(args.processes)]
        running = {_begin(share, args): share for share in shares}
        while running:
            child, status = os.wait()
            share = running.pop(child)
            if status:  # killed, perhaps by what its input did: that counts as a fault, and the rest is done by another
                number = share.numbers[len(share.rows())]
                print(f"{number}: the process that ran it ended with {os.waitstatus_to_exitcode(status)}", flush=True)
                share.add(Row("unknown", "unknown", "fault", "lost process", 0.0))
                running[_begin(share, args)] = share
        rows = [row for share in shares for row in share.rows()]
    counts = counted(rows)
    print(json.dumps({name: counts[name] for name in ("inputs", "ended", "faults")}, indent=1))
    if args.json:
        write_json(args.json, {"provenance": provenance(args.seed), "limit_seconds": args.limit, **counts})
    sys.exit(1 if counts["faults"] else 0)


def _begin(share: Share, args: argparse.Namespace) -> int:
    """A process that runs what is left of a share and writes a row of each input."""
    if child := os.fork():
        return child
    code = CRASHED
    try:
        done = len(share.rows())
        fuzzer = Fuzzer(share.file.with_name(f"{share.file.name}-{done}"), args.seed, args.limit)
        for number in share.numbers[done:]:
            share.add(_reported(fuzzer, number, args))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _reported(fuzzer: Fuzzer, number: int, args: argparse.Namespace) -> Row:
    given = fuzzer.input(number, args.only)
    ended = fuzzer.run(given)
    if ended.how == "fault":
        print(f"{number}: {' '.join(given.words)}\n    {given.spoilt}\n    {ended.why}: {ended.errors[-600:]}", flush=True)
        if args.keep:
            shutil.copytree(fuzzer.folder, args.keep / str(number), symlinks=True)
    return Row(given.start.command, given.kind, ended.how, ended.why, ended.seconds)


def counted(rows: Sequence[Row]) -> dict[str, Any]:
    by_command: dict[str, Counter[str]] = {}
    by_kind: dict[str, Counter[str]] = {}
    for row in rows:
        by_command.setdefault(row.command, Counter())[row.how] += 1
        by_kind.setdefault(row.kind, Counter())[row.how] += 1
    return {
        "inputs": len(rows),
        "ended": dict(Counter(row.how for row in rows)),
        "faults": dict(Counter(row.why for row in rows if row.how == "fault")),
        "failed": dict(Counter(row.why[:60] for row in rows if row.how == "failed")),
        "longest_seconds": max(row.seconds for row in rows),
        "by_command": {name: dict(by_command[name]) for name in sorted(by_command)},
        "by_kind": {name: dict(by_kind[name]) for name in sorted(by_kind)},
    }


class Fuzzer:
    """Makes and runs inputs in a scratch folder."""

    def __init__(self, scratch: Path, seed: int, limit: float = LIMIT_SECONDS) -> None:
        self.seed, self.limit = seed, limit
        self.valid, self.folder = scratch / "valid", scratch / "work" / WORKING
        self.starts = [start for start in STARTS for _ in range(WEIGHTS.get(start.command, 10))]
        random.Random(seed).shuffle(self.starts)
        commands = get_command(contaccum.cli.app).commands  # type: ignore[attr-defined]
        self.options = {
            name: [option for p in command.params for option in p.opts if option[:2] == "--"] for name, command in commands.items()
        }
        self.valid.mkdir(parents=True)
        os.environ["CONTACCUM_COMMIT"] = "fuzz"  # spares a call of git for each input
        code, _, errors = self._apart(self.valid, lambda: _valid(self.valid))
        del os.environ["CONTACCUM_COMMIT"]
        if code:
            raise RuntimeError(f"the valid inputs could not be made: {errors}")

    def input(self, number: int, only: str | None = None) -> Input:
        """Input `number` in `folder`, spoilt."""
        chance = random.Random(f"{self.seed} {number}")
        starts = [start for start in self.starts if only in (None, start.command)]
        start = starts[number % len(starts)]
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        shutil.copytree(self.valid, self.folder)
        given = Input(number, start, list(start.words))
        for _ in range(chance.choice([1, 1, 1, 2])):
            if not start.files or chance.random() < 0.3:
                given.words = change_words(given.words, self.options[start.command], chance)
                given.spoilt.append("options")
            else:
                name = chance.choice(start.files)
                if (file := self.folder / name).is_file():
                    spoil = chance.choice(spoils_of(name))
                    try:
                        spoil(file, chance)
                    except Exception:  # spoilt before, so that it cannot be read
                        change_bytes(file, chance)
                    given.spoilt.append(f"{spoil.__name__} {name}")
        given.words = [word for word in given.words if "\0" not in word]  # which no shell can pass
        return given

    def run(self, given: Input) -> Ended:
        before = listing(self.folder.parent)
        code, seconds, errors = self._apart(self.folder, lambda: _command(given.words))
        how, why = judged(code, errors)
        if how != "fault" and (wrong := self.left(before, how)):
            how, why = "fault", wrong
        return Ended(how, why, seconds, errors)

    def _apart(self, folder: Path, run: Any) -> tuple[int | None, float, str]:
        """(exit code or None after the limit, seconds, stderr) of `run` in a process of its own with `folder` as its working folder."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            started = time.monotonic()
            if (child := os.fork()) == 0:
                _in_child(folder, output.fileno(), errors.fileno(), run)
            status = None
            while status is None and time.monotonic() - started < self.limit:
                time.sleep(0.005)
                found, ended = os.waitpid(child, os.WNOHANG)
                status = ended if found else None
            if status is None:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace")
            return None if status is None else os.waitstatus_to_exitcode(status), time.monotonic() - started, text

    def left(self, before: set[str], how: str) -> str:
        """What is wrong with what was written; nothing where all is well."""
        new = {name for name in listing(self.folder.parent) - before if not any(part in name for part in ALLOWED)}
        if strange := [name for name in new if re.search(r"\.part$|/\.[^/]*$|\.tmp", name) or "evil" in name.split("/", 1)[0]]:
            return f"left behind: {strange[0]}"
        if how == "refused" and new:
            return f"refused, but written: {sorted(new)[0]}"
        return next(_wrong(self.folder / OUTPUT), "") if how == "finished" else ""


def _valid(folder: Path) -> int:
    make(folder)
    return 0


ALLOWED = ("/__pycache__", "/.cache")


def _in_child(folder: Path, output: int, errors: int, run: Any) -> NoReturn:
    code = CRASHED
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _here(cells: Sequence[tuple[str, Path]], jobs: int, environment: object) -> Iterator[tuple[str, bool, float]]:
    """What `compare` does in processes, in this one."""
    return in_this_process(cells)


def _command(words: Sequence[str]) -> int:
    """The exit code of `contaccum WORDS`."""
    os.environ["CONTACCUM_COMMIT"] = "fuzz"
    sys.argv = ["contaccum", *words]
    watch.in_processes = _here  # type: ignore[assignment, attr-defined]
    torch.manual_seed(0)
    try:
        contaccum.cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return CRASHED


def judged(code: int | None, errors: str) -> tuple[str, str]:
    lines = errors.rstrip().splitlines()
    last = lines[-1] if lines else ""
    if code is None:
        return "fault", "hang"
    if code == 0:
        return "finished", ""
    if code < 0:
        return "fault", f"signal {-code}"
    if "Traceback (most recent call last)" in errors or code == CRASHED:
        return "fault", "traceback"
    if "error: unexpected" in errors:
        return "fault", "unexpected error"
    if code == 1 and (grid := next((line for line in lines if line.startswith("failed: ")), "")):
        return "failed", grid.partition(";")[0]
    if not last.startswith("error: "):
        return "fault", "more than a line" if any(line.startswith("error: ") for line in lines) else "no line"
    return ("refused" if code == 2 else "failed"), last


def listing(folder: Path) -> set[str]:
    return {str(Path(root).relative_to(folder) / name) for root, folders, files in os.walk(folder) for name in [*folders, *files]}


def _wrong(output: Path) -> Iterator[str]:
    """What is not whole or not finite in the results of a command that says that it has finished."""
    for file in sorted(path for path in output.rglob("*") if path.is_file()) if output.is_dir() else []:
        if file.suffix == ".json" and file.name not in ("tokenizer.json", "trainer_state.json"):
            try:
                values = list(_numbers(json.loads(file.read_text(encoding="utf-8"))))
            except ValueError as error:
                yield f"not JSON: {file.name} ({error})"
                return
            if any(value != value or value in (float("inf"), -float("inf")) for value in values):
                yield f"not finite: {file.name}"
        if file.suffix == ".trec" and (not (text := file.read_text(encoding="utf-8")) or " nan " in text or " inf " in text):
            yield f"empty or not finite: {file.name}"


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, float):
        yield value


if __name__ == "__main__":
    main()
