"""`compare`: which method to train with on your own data, by how much, how sure, and at what cost.

OUTPUT holds `request.json` (what was asked; another request is refused), `data/`, `start.json` (what the model is saved with),
`sizes.json`, `cells/NAME/` (a run each), and in the end `report.html`, `report-plots/`, `results.json` and `table.md`. Run again, what is
finished is not repeated, and what was interrupted goes on.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.common.console import without_loading_bars
from contaccum.common.errors import FailedRunsError, has_no_room
from contaccum.common.inputs import read_object
from contaccum.common.lock import alone_in
from contaccum.common.outputs import check_output, gone_if_refused, is_unused, read_if_whole, remove_parts, write_json
from contaccum.comparison.sizing import DEV_PASSAGES, POINTS, Sizes, check_rows, described, sizes
from contaccum.comparison.source import Columns, Prepared, prepared, smaller_collection
from contaccum.comparison.start import Start, start_of
from contaccum.comparison.watch import Work, run_all
from contaccum.experiments.datasets import Ready
from contaccum.experiments.grid import Cell, with_seeds
from contaccum.experiments.processes import end_of
from contaccum.methods.config import load_config
from contaccum.methods.recipes import recipe
from contaccum.methods.table import get_method, split_update

if TYPE_CHECKING:
    from contaccum.report.summary import Summary

METHODS = ("gradaccum", "gradcache", "contaccum")
METRICS = ("MRR@10", "NDCG@10", "Recall@1", "Recall@20", "Recall@100")
BEFORE, WORDS = "before training", "BM25"
CPU_MINUTES = 15.0
FIRST_ROWS = 64  # whose words the tokenizer must know
LONG = 500  # updates from which on a run has checkpoints


@dataclass(frozen=True)
class Comparison:
    """What the page shows."""

    output: Path
    summary: Summary
    headline: str
    details: list[str]
    winner: str | None  # the method to use; None where no training pays or none is finished
    command: str | None  # trains the winner, or where none pays the best, on everything
    command_for: str
    failed: list[str]
    training: list[str]  # what was trained on how much and how, in words

    @property
    def page(self) -> Path:
        return self.output / "report.html"

    def raise_failed(self) -> None:
        """FailedRunsError where a run has failed; what the others gave is here all the same."""
        if self.failed:
            raise FailedRunsError(f"failed: {', '.join(self.failed)}; why is in cell.log in {self.output / 'cells'}")

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("headline", "details", "winner", "command", "failed", "training")}
        return {**self.summary.as_json(), "metric": self.summary.headline, **fields, "page": str(self.page)}


def compare(
    data: str | Path,
    *,
    model: str = "",
    output: str | Path = "runs/compare",
    methods: Sequence[str] = METHODS,
    n_total: int | None = None,
    n_local: int | None = None,
    memory: str | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    max_seq_length: int | None = None,
    minutes: float | None = None,
    seeds: Sequence[int] = (42,),
    query_column: str | None = None,
    positive_column: str | None = None,
    negative_column: tuple[str, ...] = (),
    subset: str | None = None,
    settings: dict[str, Any] | None = None,
    configurations: dict[str, dict[str, Any]] | None = None,
    title: str = "Which method for this data?",
    introduction: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare training methods on your own data: same rows, same budget, judged by search. Interrupted, the same command goes on.

    Args:
        data: CSV, TSV, JSONL or Parquet of pairs, BEIR or DPR folder, prepared folder, or a data set's name on the hub
        model: encoder to start from, a folder or a name on the hub
        output: folder to write, or to go on with
        methods: of contaccum train, with commas between (default gradaccum,gradcache,contaccum)
        n_total: samples per update; left out: 128, fewer for few rows
        n_local: samples in memory at once; left out: 8, or with --memory what fits
        memory: hold the GPU's memory to this, as 11GB
        epochs: passes over the rows; left out: 1, up to 3 for few rows
        lr: peak learning rate; left out: 2e-5
        max_seq_length: tokens per text; left out: the model's, at most 128 on a CPU (64 where time is short) and 256 on a GPU
        minutes: for training and search on a CPU; more data than that allows are taken in part. 0: no limit (default 15)
        seeds: of each method, with commas between (default 42)
        query_column: column of the query; left out: guessed
        positive_column: column of the relevant passage; left out: guessed
        negative_column: column of hard negatives, repeatable; left out: guessed
        subset: configuration of a data set on the hub

    Also judged are the model before training and BM25. The result holds what the page shows. In Python, `settings` are further fields of
    a training configuration for all methods, and `configurations` (name -> fields) replace `methods`.
    """
    tell, seeds, settings = say or _to_stderr, list(dict.fromkeys(seeds)), settings or {}
    chosen = configurations or {name: {"method": name} for name in methods}
    base = _base(model, memory, lr, settings)
    request = {"data": _named(data), "model": _named(model), "seeds": list(seeds), "configurations": chosen, "base": base, "subset": subset}
    asked: dict[str, Any] = {"n_total": n_total, "n_local": n_local, "epochs": epochs, "max_seq_length": max_seq_length, "minutes": minutes}
    asked |= {name: settings[name] for name in asked if asked[name] is None and name in settings}
    columns = Columns(query_column, positive_column, tuple(negative_column))
    if not str(data):
        raise ValueError("no data to compare on: give a file, a folder or the name of a data set on the hub")
    _check(chosen, base, asked, memory, seeds)
    folder = Path(output)
    with alone_in(folder), without_loading_bars():
        with _claimed(folder, {**request, **asked, "columns": asdict(columns)}):
            found = prepared(data, folder / "data", columns, subset)
            for line in found.lines:
                tell(line)
            check_rows(found.rows, asked["n_total"], asked["n_local"])
            start = start_of(base["model"], folder / "start.json")
            base = {**base, **start.fields, **settings}
            size = _sizes(folder, found, base, start, [options["method"] for options in chosen.values()], len(seeds), asked)
            base["max_seq_length"] = size.tokens
            training = described(size, found, str(model), start.in_words(base), base["lr"], memory)
            training += [f"note: {start.remark}"] if start.remark else []
            for line in training:
                tell(line)
            options = {name: {**base, **_schedule(size, found), **own} for name, own in chosen.items()}
            for own in options.values():
                split_update(get_method(own["method"]), own["n_total"], own["n_local"] or 1)
        ready = _ready(found, size, folder)
        cells = _cells(options, base, seeds, ready)
        failed = _run(cells, folder, ready, size, found, tell)
        from contaccum.comparison.outcome import outcome

        runs = {cell.name: (cell.group, folder / "cells" / cell.name / "run") for cell in cells if cell.name not in failed}
        intro = _introduction(chosen) if introduction is None else introduction
        about = [f"{data}: {found.lines[-1]}", *(line.removeprefix("note: ") for line in training if not line.startswith("expected"))]
        whole = {"epochs": size.full_epochs, "max_seq_length": size.full_tokens}
        final = {name: {**own, **whole, **chosen[name]} for name, own in options.items()}
        return outcome(folder, runs, final, found, failed, title, intro, about)


