"""How large a comparison is: samples of an update, passes, and on a CPU as much of the data as fits in the time.

A CPU's speed is measured: the model trains on a few pairs and encodes as many. Where all together is longer than the time there is, the
passes come down to one and texts to 64 tokens, then collection and training rows become a part.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from contaccum.comparison.source import Prepared
from contaccum.methods.table import get_method

FEWEST = 16  # rows to train on: an update of the smallest kind
FEW_UPDATES = 50  # below that, little is learnt
UPDATES = 100  # of an epoch, by smaller ones where rows are few; below that, data are used for more than one epoch ...
MOST_EPOCHS = 3  # ... but not more often than that
N_TOTAL, N_LOCAL = 128, 8
POINTS = 6  # of a learning curve
DEV_PASSAGES = 500  # searched for each, besides the relevant ones
PROBED = 32  # pairs
SHORT = 64  # tokens
FEWEST_ROWS, FEWEST_PASSAGES = 1000, 5000  # of a part
STARTING = 12.0  # seconds until a process trains


@dataclass(frozen=True)
class Sizes:
    n_total: int
    n_local: int  # 0: what fits in the memory
    epochs: float
    limit: int | None  # training rows; None: all
    passages: int | None  # of the collection besides those that are relevant; None: all
    tokens: int  # of a text
    jobs: int  # runs at once, each with so many threads
    threads: int
    expected_seconds: float | None  # None on a GPU, where nothing was measured
    full_epochs: float  # where there is time: what the recommended command trains with ...
    full_tokens: int  # ... at the model's usual length

    def updates(self, rows: int) -> int:
        return math.ceil(self.epochs * math.ceil(min(rows, self.limit or rows) / self.n_total))


class Speed(NamedTuple):
    """Seconds of a CPU."""

    trained: float  # a pair, forward and backward
    again: float  # a pair's further forward pass, which GradCache makes
    encoded: float  # a passage


def check_rows(rows: int, n_total: int | None, n_local: int | None) -> None:
    """ValueError where there are too few to train on."""
    if rows < FEWEST:
        raise ValueError(f"{rows} rows are left to train on, too few to compare methods; give {2 * FEWEST} or more")
    for name, samples in {"n_total": n_total, "n_local": n_local}.items():
        if samples is not None and samples > rows:
            raise ValueError(f"{name}={samples} is more than the {rows:,} rows to train on; use at most that many")


def sizes(
    data: Prepared,
    model: Any,
    methods: Sequence[str],
    seeds: int,
    *,
    n_total: int | None,
    n_local: int | None,
    epochs: float | None,
    tokens: int,
    full_tokens: int,
    fixed_tokens: bool,
    minutes: float | None,
) -> Sizes:
    """`model` is tried on a CPU."""
    import torch

    runs, gpu = len(methods) * seeds, torch.cuda.is_available()
    total = n_total or max(FEWEST, min(N_TOTAL, 2 ** int(math.log2(max(1, data.rows // UPDATES)))))
    local = min(N_LOCAL, max(1, total // 2)) if n_local is None else n_local
    if n_local and n_total is None:  # a multiple, of two or more where there are the rows
        total = n_local * min(max(2, round(total / n_local)), data.rows // n_local)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = 1 if gpu else max(1, min(cores, runs, 4))
    passes = epochs or min(MOST_EPOCHS, max(1, math.ceil(UPDATES / math.ceil(data.rows / total))))
    whole = Sizes(total, local, float(passes), None, None, tokens, jobs, max(1, cores // jobs), None, float(passes), full_tokens)
    if gpu or minutes is None:
        return whole
    choices = [whole, *([] if epochs else [replace(whole, epochs=1.0)])]
    choices += [] if fixed_tokens or tokens <= SHORT else [replace(choices[-1], tokens=SHORT)]
    choices += [replace(choices[-1], passages=FEWEST_PASSAGES)] if data.passages > 2 * FEWEST_PASSAGES else []
    speeds = {length: _probe(data, model, whole.threads, length) for length in {size.tokens for size in choices}}
    return _fitting(choices, data, methods, seeds, speeds, 60 * minutes)


def _fitting(
    choices: Sequence[Sizes], data: Prepared, methods: Sequence[str], seeds: int, speeds: dict[int, Speed], seconds: float
) -> Sizes:
    """The first that fits, else the last with a part of the rows."""

    def expected(size: Sizes) -> float:
        speed = speeds[size.tokens]
        rows, passages = min(data.rows, size.limit or data.rows), data.passages if size.passages is None else size.passages + data.queries
        judged, curve = STARTING + passages * speed.encoded, POINTS * (DEV_PASSAGES + 200) * speed.encoded
        steps = [speed.trained + speed.again * get_method(name).cached for name in methods]
        return _together([judged + curve + step * rows * size.epochs for step in steps] * seeds + [judged], size.jobs)

    for size in choices:
        if expected(size) <= seconds:
            return replace(size, expected_seconds=expected(size))
    last = choices[-1]
    none = expected(replace(last, limit=1))
    share = (seconds - none) / max(1e-9, expected(last) - none)
    part = replace(last, limit=min(data.rows, max(FEWEST_ROWS, last.n_total * 8, int(share * data.rows))))
    return replace(part, expected_seconds=expected(part))


def _together(runs: Sequence[float], jobs: int) -> float:
    """Seconds of them all, so many at once, the longest first."""
    ends = [0.0] * jobs
    for run in sorted(runs, reverse=True):
        ends[ends.index(min(ends))] += run
    return max(ends)


def _probe(data: Prepared, model: Any, threads: int, tokens: int) -> Speed:
    """What so many threads of an idle machine need."""
    import torch

    from contaccum.data.training_set import load_training_set

    rows = load_training_set(data.folder, "train", PROBED)
    queries, positives = rows["query"][:], rows["positive"][:]
    model.max_seq_length, before = tokens, torch.get_num_threads()
    torch.set_num_threads(threads)

    def embeddings(texts: Sequence[str]) -> Any:
        return model(model.preprocess(list(texts)))["sentence_embedding"]

    def train() -> None:
        for first in range(0, len(queries), N_LOCAL):
            part = slice(first, first + N_LOCAL)
            (embeddings(queries[part]) * embeddings(positives[part])).sum().backward()

    def look_again() -> None:
        with torch.no_grad():
            for first in range(0, len(queries), N_LOCAL):
                embeddings(queries[first : first + N_LOCAL]), embeddings(positives[first : first + N_LOCAL])

    try:
        model.encode(positives[:8], show_progress_bar=False)  # the first call is slow
        encoded = _seconds(lambda: model.encode(positives, batch_size=N_LOCAL, show_progress_bar=False))
        model.train()
        return Speed(*(seconds / threads / len(queries) for seconds in (_seconds(train), _seconds(look_again), encoded)))
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()  # not by the wall clock: what else runs now may end soon
    work()
    return time.process_time() - started


def described(size: Sizes, data: Prepared, model: str, unusual: str, lr: float, memory: str | None) -> list[str]:
    """For the user: what is trained how, and what is left out. `unusual`: of the model."""
    rows, local = min(data.rows, size.limit or data.rows), f"what fits in {memory}" if size.n_local == 0 else str(size.n_local)
    lines = [
        f"every method: {model}, {rows:,} rows x {size.epochs:g} epoch{'s' if size.epochs != 1 else ''}, "
        f"{size.n_total} samples an update, {local} of them in memory at once, {size.tokens} tokens of a text, lr {lr:g}{unusual}"
    ]
    less = {f"{size.epochs:g} epochs": f"{size.full_epochs:g}"} if size.epochs < size.full_epochs else {}
    less |= {f"{size.tokens} tokens of a text": f"{size.full_tokens}"} if size.tokens < size.full_tokens else {}
    if less:
        cut = " and ".join(f"{now} instead of {full}" for now, full in less.items()).replace("1 epochs", "1 epoch")
        lines.append(f"note: {cut}, as a CPU is slow; the command at the end trains with {' and '.join(less.values())}")
    if rows < data.rows:
        lines.append(f"note: {rows:,} of {data.rows:,} rows, a random part, so that it ends in time; --minutes allows more, 0 all")
    if size.passages is not None:
        lines.append(f"note: the collection is searched in part, {size.passages:,} passages besides the relevant ones; --minutes 0: all")
    if (updates := size.updates(data.rows)) < FEW_UPDATES:
        lines.append(f"note: {updates} updates train little; more --epochs, --minutes or a higher --lr may show more")
    if size.expected_seconds is not None:
        lines.append(f"expected: about {max(1, round(size.expected_seconds / 60))} min, {size.jobs} at a time")
    return lines
