"""`train --speed auto`: the options that train fastest here, found by short trials, remembered, and said as an explicit command.

1. Options that change how an update is computed, or where its samples are cut, and not what is trained on: precision, n_local, compiled
   or unpadded towers, gradient checkpointing, CUDA graphs, threads and workers. Which of them there are depends on the device (`moves`).
2. Trials run in processes of their own (`contaccum.training.trial`), on random weights and texts as long as the data's. On a GPU each has
   the largest n_local that is predicted to fit (`contaccum.memory.plan`), then twice that as long as it fits and is faster.
3. One move after the other is tried on top of the fastest so far, and kept where it is faster by more than `NOISE`. After `BUDGET` seconds
   no other is tried, and one that is running is ended. On a GPU the next trial's process loads its libraries meanwhile.
4. What was found is kept in the user's cache folder, by model, sizes, lengths and device: the next run begins at once.

PyTorch's allocator is asked for segments that grow before a GPU is used, in the trials and in the run.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from contaccum.common.console import note
from contaccum.common.options import as_options
from contaccum.common.outputs import read_if_whole, write_json
from contaccum.common.sizes import parse_bytes
from contaccum.data.drawn_pairs import drawn_kind, drawn_pairs
from contaccum.data.training_set import has_negatives, load_training_set
from contaccum.memory.limit import device_bytes
from contaccum.memory.plan import planned
from contaccum.methods.config import TrainConfig
from contaccum.methods.table import get_method
from contaccum.towers.cuda_graphs import check_graphs
from contaccum.towers.speed import check_compiler, check_unpadded
from contaccum.training.run_folder import refuse_used_folder
from contaccum.training.trial import end_process, start_process, try_in_process

BUDGET = 120.0  # seconds
NOISE = 1.03
LOOKED_AT = 256  # rows of the data
SAMPLES = 64  # of a trial's update on a CPU, at most
GPU_SAMPLES, GPU_STEPS = 128, 16  # of a trial's update on a GPU: so many micro-batches, or samples if these are more
CHOSEN = ("precision", "n_local", "torch_compile", "unpad", "gradient_checkpointing", "cuda_graphs", "threads", "workers")
EXCLUDED = ("local_tokens", "whole_updates", "tf32")  # what goes without trials
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"

Move = dict[str, Any]  # options and their values
DECIDE_SIZE = {"cuda_graphs", "gradient_checkpointing"}  # what is predicted to fit with them is another n_local
LARGER: Move = {"n_local": "larger"}  # twice the micro-batch, as long as that is faster
Trial = Callable[[TrainConfig, float], float | None]  # samples per second, within so many seconds; None where memory ran out


@dataclass
class Search:
    """Moves tried one after the other, until the time is over."""

    trial: Trial
    sized: Callable[[TrainConfig], TrainConfig] = lambda config: config  # with the n_local that fits
    say: Callable[[str], None] = note
    clock: Callable[[], float] = time.monotonic
    rates: dict[str, float] = field(default_factory=dict)  # of what was tried, by its options
    failed: set[str] = field(default_factory=set)  # for want of memory

    def __post_init__(self) -> None:
        self.ends = self.clock() + BUDGET

    def fastest(self, start: TrainConfig, moves: list[Move], cuda: bool) -> TrainConfig:
        best, rate = start, 0.0
        for move in [{}, *moves]:
            if self.clock() >= self.ends:
                break
            if move is LARGER:
                best, rate = self._larger(best, rate)
                continue
            try:
                candidate = replace(best, **move)
                _check(candidate, cuda)
                candidate = self.sized(candidate) if not move or DECIDE_SIZE & set(move) else candidate
                candidate, found = (candidate, None) if self._known(candidate) else self._largest(candidate)
            except (ValueError, RuntimeError) as error:  # cannot be here, or with what was found
                self.say(f"{_words(move) or options(start)} cannot be tried: {str(error).strip().splitlines()[-1]}")
                continue
            if found is not None and found > NOISE * rate:
                best, rate = candidate, found
        return best

    def _larger(self, best: TrainConfig, rate: float) -> tuple[TrainConfig, float]:
        """With twice the micro-batch as long as that fits and is faster: what was found on the way may need less than was predicted."""
        while self.clock() < self.ends and best.n_total % (2 * best.n_local) == 0:
            larger = replace(best, n_local=2 * best.n_local)
            try:
                found = None if self._known(larger) else self._rate(larger)
            except (ValueError, RuntimeError) as error:
                self.say(f"{options(larger)} cannot be tried: {str(error).strip().splitlines()[-1]}")
                break
            if found is None or found <= NOISE * rate:
                break
            best, rate = larger, found
        return best, rate

    def _largest(self, config: TrainConfig) -> tuple[TrainConfig, float | None]:
        """`config`, and how fast it is; where memory runs out with the next smaller micro-batches: a prediction may be short of it."""
        found = self._rate(config)
        smaller = [n for n in range(1, config.n_local) if config.n_total % n == 0]
        if found is None and smaller and self.clock() < self.ends:
            config = replace(config, n_local=smaller[-1])
            found = self._rate(config)
        return config, found

    def _rate(self, config: TrainConfig) -> float | None:
        try:
            found = self.trial(config, max(1.0, self.ends - self.clock()))
        except subprocess.TimeoutExpired:
            self.ends = self.clock()
            self.say(f"tried {options(config)}: not ended in {BUDGET:.0f} seconds of trials")
            return None
        self.say(f"tried {options(config)}: " + ("memory ran out" if found is None else f"{found:.1f} samples/s"))
        if found is None:
            self.failed.add(options(config))
        else:
            self.rates[options(config)] = found
        return found

    def _known(self, config: TrainConfig) -> bool:
        return options(config) in {*self.rates, *self.failed}


def fastest(config: TrainConfig) -> TrainConfig:
    """`config` with the options that train fastest on this machine, from the cache or by trials."""
    _check_asked(config)
    cuda = torch.cuda.is_available()
    lengths, negatives = _lengths(config)
    query_tokens, passage_tokens = (32 * math.ceil(max(tokens) / 32) for tokens in zip(*lengths, strict=True))
    passage_tokens = min(passage_tokens, config.max_seq_length)
    key = _key(config, query_tokens, passage_tokens, negatives, cuda)
    known = read_if_whole(cache_file()) or {}
    if key in known and set(known[key]["options"]) == set(CHOSEN):  # else of another version
        return _said(replace(config, **known[key]["options"]), "as found before", cuda)

    waiting = start_process() if cuda else None

    def trial(asked: TrainConfig, seconds: float) -> float | None:
        nonlocal waiting
        process, waiting = waiting, start_process() if cuda else None
        most = max(GPU_SAMPLES, GPU_STEPS * asked.n_local) if cuda else SAMPLES
        samples = min(asked.n_total, max(asked.n_local, most // asked.n_local * asked.n_local))
        work = replace(asked, n_total=samples, max_seq_length=passage_tokens, hard_negatives=negatives)
        found = try_in_process(work, _memory(config), query_tokens, lengths, seconds, process)
        return None if found is None else found.samples_per_second

    search = Search(trial, (lambda asked: planned(asked, negatives)) if cuda else (lambda asked: asked))
    start = replace(config, precision="bf16") if cuda and config.precision == "fp32" and torch.cuda.is_bf16_supported() else config
    try:
        found = search.fastest(start, list(moves(start, cuda)), cuda)
    finally:
        if waiting is not None:
            end_process(waiting)
    if search.rates:
        chosen = {name: getattr(found, name) for name in CHOSEN}
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        write_json(cache_file(), {**known, key: {"options": chosen, "samples_per_second": search.rates}})
    return _said(found, "as found" if search.rates else "no trial has ended; going on with", cuda)


def worth_trials(config: TrainConfig, given: Collection[str]) -> bool:
    """Whether to make trials although nobody asked: on a GPU, by one process, where none of the options is `given` and another n_local is
    the same training, but for which samples share a micro-batch."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and torch.cuda.is_available()
    method = get_method(config.method)
    return alone and (method.bank or method.cached) and config.lora_rank is None and not {*CHOSEN, *EXCLUDED} & set(given)


