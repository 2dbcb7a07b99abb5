"""Every command killed at every file operation, and with the disk full from every file operation on; then given again.

    python benchmarks/crash_points.py                          # all commands, every point: hours on one core
    python benchmarks/crash_points.py train --every 10 --minutes 20 --json points.json

1. `file_faults.c`, loaded with LD_PRELOAD, sees each open, write, rename, removal, flush, ... below the output's folder, by Python,
   PyTorch, Arrow, SQLite or safetensors. An undisturbed run tells their number. Of consecutive writes to one file the first, the middle
   and the last are points; of the rest every operation.
2. A point: a process is forked, which runs the command and is ended there, a write being cut in half; or gets "no space left on device"
   from there on. A second process gives the same command again, or `train --resume`, with room.
3. Then all files are compared with those of the undisturbed run: the same names, weights, states, vectors and tables bit by bit, JSON
   without times, sizes of memory and provenance. Pages, figures and logs of what failed are compared by name.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("file_faults.c")
MODES = {"kill": 1, "full": 2}
OBSERVE, KILLED, REFUSED = 0, 77, 3
LIMIT = 900  # seconds of a process
WORDS = [f"w{number}" for number in range(60)]
BY_NAME = (".html", ".png", ".svg", ".md", ".bin")  # training_args.bin holds a date
VOLATILE = (
    *("seconds", "per_second", "runtime", "peak_bytes", "commit", "command", "provenance"),
    *("resumed_at_update", "_fingerprint", "notes", "verdict"),
)
# Of a cell that was ended; and an empty scratch folder with its lock, of a process that was killed when its work was done.
LEFT = ("cell.log", ".lock", ".run.part", ".data.part", "*.faiss.part")
# Of these only so much is compared. The trainer's own log averages losses since it began, log.jsonl does not.
VOLATILE_FILES = {"run.json": ("processes", "seed"), "trainer_state.json": ("global_step", "epoch", "best_metric", "best_global_step")}


class Command(NamedTuple):
    run: Callable[[Path, Path], None]  # (inputs, output); the same again where nothing else is said
    again: Callable[[Path, Path], None] | None = None


@dataclass
class Point:
    command: str
    mode: str
    number: int
    operation: str
    ended: str  # how the disturbed process did
    clear: bool  # whether a full disk was named as such
    problem: str | None  # None: the second process ended well, with the undisturbed run's files


# Inputs ------------------------------------------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> None:
    from contaccum.common.outputs import write_jsonl
    from contaccum.towers.dual_encoder import dual_encoder
    from contaccum.towers.random_encoder import write_encoder

    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    rows: list[dict[str, Any]] = [{"query": text(4), "positive": text(8), "negatives": [text(8), text(8)]} for _ in range(40)]
    write_jsonl(folder / "train.jsonl", rows[:32])
    write_jsonl(folder / "dev.jsonl", rows[32:])
    write_jsonl(folder / "corpus" / "passages.jsonl", ({"_id": f"d{number}", "text": text(8)} for number in range(60)))
    write_encoder(WORDS, folder / "encoder", vocabulary=80, width=16, layers=1, max_seq_length=16, seed=0)
    dual_encoder(str(folder / "encoder"), tied=True, pooling="mean", max_seq_length=16).save_pretrained(str(folder / "model"))
    passage = {"title": "", "passage_id": "1"}
    dpr = [
        {
            "question": row["query"],
            "answers": [row["query"].split()[0]],
            "positive_ctxs": [{**passage, "text": row["positive"]}],
            "hard_negative_ctxs": [{**passage, "text": negative} for negative in row["negatives"]],
        }
        for row in rows
    ]
    (folder / "dpr.json").write_text(json.dumps(dpr))
    beir = folder / "beir"
    write_jsonl(beir / "corpus.jsonl", ({"_id": f"d{number}", "title": "", "text": row["positive"]} for number, row in enumerate(rows)))
    write_jsonl(beir / "queries.jsonl", ({"_id": f"q{number}", "text": row["query"]} for number, row in enumerate(rows)))
    (beir / "qrels").mkdir()
    for split, numbers in {"train": range(32), "test": range(32, 40)}.items():
        lines = "".join(f"q{number}\td{number}\t1\n" for number in numbers)
        (beir / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
    _write_results(folder)


def _write_results(folder: Path) -> None:
    """What `search`, `evaluate --run` and `report` read: vectors, and two trained and judged runs."""
    from contaccum.retrieval import evaluate
    from contaccum.retrieval.encode import encode
    from contaccum.retrieval.search import search
    from contaccum.training.run import train

    model, beir, vectors = str(folder / "model"), folder / "beir", folder / "vectors"
    encode(model, beir, vectors / "passages", progress=False)
    encode(model, beir, vectors / "queries", queries=True, split="test", progress=False)
    search(vectors / "passages", vectors / "queries", folder / "found.trec", progress=False)
    for method in ("gradaccum", "contaccum"):
        run = folder / "runs" / method
        train(_config(folder, run, method=method, diagnose_every=1, checkpoints_at_end=False))
        evaluate(str(run / "model"), beir, output=run, progress=False)


# Commands ----------------------------------------------------------------------------------------------------------------------


def _config(inputs: Path, output: Path, **changes: Any) -> Any:
    from contaccum.methods.config import TrainConfig

    shape: dict[str, Any] = {"pooling": "mean", "similarity": "cosine", "tied": True, "max_seq_length": 16, "n_total": 8, "n_local": 4}
    schedule: dict[str, Any] = {
        "bank": 16,
        "lr": 3e-3,
        "epochs": 1.5,
        "save_every": 3,
        "keep_checkpoints": 1,
        "checkpoints_at_end": True,
        "log_every": 2,
    }
    folders: dict[str, Any] = {"data": str(inputs / "train.jsonl"), "model": str(inputs / "encoder"), "output": str(output)}
    dev: dict[str, Any] = {"dev": str(inputs / "dev.jsonl")} if "dev_every" in changes else {}
    return TrainConfig(**{**folders, **shape, **schedule, **dev, **changes})


def _trains(**changes: Any) -> Command:
    from contaccum.training.run import train

    def run(inputs: Path, output: Path) -> None:
        train(_config(inputs, output, **changes))

    def again(inputs: Path, output: Path) -> None:
        """As a user would: a run that is finished is left, one that has begun is resumed."""
        if not (output / "summary.json").exists():
            train(_config(inputs, output, **changes), resume=(output / "config.yaml").exists())

    return Command(run, again)


def _encode(inputs: Path, output: Path) -> None:
    from contaccum.retrieval.encode import encode

    encode(str(inputs / "model"), inputs / "corpus" / "passages.jsonl", output, shard_size=20, progress=False)


def _evaluate(inputs: Path, output: Path) -> None:
    from contaccum.retrieval import evaluate

    evaluate(str(inputs / "model"), inputs / "beir", output=output, progress=False)


def _evaluate_run(inputs: Path, output: Path) -> None:
    from contaccum.retrieval import evaluate

    evaluate(run=inputs / "found.trec", qrels=inputs / "beir", output=output / "evaluation.json")


def _search(inputs: Path, output: Path) -> None:
    from contaccum.retrieval.search import search

    vectors = inputs / "vectors"
    search(vectors / "passages", vectors / "queries", output / "found.trec", k=5, json_output=output / "found.json", progress=False)


def _search_index(inputs: Path, output: Path) -> None:
    """The index is kept beside the vectors, so that they are written too."""
    from contaccum.retrieval.search import search

    _encode(inputs, output / "passages")
    search(output / "passages", inputs / "vectors" / "queries", output / "found.trec", k=5, index="HNSW8", progress=False)


def _report(inputs: Path, output: Path) -> None:
    from contaccum.report.build import report

    runs = [inputs / "runs" / method for method in ("gradaccum", "contaccum")]
    report(runs, output / "report.html", json=output / "report.json", markdown=output / "report.md", compare=[(str(runs[0]), str(runs[1]))])


def _writes_new(run: Callable[[Path, Path], None]) -> Command:
    """A folder that is there is whole: the same command refuses it."""

    def again(inputs: Path, output: Path) -> None:
        if not output.exists():
            run(inputs, output)

    return Command(run, again)


def _mine(inputs: Path, output: Path) -> None:
    from contaccum.data.mine import mine

    mine(inputs / "train.jsonl", inputs / "corpus" / "passages.jsonl", output, per_query=2, depth=10)


def _prepare_dpr(inputs: Path, output: Path) -> None:
    from contaccum.data.prepare import prepare

    prepare(inputs / "dpr.json", output, hold_out=0.1)


def _prepare_beir(inputs: Path, output: Path) -> None:
    from contaccum.data.prepare import prepare

    prepare(inputs / "beir", output)


def _reproduce(inputs: Path, output: Path) -> None:
    from contaccum.experiments import grid, request, runner

    grid.SCALES["tiny"] = replace(grid.SCALES["tiny"], rows=24, queries=6, passages=20)
    cells = ("gradaccum, n = 2", "contaccum, n = 2")
    said: list[str] = []
    asked = request.Request("main", output, dataset="acl", data=inputs / "beir", scale="tiny", jobs=0, only=cells)
    if runner.reproduce(asked, say=said.append)["failed"]:
        raise RuntimeError(said[-1])


def _compare(inputs: Path, output: Path) -> None:
    from contaccum.comparison import compare, watch
    from contaccum.experiments.processes import in_this_process

    def here(work: Any, jobs: int, environment: Any) -> Any:
        return in_this_process(work)

    setattr(watch, "in_processes", here)  # noqa: B010  (the process that is killed does the work)
    sizes: dict[str, Any] = {"n_total": 8, "n_local": 4, "epochs": 1, "max_seq_length": 16, "minutes": 0}
    said: list[str] = []
    rows, model = inputs / "train.jsonl", str(inputs / "encoder")
    if compare.compare(rows, model=model, output=output, methods=["contaccum"], **sizes, say=said.append).failed:
        raise RuntimeError(said[-1])


def commands() -> dict[str, Command]:
    return {
        "train": _trains(),
        "train-dev": _trains(dev_every=2, epochs=1.0, save_every=2, hard_negatives=0),
        "encode": Command(_encode),
        "evaluate": Command(_evaluate),
        "evaluate-run": Command(_evaluate_run),
        "search": Command(_search),
        "search-index": Command(_search_index),
        "report": Command(_report),
        "mine": _writes_new(_mine),
        "prepare-dpr": _writes_new(_prepare_dpr),
        "prepare-beir": _writes_new(_prepare_beir),
        "reproduce": Command(_reproduce),
        "compare": Command(_compare),
    }


# What a folder holds -----------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, str]:
    """Name -> what is compared of it."""
    named = {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if not any(fnmatch(path.name, left) for left in LEFT)
    }
    return {name: _content(path) for name, path in named.items()}


def _content(path: Path) -> str:
    if path.is_dir() or path.suffix in BY_NAME:
        return ""
    if path.suffix in (".json", ".jsonl"):
        text = path.read_text()
        values: Any = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        if (kept := VOLATILE_FILES.get(path.name)) is not None:
            values = {name: values[name] for name in kept}
        return json.dumps(_lasting(values), sort_keys=True)
    if path.suffix in (".pt", ".pth"):
        import torch

        digest = hashlib.sha256()
        _digest(torch.load(path, weights_only=False), digest)
        return digest.hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lasting(one) for name, one in value.items() if not any(word in name for word in VOLATILE)}
    return [_lasting(one) for one in value] if isinstance(value, list) else value


def _digest(value: Any, digest: Any) -> None:
    if isinstance(value, dict):
        for name in value:
            digest.update(str(name).encode())
            _digest(value[name], digest)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _digest(one, digest)
    elif hasattr(value, "numpy"):
        digest.update(value.float().numpy().tobytes() if value.is_floating_point() else value.numpy().tobytes())
    else:
        digest.update(repr(value).encode())


# Processes ---------------------------------------------------------------------------------------------------------------------


class Bench:
    """One command in a scratch folder, whose paths are the same in every run."""

    def __init__(self, name: str, command: Command, inputs: Path, scratch: Path) -> None:
        self.name, self.command, self.inputs, self.scratch = name, command, inputs, scratch
        self.work = scratch / "work"
        self.journal, self.log = scratch / "journal", scratch / "log"
        self.faults = ctypes.CDLL(os.environ["LD_PRELOAD"])

    def fresh(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def fork(self, run: Callable[[Path, Path], None], mode: int, number: int) -> tuple[int, str]:
        """(exit code, the last line it said) of `run` in a process of its own."""
        self.log.write_text("")
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return code, lines[-1] if lines else ""
        self._in_child(run, mode, number)
        os._exit(1)  # not reached

    def _in_child(self, run: Callable[[Path, Path], None], mode: int, number: int) -> None:
        code = 1
        try:
            signal.alarm(LIMIT)
            log = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            journal = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if mode == OBSERVE else -1
            self.faults.file_faults_begin(str(self.work).encode(), mode, ctypes.c_long(number), journal)
            try:
                run(self.inputs, self.work / "run")
                code = 0
            except Exception as error:
                from contaccum.common.errors import is_full_disk

                code = REFUSED if is_full_disk(error) or "make room" in str(error) else 1
                traceback.print_exc()
            if mode == OBSERVE:
                (self.scratch / "modules").write_text("\n".join(sys.modules))
        finally:
            sys.stderr.flush()
            os._exit(code)

    def undisturbed(self) -> tuple[list[str], dict[str, str]]:
        """Its operations, and what it wrote. What it imported is imported here, so that no later process has to."""
        found: list[dict[str, str]] = []
        for _ in range(2):
            self.fresh()
            if self.fork(self.command.run, OBSERVE, 0)[0]:
                raise SystemExit(f"{self.name} does not run: {self.log.read_text()[-3000:]}")
            for name in (self.scratch / "modules").read_text().splitlines():
                if name not in sys.modules and not name.startswith("__"):
                    with suppress(Exception):  # some only exist inside a package that is imported
                        importlib.import_module(name)
            found.append(contents(self.work))
        gc.freeze()  # else each process's collections would copy all that was imported here
        if found[0] != found[1]:
            raise SystemExit(f"{self.name} differs from itself: {differing(*found)}")
        return self.journal.read_text().splitlines(), found[1]

    def point(self, mode: str, number: int, operation: str, expected: dict[str, str]) -> Point:
        self.fresh()
        code, said = self.fork(self.command.run, MODES[mode], number)
        ended = {0: "to its end", KILLED: "killed", REFUSED: "full disk"}.get(code, f"{code}: {said[:200]}")
        clear = mode == "kill" or code in (0, REFUSED)
        code, said = self.fork(self.command.again or self.command.run, OBSERVE, 0)
        problem = f"again: {code}: {said[:300]}" if code else differing(expected, contents(self.work))
        return Point(self.name, mode, number, operation, ended, clear, problem)


def differing(expected: dict[str, str], found: dict[str, str]) -> str | None:
    names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    how = [("missing" if name not in found else "left behind" if name not in expected else "differs", name) for name in names]
    return "; ".join(f"{name} {what}" for what, name in how[:4]) or None


def chosen(operations: Sequence[str]) -> list[int]:
    """Numbers, from 1: the first, middle and last of consecutive writes to one file, and every other operation."""
    numbers: list[int] = []
    start = 0
    for end in range(1, len(operations) + 1):
        if end == len(operations) or operations[end] != operations[start]:
            numbers += sorted({start + 1, (start + 1 + end) // 2, end})
            start = end
    return numbers


def measure(name: str, every: int, minutes: float, modes: Sequence[str], inputs: Path, scratch: Path) -> tuple[int, list[Point]]:
    """Operations of the undisturbed run, and the points tried, in an order drawn by chance: where time is short they are a sample."""
    bench = Bench(name, commands()[name], inputs, scratch)
    operations, expected = bench.undisturbed()
    waiting = [(mode, number) for number in chosen(operations)[::every] for mode in modes]
    random.Random(0).shuffle(waiting)
    points: list[Point] = []
    started = time.monotonic()
    for mode, number in waiting:
        if time.monotonic() - started > 60 * minutes:
            break
        found = bench.point(mode, number, operations[number - 1].replace("\t", " "), expected)
        points.append(found)
        if found.problem or not found.clear:
            print(f"{name} {mode} {number} ({found.operation}): {found.ended}; {found.problem}", flush=True)
    equal = sum(point.problem is None for point in points)
    print(f"{name}: {len(operations)} operations, {len(points)} points, {equal} equal, {time.monotonic() - started:.0f} s", flush=True)
    return len(operations), points


def summary(points: Sequence[Point]) -> dict[str, dict[str, int]]:
    rows: dict[str, dict[str, int]] = {}
    for point in points:
        row = rows.setdefault(f"{point.command}, {point.mode}", {"points": 0, "equal": 0, "not_equal": 0, "unclear": 0})
        row["points"] += 1
        row["equal" if point.problem is None else "not_equal"] += 1
        row["unclear"] += not point.clear
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", help="default: all")
    parser.add_argument("--every", type=int, default=1, help="every so many points only")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for each command, at most")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crash-points-") as folder:
        if "LD_PRELOAD" not in os.environ:
            library = Path(folder) / "file_faults.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
            quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "LD_PRELOAD": str(library)}
            raise SystemExit(subprocess.run([sys.executable, *sys.argv], env={**os.environ, **quiet}).returncode)
        inputs = Path(folder) / "inputs"
        write_inputs(inputs)
        names = args.commands or commands()
        found = {name: measure(name, args.every, args.minutes, args.modes, inputs, Path(folder) / name) for name in names}
    from contaccum.common.outputs import write_json
    from contaccum.common.provenance import provenance

    points = [point for _, tried in found.values() for point in tried]
    rows = summary(points)
    print(json.dumps(rows, indent=1))
    if args.json:
        wrong = [vars(point) for point in points if point.problem is not None or not point.clear]
        write_json(
            args.json,
            {
                "provenance": provenance(0),
                "operations": {name: count for name, (count, _) in found.items()},
                "summary": rows,
                "not_equal_or_unclear": wrong,
            },
        )
    raise SystemExit(any(row["not_equal"] for row in rows.values()))


if __name__ == "__main__":
    main()
