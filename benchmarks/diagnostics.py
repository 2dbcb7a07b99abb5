"""What training's diagnostics cost: seconds of an update by the training command with them and with `diagnose_every=0`, in turns.

    python benchmarks/diagnostics.py --json diagnostics.json        # BERT-base, on a GPU; a quarter of an hour or so
    python benchmarks/diagnostics.py --every 2 --updates 10 --rounds 1 --json diagnostics.json  # an upper limit, in about a minute
    python benchmarks/diagnostics.py --model minilm-l3 --n-total 32 --passage-tokens 16 --updates 50 --rounds 2  # minutes on a CPU

Random weights, made-up texts of full length, one hard negative, and a bank that is full from the start. A turn trains a few updates and
times those that follow, whole, waiting for a GPU only before the first and after the last of them. "In hooks" is the time inside the
diagnostics' own hooks: exact where the ratio is noisy, and on a GPU an upper limit, for they also wait there for work that any training
has to wait for later. Goal: under 1 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.adapters.trainer import ContAccumTrainer
from contaccum.common.provenance import provenance
from contaccum.experiments.grid import SIZES
from contaccum.experiments.workloads import Workload, fill_bank, tower_config
from contaccum.methods.config import TrainConfig
from contaccum.report.terminal import show_lines
from contaccum.training.diagnostics import Diagnostics
from contaccum.training.run import train
from contaccum.training.trial import write_model, write_texts

SEED = 0
WARM_UP = 3  # updates
GOAL = 0.01
MASSES = 5  # similarity mass at every fifth timing, as training does
HOOKS = {
    "_mark": "clock marks",
    "_observe": "scores kept",
    "on_pre_optimizer_step": "gradient norms",
    "on_step_end": "similarity mass and shift",
    "flush": "reading and writing",
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base", choices=SIZES)
    parser.add_argument("--n-total", type=int, default=128)
    parser.add_argument("--n-local", type=int, default=8)
    parser.add_argument("--bank", type=int, default=1024)
    parser.add_argument("--query-tokens", type=int, default=32)
    parser.add_argument("--passage-tokens", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="updates between timings; a smaller one gives an upper limit sooner")
    parser.add_argument("--updates", type=int, default=100, help=f"timed in a turn, a multiple of {MASSES} times --every")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if min(args.every, args.updates, args.rounds) < 1 or args.updates % (MASSES * args.every):
        parser.error(f"--updates {args.updates} must be a multiple of {MASSES} * --every, for a turn to hold its share of everything")
    torch.set_float32_matmul_precision("highest")  # no TF32
    work = Workload(args.n_total, args.n_local, args.bank, args.query_tokens, args.passage_tokens)
    turns = measure(args.model, work, args.every, args.updates, args.rounds)
    found = compared(turns)
    show_lines(table(found))
    print(f"diagnostics add {found['overhead']:.2%}, in hooks {found['hooks_share']:.2%}; goal: under {GOAL:.0%}")
    for name, seconds in found["hooks_seconds"].items():
        print(f"  {name}: {1000 * seconds:.3f} ms an update, {seconds / found['seconds_on']:.3%}")
    if args.json:
        content = {"model": args.model, **asdict(work), "every": args.every, "updates": args.updates, **found, "turns": turns}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"provenance": provenance(SEED), **content}, indent=1) + "\n", encoding="utf-8")


def measure(size: str, work: Workload, every: int, updates: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        folder, tokens = Path(scratch), max(work.query_tokens, work.passage_tokens)
        write_model(folder / "model", tower_config(size, tokens))
        rows = max(work.bank, work.n_total * (WARM_UP + updates))
        write_texts(folder / "texts.jsonl", rows, work.hard_negatives, work.query_tokens, work.passage_tokens)
        turns = []
        for place, diagnose_every in enumerate(in_turns(every, rounds)):
            config = TrainConfig(
                data=str(folder / "texts.jsonl"),
                output=str(folder / f"run-{place}"),
                model=str(folder / "model"),
                n_total=work.n_total,
                n_local=work.n_local,
                bank=work.bank,
                max_seq_length=tokens,
                max_updates=WARM_UP + updates,
                save_every=0,
                diagnose_every=diagnose_every,
                seed=SEED,
            )
            turns.append(turn(config, work))
        return turns


def in_turns(every: int, rounds: int) -> Iterator[int]:
    """Off, on, on, off, off, on, ..."""
    for number in range(rounds):
        yield from (every, 0) if number % 2 else (0, every)


def turn(config: TrainConfig, work: Workload) -> Row:
    """One training: seconds of a timed update, and of those the seconds in each hook."""
    clocks: list[Clock] = []

    def clocked(*args: Any, **kwargs: Any) -> ContAccumTrainer:
        trainer = ContAccumTrainer(*args, **kwargs)
        clocks.append(Clock(trainer, work))
        trainer.add_callback(clocks[0])  # behind all others
        return trainer

    def unsaved(*_: Any) -> None:
        """The model is not needed."""

    changed: dict[str, Any] = {"ContAccumTrainer": clocked, "Diagnostics": TimedDiagnostics, "_finish": unsaved}
    with warnings.catch_warnings(), mock.patch.multiple("contaccum.training.run", **changed):
        warnings.filterwarnings("ignore", "the bank's vectors have shifted")  # from made-up vectors to the towers'
        train(config)
    (before, spent_before), (after, spent) = clocks[0].readings
    updates = int(config.max_updates or 0) - WARM_UP
    clocks.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "diagnose_every": config.diagnose_every,
        "seconds": (after - before) / updates,
        "hooks_seconds": {told: (spent[name] - spent_before[name]) / updates for name, told in HOOKS.items()},
    }


class TimedDiagnostics(Diagnostics):
    """Knows the seconds spent in each of its hooks, without those in others that it calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.spent: Counter[str] = Counter()
        for name in HOOKS:
            setattr(self, name, self._timed(name, getattr(self, name)))
        super().__init__(*args, **kwargs)

    def _timed(self, name: str, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            elsewhere, started = self.spent.total(), time.perf_counter()
            hook(*args, **kwargs)
            self.spent[name] += time.perf_counter() - started - (self.spent.total() - elsewhere)  # type: ignore[assignment]

        return timed


class Clock(TrainerCallback):
    """Fills the bank when training begins; reads clock and hooks after the warm-up and at the end."""

    def __init__(self, trainer: ContAccumTrainer, work: Workload) -> None:
        self.trainer, self.work = trainer, work
        self.readings: list[tuple[float, Counter[str]]] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss: Any = self.trainer.loss
        observers, loss.criterion.observers = loss.criterion.observers, []
        fill_bank(loss, loss.model, self.work)
        loss.criterion.observers = observers

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step in (WARM_UP, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            diagnostics = [c for c in self.trainer.callback_handler.callbacks if isinstance(c, TimedDiagnostics)]
            self.readings.append((time.perf_counter(), Counter(diagnostics[0].spent) if diagnostics else Counter()))


def compared(turns: Sequence[Row]) -> Row:
    """Medians over the turns of each way."""
    off, on = ([row for row in turns if bool(row["diagnose_every"]) is way] for way in (False, True))
    seconds = {way: [row["seconds"] for row in rows] for way, rows in (("off", off), ("on", on))}
    without, with_ = (statistics.median(seconds[way]) for way in ("off", "on"))
    return {
        "seconds_off": without,
        "seconds_on": with_,
        "all_seconds": seconds,
        "overhead": with_ / without - 1,
        "hooks_share": statistics.median(sum(row["hooks_seconds"].values()) / row["seconds"] for row in on),
        "hooks_seconds": {name: statistics.median(row["hooks_seconds"][name] for row in on) for name in HOOKS.values()},
    }


def table(found: Row) -> list[list[str]]:
    def line(name: str, middle: float, seconds: Sequence[float], *more: str) -> list[str]:
        return [name, f"{1000 * middle:.2f}", f"{1000 * min(seconds):.2f}", f"{1000 * max(seconds):.2f}", *(more or ("", ""))]

    every = found["all_seconds"]
    return [
        ["diagnostics", "ms an update", "lowest", "highest", "ratio", "in hooks"],
        line("off", found["seconds_off"], every["off"]),
        line("on", found["seconds_on"], every["on"], f"x{1 + found['overhead']:.4f}", f"{found['hooks_share']:.2%}"),
    ]


if __name__ == "__main__":
    main()
