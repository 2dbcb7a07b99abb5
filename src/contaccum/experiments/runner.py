"""`reproduce`: the cells of an experiment, several processes at a time; then its table and figure.

OUTPUT holds `request.json` (what it is for: another request is refused), `data/` (prepared once), `cells/NAME/` (cell.json, cell.log,
result.json and the run folder), and of all that is finished `results.json`, `table.md` and the figure. Run again, finished cells are not
repeated and an interrupted one goes on from its last checkpoint; a cell that fails is reported and does not stop the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contaccum.common.inputs import read_object
from contaccum.common.lock import alone_in
from contaccum.common.outputs import (
    check_output,
    gone_if_refused,
    is_unused,
    read_if_whole,
    remove_parts,
    whole_path,
    write_json,
    write_text,
)
from contaccum.common.provenance import provenance
from contaccum.experiments import pretrain
from contaccum.experiments.datasets import Ready, check_source, corpus_texts, ready
from contaccum.experiments.grid import DATASETS, SCALES, Cell, Experiment, Scale
from contaccum.experiments.processes import end_of, in_processes, in_this_process
from contaccum.experiments.request import EXPERIMENTS, Request, planned
from contaccum.experiments.tables import rows_of, table_of

RANDOM = "random"  # in place of a model: an encoder of random weights
SCRATCH = {"vocabulary": 2000, "width": 32, "layers": 1, "seed": 0}
LARGER_SCRATCH = {"vocabulary": 8192, "width": 64, "layers": 2, "seed": 0}


def reproduce(request: Request, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run what is missing and return the results: {"rows", "table", "failed", "files"}."""
    request.check()
    with alone_in(request.output):
        return _reproduced(request, say)


def _reproduced(request: Request, say: Callable[[str], None]) -> dict[str, Any]:
    experiment = EXPERIMENTS[request.experiment]
    cells = planned(request)
    folders = {cell.name: request.output / "cells" / cell.name for cell in cells}
    for cell in cells:
        _check_finished(cell, folders[cell.name], dict(request.settings))
    waiting = [cell for cell in cells if _result(folders[cell.name]) is None]
    if any(cell.trains for cell in waiting) and not (request.output / "data").exists():
        check_source(request.dataset, request.data)
    with gone_if_refused(request.output):
        _claim(request)
        remove_parts(request.output)
        base = _base(request, any(cell.trains for cell in waiting))
    say(f"{experiment.name} ({experiment.paper}): {len(cells)} cells, {len(cells) - len(waiting)} finished before")
    if waiting:
        for cell in waiting:
            _write_spec(cell, folders[cell.name], base)
        _run_all([(cell.name, folders[cell.name]) for cell in waiting], request.jobs, say)
    groups = [cell.group for cell in cells]  # a table's order, also where a group's first seed is missing
    results = [(cell, _result(folders[cell.name])) for cell in sorted(cells, key=lambda cell: groups.index(cell.group))]
    finished = [(cell, result) for cell, result in results if result is not None]
    failed = [cell.name for cell, result in results if result is None]
    for name in failed:
        say(f"failed: {name}; the end of {folders[name] / 'cell.log'}:\n{end_of(folders[name] / 'cell.log', 6)}")
    return {**_write(request, experiment, finished), "failed": failed}


def _claim(request: Request) -> None:
    """The folder is this request's; ValueError where it is another's."""
    file, wanted = request.output / "request.json", request.identity()
    if file.exists():
        before = read_object(file, "use another --output")
        if differing := [name for name in wanted if name in before and before[name] != wanted[name]]:
            name = differing[0]
            raise ValueError(f"{request.output} was begun with {name}={before.get(name)!r}, not {wanted[name]!r}; use another --output")
        return
    check_output(request.output)
    if not is_unused(request.output):
        raise ValueError(f"{request.output} is not empty and holds no experiment; use another --output")
    request.output.mkdir(parents=True, exist_ok=True)
    write_json(file, wanted)


def _check_finished(cell: Cell, folder: Path, settings: dict[str, Any]) -> None:
    """ValueError where a finished cell was computed with other options than are asked for now."""
    if _result(folder) is None:
        return
    before = read_object(folder / "cell.json", "delete the folder").get("options") or {}
    wanted = json.loads(json.dumps({**settings, **cell.options} if cell.trains else cell.options))
    for name, value in wanted.items():
        if before.get(name) != value:
            raise ValueError(f"{folder} was computed with {name}={before.get(name)!r}, not {value!r}; use another --output or delete it")