def moves(config: TrainConfig, cuda: bool) -> Iterator[Move]:
    """What is tried, the largest gains first."""
    if cuda:
        yield {"cuda_graphs": True, "gradient_checkpointing": False, "unpad": None}
        yield {"torch_compile": True}
        yield LARGER
        yield {"gradient_checkpointing": True, "cuda_graphs": False}
        yield {"unpad": True, "cuda_graphs": False} if config.precision == "fp32" else {"unpad": False, "cuda_graphs": False}
        yield LARGER
        yield {"workers": 4}
        return
    for times in (2, 4):
        if config.n_total % (config.n_local * times) == 0 and not get_method(config.method).one_batch:
            yield {"n_local": times * config.n_local}
    if (threads := torch.get_num_threads()) > 1:
        yield {"threads": threads // 2}
    yield {"torch_compile": True}


def options(config: TrainConfig) -> str:
    """Those of the chosen options that are not the default, as they may be typed."""
    default = {f.name: f.default for f in fields(TrainConfig)}
    return _words({name: getattr(config, name) for name in CHOSEN if name == "n_local" or getattr(config, name) != default[name]})


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "contaccum" / "speed.json"


def allocate_in_growing_segments() -> None:
    """Before a GPU is used: it is asked for once. A user's own setting stays."""
    os.environ.setdefault(*ALLOCATOR)


def _words(chosen: Move) -> str:
    return as_options({name: value for name, value in chosen.items() if value is not None})


def _said(config: TrainConfig, how: str, cuda: bool) -> TrainConfig:
    """Notes it as a command."""
    note(f"{how}: {'='.join(ALLOCATOR) + ' ' if cuda else ''}contaccum train ... {options(config)}")
    return config


def _check_asked(config: TrainConfig) -> None:
    config.check()
    refuse_used_folder(Path(config.output))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("speed=auto measures one process; find the options by one, and give them to several")
    if config.n_local == 0 or config.local_tokens is not None or config.whole_updates:
        raise ValueError("speed=auto chooses n_local; leave n_local=auto, local_tokens and whole_updates out")


def _check(config: TrainConfig, cuda: bool) -> None:
    """ValueError for what cannot be on this machine."""
    if config.torch_compile:
        check_compiler(cuda)
    if config.unpad:
        check_unpadded(config.precision, config.torch_compile, cuda)
    if config.cuda_graphs:
        check_graphs(config.gradient_checkpointing, bool(config.unpad), cuda)


def _memory(config: TrainConfig) -> int:
    return parse_bytes(config.memory) if config.memory else device_bytes() if torch.cuda.is_available() else 0


def _lengths(config: TrainConfig) -> tuple[list[tuple[int, int]], int]:
    """Tokens of the first rows' queries and passages, about; hard negatives of a row."""
    if (kind := drawn_kind(config.data)) is not None:
        rows = drawn_pairs(config.data, kind, config.split, LOOKED_AT, config.seed)[0]
    else:
        rows = load_training_set(config.data, config.split, LOOKED_AT)

    def tokens(text: str) -> int:
        return min(config.max_seq_length, math.ceil(len(text) / 4 + 2))

    pairs = rows[:]
    lengths = [(tokens(query), tokens(positive)) for query, positive in zip(pairs["query"], pairs["positive"], strict=True)]
    if config.hard_negatives is not None:
        return lengths, config.hard_negatives
    return lengths, int(kind is None and has_negatives(rows))


def _key(config: TrainConfig, query_tokens: int, passage_tokens: int, negatives: int, cuda: bool) -> str:
    """What the answer depends on."""
    left_out = ("data", "output", "seed", "lr", "epochs", "max_updates", "limit", "dev", "split", "save_every", "log_every", "report_to")
    default = {f.name: f.default for f in fields(TrainConfig)}
    changed = {name: value for name, value in asdict(config).items() if name not in left_out and value != default[name]}
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    lengths = f"{query_tokens} and {passage_tokens} tokens, {negatives} hard negatives"
    return f"{device}; torch {torch.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}; {lengths}; {changed}"
