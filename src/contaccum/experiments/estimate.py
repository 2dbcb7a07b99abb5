"""`reproduce --dry-run`: the cells, and about how long they take on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from contaccum.experiments.grid import SCALES, Cell

if TYPE_CHECKING:
    from contaccum.experiments.runner import Request

ROUNDS = 3
FORWARD_SHARE = 1 / 3  # of a training pass, about, is the forward one: what encoding costs


def estimates(request: Request, cells: Sequence[Cell]) -> Iterator[str]:
    """A line per cell and one for all. Nothing is written but what the model's loading caches."""
    if all(cell.kind == "memory" for cell in cells):
        yield from (cell.name for cell in cells)
        yield f"{len(cells)} cells, seconds each"
        return
    rate, known = _samples_per_second(request), _sizes(request)
    total = 0.0
    for cell in cells:
        seconds = None if rate is None or known is None else _seconds(cell, request, rate, *known)
        total += seconds or 0.0
        yield f"{cell.name}" + ("" if seconds is None else f": about {_minutes(seconds)}")
    if rate is None:
        yield f"{len(cells)} cells; time not estimated: the model {request.model} cannot be read"
    elif known is None:
        yield f"{len(cells)} cells; time not estimated: the rows of {request.dataset} are known when it has been prepared"
    else:
        together = f" with {request.jobs} at a time, if they do not slow each other down" if request.jobs > 1 else ""
        yield f"{len(cells)} cells, about {_minutes(total / max(1, request.jobs))}{together}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _sizes(request: Request) -> tuple[int, int] | None:
    """(training rows, passages), where they can be known without preparing."""
    from contaccum.data.readers.collections import count_lines
    from contaccum.data.training_set import load_training_set
    from contaccum.experiments.datasets import DATASETS, HARVESTED

    if request.experiment == "speed":
        return 0, 0
    scale, form = SCALES[request.scale], DATASETS[request.dataset].form
    limit = dict(request.settings).get("limit", scale.rows)
    if form == "harvest":
        rows = scale.rows or HARVESTED
        return min(rows, limit or rows), rows
    if request.data is None or form != "beir":
        return None
    rows = len(load_training_set(request.data, "train", limit))
    return rows, scale.passages or count_lines(request.data)


def _seconds(cell: Cell, request: Request, rate: float, rows: int, passages: int) -> float:
    if cell.kind == "speed":
        options = cell.options
        return float(options["rounds"] * options["updates"] * len(options["ways"]) * options["n_total"] * (1 + FORWARD_SHARE) / rate)
    options = {**SCALES[request.scale].train, **dict(request.settings), **cell.options}
    passes = 1 + FORWARD_SHARE if options["method"].endswith("gradcache") else 1
    training = float(options.get("epochs", 40)) * rows * passes / rate
    return training + (passages * FORWARD_SHARE / (2 * rate) if cell.evaluated else 0.0)  # a sample has two texts


def _samples_per_second(request: Request) -> float | None:
    """Of this machine, measured on a few micro-batches of the smallest size; None where the model cannot be read."""
    from contaccum.experiments.bench import measure
    from contaccum.experiments.workloads import SIZES, Workload

    scale = SCALES[request.scale]
    size = _size_of(request.model) if request.model else scale.bench_model
    if size not in SIZES:
        return None
    longest = int(dict(request.settings).get("max_seq_length", scale.train["max_seq_length"]))
    queries, passages = scale.bench_tokens if request.experiment == "speed" else (longest, longest)
    negatives = int(request.experiment == "speed")
    work = Workload(n_total=scale.n, n_local=scale.n, bank=0, query_tokens=queries, passage_tokens=passages, hard_negatives=negatives)
    (row,) = measure(size, work, ["gradaccum"], rounds=1, updates=ROUNDS)
    return float(row["samples_per_second"])


def _size_of(model: str) -> str:
    """The nearest of our sizes, by layers and width."""
    from transformers import AutoConfig

    from contaccum.experiments.workloads import SIZES

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return ""
    work = config.num_hidden_layers * config.hidden_size**2
    return min(SIZES, key=lambda name: abs(SIZES[name][0] * SIZES[name][1] ** 2 - work))