def _introduction(chosen: dict[str, dict[str, Any]]) -> str:
    """For whoever reads the page first."""
    listed = "; ".join(f"{name}: {get_method(options['method']).summary}" for name, options in chosen.items())
    return (
        f"What was compared. {listed}. n_total is an update's samples, n_local those in memory at once. {BEFORE}: the model as it was. "
        f"{WORDS}: search by shared words, without a model. {METRICS[0]} is 100 where the relevant passage always comes first, and 0 where "
        "it is never among the first ten. Negatives are the passages that a query learns to be unlike, besides its own."
    )


def _named(place: str | Path) -> str:
    """A path in full, so that the same request from another folder is the same."""
    return str(Path(place).resolve()) if str(place) and Path(place).exists() else str(place)


def _base(model: str, memory: str | None, lr: float | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Fields of every run; what the model is saved with comes beside them."""
    base = {name: value for name, value in recipe("st").items() if name not in ("pooling", "epochs")}
    given = {name: value for name, value in {"model": _named(model), "lr": lr, "memory": memory}.items() if value is not None}
    return {**base, **given, **settings}


def _check(chosen: dict[str, Any], base: dict[str, Any], asked: dict[str, Any], memory: str | None, seeds: Sequence[int]) -> None:
    if not base["model"]:
        raise ValueError("no encoder to start from: give --model, a folder or a name on the hub")
    if not chosen or not seeds:
        raise ValueError("there must be a method and a seed; give --methods and --seeds, or leave them out")
    for options in chosen.values():
        get_method(options["method"])
    if (minutes := asked["minutes"]) is not None and not 0 <= minutes < float("inf"):
        raise ValueError(f"minutes={minutes} must be 0 (no limit) or more")
    given = {name: value for name, value in asked.items() if value is not None and name != "minutes"}
    for name, value in given.items():
        if not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{name}={value} must be above 0; leave it out for what fits the data")
    if memory is not None and not _gpu():
        raise ValueError(f"memory={memory} is a GPU's, and there is none here; leave it out, or give --n-local")
    for seed in seeds:
        load_config(None, {**base, **given, "data": "data", "output": "output", "seed": seed}).check()


@contextmanager
def _claimed(folder: Path, wanted: dict[str, Any]) -> Iterator[None]:
    """The folder is this request's; ValueError where it is another's. A request that cannot be met leaves nothing behind."""
    with gone_if_refused(folder):
        _claim(folder, wanted)
        remove_parts(folder)
        yield


def _claim(folder: Path, wanted: dict[str, Any]) -> None:
    file, wanted = folder / "request.json", json.loads(json.dumps(wanted))
    if file.exists():
        before = read_object(file, "use another --output")
        if differing := [name for name in wanted if before.get(name) != wanted[name] and not _adds(name, before.get(name), wanted[name])]:
            name, old, new = _difference(differing[0], before.get(differing[0]), wanted[differing[0]])
            raise ValueError(f"{folder} was begun with {name}={old!r}, not {new!r}; use another --output")
        if before != wanted:
            write_json(file, wanted)
        return
    check_output(folder)
    if not is_unused(folder):
        raise ValueError(f"{folder} is not empty and holds no comparison; use another --output")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, wanted)


def _difference(name: str, before: Any, wanted: Any) -> tuple[str, Any, Any]:
    """Of two objects the first field that differs, not all of both."""
    if not (isinstance(before, dict) and isinstance(wanted, dict)):
        return name, before, wanted
    inner = next(key for key in {**wanted, **before} if before.get(key) != wanted.get(key))
    return _difference(inner, before.get(inner), wanted.get(inner))


def _adds(name: str, before: Any, wanted: Any) -> bool:
    """Other seeds and methods are further runs; a configuration by the same name must stay."""
    if name == "seeds":
        return True
    return name == "configurations" and all(before.get(one, fields) == fields for one, fields in wanted.items())


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _tokens(model: str, start: Start) -> int:
    """The model's own limit, where it has one, but no more than is usual."""
    from contaccum.memory.prediction.towers import longest

    most = longest(model, None, 256)
    return min(most, start.tokens or most)


def _sizes(
    folder: Path, found: Prepared, base: dict[str, Any], start: Start, methods: Sequence[str], seeds: int, asked: dict[str, Any]
) -> Sizes:
    """Decided once: a comparison that goes on has the same."""
    file = folder / "sizes.json"
    if (stored := read_if_whole(file)) is not None:
        return Sizes(**stored)
    from contaccum.data.training_set import load_training_set
    from contaccum.experiments.baselines import untrained_model
    from contaccum.towers.loading import check_words

    minutes, full_tokens = asked["minutes"], asked["max_seq_length"] or _tokens(base["model"], start)
    tokens = asked["max_seq_length"] or min(full_tokens, 256 if _gpu() else 128)
    # Whatever is wrong with it is found before anything is trained. A GPU is left to the runs.
    model = untrained_model({**base, "max_seq_length": tokens}, "cpu")
    check_words(model, load_training_set(found.folder, "train", FIRST_ROWS)["query"][:])
    size = sizes(
        found,
        model,
        methods,
        seeds,
        n_total=asked["n_total"],
        n_local=0 if asked["n_local"] is None and base.get("memory") else asked["n_local"],
        epochs=asked["epochs"],
        tokens=tokens,
        full_tokens=full_tokens,
        fixed_tokens=asked["max_seq_length"] is not None,
        minutes=CPU_MINUTES if minutes is None else minutes or None,
    )
    write_json(file, asdict(size))
    return size


def _schedule(size: Sizes, found: Prepared) -> dict[str, Any]:
    updates = size.updates(found.rows)
    return {
        **{"n_total": size.n_total, "n_local": size.n_local, "epochs": size.epochs, "limit": size.limit},
        **{"warmup_updates": updates // 10, "save_every": LONG if updates > LONG else 0, "keep_checkpoints": 1},
        **{"log_every": max(1, min(10, updates // 20)), "dev_every": max(1, updates // POINTS), "dev_passages": DEV_PASSAGES},
    }


def _cells(options: dict[str, dict[str, Any]], base: dict[str, Any], seeds: Sequence[int], ready: Ready) -> list[Cell]:
    """The longest first, so that none is waited for alone; baselines last."""
    trained = [Cell(name, {**own, "dev": ready.collection}) for name, own in options.items()]
    trained.sort(key=lambda cell: not get_method(cell.options["method"]).cached)
    return [*with_seeds(trained, seeds), Cell(BEFORE, base, kind="untrained"), Cell(WORDS, {}, kind="bm25")]


def _ready(found: Prepared, size: Sizes, folder: Path) -> Ready:
    beir = str(found.beir if size.passages is None else smaller_collection(found, folder / "part", size.passages))
    return Ready(found.folder, beir, beir, "test", beir, "string", METRICS, False)


def _run(cells: Sequence[Cell], folder: Path, ready: Ready, size: Sizes, found: Prepared, say: Callable[[str], None]) -> list[str]:
    """Run what is missing; names of cells that failed."""
    work = []
    for cell in cells:
        place = folder / "cells" / cell.name
        if read_if_whole(place / "result.json") is None:
            write_json(place / "cell.json", {**asdict(cell), "data": asdict(ready)})
            work.append(Work(cell.name, place, size.updates(found.rows) if cell.kind == "train" else 0))
    if work:
        environment = {name: str(size.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        run_all(work, size.jobs, size.n_total, {**environment, "TOKENIZERS_PARALLELISM": "false"}, say)
    failed = [cell.name for cell in cells if read_if_whole(folder / "cells" / cell.name / "result.json") is None]
    for name in failed:
        log = folder / "cells" / name / "cell.log"
        say(f"failed: {name}; the end of {log}:\n{end_of(log, 4)}")
    if failed and has_no_room(folder):  # for their logs neither
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))
    return failed


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