@dataclass(frozen=True)
class _Base:
    """What all cells of a request share."""

    data: Ready | None
    options: dict[str, Any]
    documents: Path | None = None  # to pre-train on
    fine_tuning: dict[str, Any] = field(default_factory=dict)


def _base(request: Request, trains: bool) -> _Base:
    if not trains:
        return _Base(None, {})
    scale, folder = SCALES[request.scale], request.output / "data"
    data = ready(request.dataset, request.data, folder, scale)
    options: dict[str, Any] = {**scale.train, "n_total": scale.n_total, "model": _model(request, data, folder, scale)}
    if request.scale == "paper":
        options["epochs"] = DATASETS[request.dataset].epochs
    if EXPERIMENTS[request.experiment].diagnosed:
        options["diagnose_every"] = scale.diagnose_every
    if scale.rows is not None:
        options["limit"] = scale.rows
    options |= dict(request.settings)
    if request.experiment != pretrain.EXPERIMENT.name:
        return _Base(data, options)
    return _Base(data, options, _documents(data, folder), pretrain.fine_tuning(scale))


def _documents(data: Ready, folder: Path) -> Path:
    from contaccum.data.prepare import prepare

    documents = folder / "documents"
    if not documents.exists():
        prepare(data.whole_collection, documents, unsupervised=pretrain.PAIRS)
    return documents


def _model(request: Request, data: Ready, folder: Path, scale: Scale) -> str:
    if request.model not in (None, RANDOM) or (request.model is None and request.scale != "tiny"):
        return request.model or "bert-base-uncased"
    from contaccum.towers.random_encoder import write_encoder

    encoder = folder / "encoder"
    if not encoder.exists():
        shape = SCRATCH if request.scale == "tiny" else LARGER_SCRATCH
        with whole_path(encoder) as part:
            write_encoder(corpus_texts(data, 10 * shape["vocabulary"]), part, max_seq_length=scale.train["max_seq_length"], **shape)
    return str(encoder)


def _write_spec(cell: Cell, folder: Path, base: _Base) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    options = {**base.options, **cell.options} if cell.trains else cell.options
    spec = {**asdict(cell), "options": options, "data": asdict(base.data) if cell.trains and base.data else None}
    if base.documents is not None:
        spec |= {"documents": str(base.documents), "fine_tuning": {**base.options, **base.fine_tuning}}
    write_json(folder / "cell.json", spec)


def _run_all(cells: Sequence[tuple[str, Path]], jobs: int, say: Callable[[str], None]) -> None:
    """At most `jobs` processes at once, or all in this one; a line as each ends."""
    started = time.monotonic()
    for ended, (name, good, seconds) in enumerate(in_processes(cells, jobs) if jobs else in_this_process(cells), start=1):
        left = (time.monotonic() - started) / ended * (len(cells) - ended)
        say(f"[{ended}/{len(cells)}] {'done' if good else 'FAILED'}: {name}, {seconds:.0f} s; about {left:.0f} s left")


def _result(folder: Path) -> dict[str, Any] | None:
    return read_if_whole(folder / "result.json")


def _write(request: Request, experiment: Experiment, finished: list[tuple[Cell, dict[str, Any]]]) -> dict[str, Any]:
    """results.json, table.md and the figure of what is finished."""
    if not finished:
        return {"rows": [], "table": [], "files": []}
    from contaccum.report.svg import save
    from contaccum.report.tables import as_markdown, plain_table

    rows = rows_of(finished)
    table = table_of(rows)
    document = {
        "experiment": experiment.name,
        "paper": experiment.paper,
        "request": {**asdict(request), "output": str(request.output), "data": request.data and request.data.name},
        "provenance": {**provenance(), "cells": sorted({str(result["provenance"]["commit"]) for _, result in finished})},
        "rows": rows,
    }
    write_json(request.output / "results.json", document)
    write_text(request.output / "table.md", as_markdown(plain_table(table)))
    metric = DATASETS[request.dataset].headline
    figure = experiment.draw(rows, metric)
    save(figure, request.output, experiment.name)
    files = ("results.json", "table.md", f"{experiment.name}.png", f"{experiment.name}.svg")
    return {"rows": rows, "table": table, "files": [request.output / name for name in files]}
