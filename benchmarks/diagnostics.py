"""What training's diagnostics cost: seconds of an update by the training command with them and with `diagnose_every=0`, in turns.

    python benchmarks/diagnostics.py --json diagnostics.json        # BERT-base, on a GPU; a quarter of an hour or so
    python benchmarks/diagnostics.py --every 2 --updates 10 --rounds 1 --json diagnostics.json  # an upper limit, in about a minute
    python benchmarks/diagnostics.py --model minilm-l3 --n-total 32 --passage-tokens 16 --updates 50 --rounds 2  # minutes on a CPU
    python benchmarks/diagnostics.py --operators --model tiny --n-total 32 --passage-tokens 16 --updates 50  # counts, in seconds

Random weights, made-up texts of full length, one hard negative, and a bank that is full from the start. A turn trains a few updates and
times those that follow, whole, waiting for a GPU only before the first and after the last of them. "In hooks" is the time inside the
diagnostics' own hooks: exact where the ratio is noisy, and on a GPU an upper limit, for they also wait there for work that any training
has to wait for later. Goal: under 1 %. `--operators` counts what an update launches and what it reads from the device, on a CPU.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
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
READ = "aten._local_scalar_dense.default"  # of a value, which waits for the device
Row = dict[str, Any]
Watching = TypeVar("Watching", bound=TrainerCallback)


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
    parser.add_argument("--operators", action="store_true", help="count operators instead of measuring time")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if min(args.every, args.updates, args.rounds) < 1 or args.updates % (MASSES * args.every):
        parser.error(f"--updates {args.updates} must be a multiple of {MASSES} * --every, for a turn to hold its share of everything")
    torch.set_float32_matmul_precision("highest")  # no TF32
    work = Workload(args.n_total, args.n_local, args.bank, args.query_tokens, args.passage_tokens)
    if args.operators:
        found = operators(args.model, work, args.every, args.updates)
        show_lines(operators_table(found))
    else:
        turns = measure(args.model, work, args.every, args.updates, args.rounds)
        found = {**compared(turns), "turns": turns}
        show_lines(table(found))
        print(f"diagnostics add {found['overhead']:.2%}, in hooks {found['hooks_share']:.2%}; goal: under {GOAL:.0%}")
        for name, seconds in found["hooks_seconds"].items():
            print(f"  {name}: {1000 * seconds:.3f} ms an update, {seconds / found['seconds_on']:.3%}")
    if args.json:
        content = {"model": args.model, **asdict(work), "every": args.every, "updates": args.updates, **found}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"provenance": provenance(SEED), **content}, indent=1) + "\n", encoding="utf-8")


def measure(size: str, work: Workload, every: int, updates: int, rounds: int) -> list[Row]:
    return [turn(config, work) for config in configurations(size, work, in_turns(every, rounds), updates)]


def configurations(size: str, work: Workload, turns: Iterable[int], updates: int) -> Iterator[TrainConfig]:
    """A training for each `diagnose_every` in `turns`, of the same model and texts, which are there until the last is done."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, tokens = Path(scratch), max(work.query_tokens, work.passage_tokens)
        write_model(folder / "model", tower_config(size, tokens))
        rows = max(work.bank, work.n_total * (WARM_UP + updates))
        write_texts(folder / "texts.jsonl", rows, work.hard_negatives, work.query_tokens, work.passage_tokens)
        for place, diagnose_every in enumerate(turns):
            yield TrainConfig(
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


def in_turns(every: int, rounds: int) -> Iterator[int]:
    """Off, on, on, off, off, on, ..."""
    for number in range(rounds):
        yield from (every, 0) if number % 2 else (0, every)


def turn(config: TrainConfig, work: Workload) -> Row:
    """One training: seconds of a timed update, and of those the seconds in each hook."""
    clock = trained(config, lambda trainer: Clock(trainer, work), Diagnostics=TimedDiagnostics)
    (before, spent_before), (after, spent) = clock.readings
    updates = int(config.max_updates or 0) - WARM_UP
    del clock
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "diagnose_every": config.diagnose_every,
        "seconds": (after - before) / updates,
        "hooks_seconds": {label: (spent[name] - spent_before[name]) / updates for name, label in HOOKS.items()},
    }


def trained(config: TrainConfig, watching: Callable[[ContAccumTrainer], Watching], **changed: Any) -> Watching:
    """What watched a training from behind all other callbacks."""
    found: list[Watching] = []

    def watched(*args: Any, **kwargs: Any) -> ContAccumTrainer:
        trainer = ContAccumTrainer(*args, **kwargs)
        found.append(watching(trainer))
        trainer.add_callback(found[0])
        return trainer

    def unsaved(*_: Any) -> None:
        """The model is not needed."""

    with warnings.catch_warnings(), mock.patch.multiple("contaccum.training.run", ContAccumTrainer=watched, _finish=unsaved, **changed):
        warnings.filterwarnings("ignore", "the bank's vectors have shifted")  # from made-up vectors to the towers'
        train(config)
    return found[0]


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


class FullBank(TrainerCallback):
    """Fills the bank when training begins."""

    def __init__(self, trainer: ContAccumTrainer, work: Workload) -> None:
        self.trainer, self.work = trainer, work

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss: Any = self.trainer.loss
        observers, loss.criterion.observers = loss.criterion.observers, []
        fill_bank(loss, loss.model, self.work)
        loss.criterion.observers = observers


class Clock(FullBank):
    """Reads clock and hooks after the warm-up and at the end."""

    def __init__(self, trainer: ContAccumTrainer, work: Workload) -> None:
        super().__init__(trainer, work)
        self.readings: list[tuple[float, Counter[str]]] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step in (WARM_UP, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            diagnostics = [c for c in self.trainer.callback_handler.callbacks if isinstance(c, TimedDiagnostics)]
            self.readings.append((time.perf_counter(), Counter(diagnostics[0].spent) if diagnostics else Counter()))


class Counted(FullBank):
    """Counts the operators of each update."""

    def __init__(self, trainer: ContAccumTrainer, work: Workload) -> None:
        super().__init__(trainer, work)
        self.mode, self.updates = Counting(), list[Counter[str]]()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self.mode.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.updates.append(self.mode.seen)
        self.mode.seen = Counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.mode.__exit__(None, None, None)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def operators(size: str, work: Workload, every: int, updates: int) -> Row:
    """Of an update that writes nothing, and of one that writes: operators, and values that are read from the device."""
    off, on = (trained(c, lambda t: Counted(t, work)).updates for c in configurations(size, work, (0, every), updates))
    places = {"ordinary": every + 1, "written": 2 * every - 1}  # the second lines' end
    return {
        kind: {way: {"operators": seen[place].total(), "reads": seen[place][READ]} for way, seen in (("off", off), ("on", on))}
        for kind, place in places.items()
    }


def operators_table(found: Row) -> list[list[str]]:
    head = ["update", "operators", "with diagnostics", "reads", "with diagnostics"]
    lines = [[str(found[kind][way][name]) for name in ("operators", "reads") for way in ("off", "on")] for kind in found]
    return [head, *([kind, *line] for kind, line in zip(found, lines, strict=True))]


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
