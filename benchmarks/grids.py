"""The grids that were run by benchmarks/drift.py, by name: settings as JSON lines.

    python benchmarks/grids.py lr-acl > acl-l3.jsonl
    python benchmarks/grids.py regime > regime.jsonl

`lr-...`: every method by learning rate, as an untuned user meets it (one epoch); `bank`, `push` and `scratch`: what the defaults were
chosen by, on dev queries; `regime`: the paper's schedule; `rivals`: other people's ways to more negatives.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from fast_path import Setting

OURS = Setting("contaccum", bank=1024, mean=True, zero_sum="running")
PAPER = Setting("paper", bank=1024, gradient_scale="paper")
GRADACCUM = Setting("gradaccum")
GRADCACHE = Setting("gradcache", n=128)  # one batch of 128: the same gradient
LARGE = Setting("batch-1024", n=1024, n_total=1024)
RATES = (2e-5, 5e-5, 1e-4, 2e-4)
SIMILARITIES = ("cosine", "dot")


def by_rate(methods: list[Setting], rates: tuple[float, ...] = RATES, split: str = "test", towers: int = 3) -> Iterator[Setting]:
    """One epoch. `towers`: 1 for one tower with mean pooling, 2 for two with CLS, 3 for both."""
    for tied, lr, similarity, method in product((True, False), rates, SIMILARITIES, methods):
        if towers & (1 if tied else 2):
            yield replace(method, tied=tied, pooling="mean" if tied else "cls", epochs=1, lr=lr, similarity=similarity, split=split)


def lr(bank: int = 1024, hard_negatives: int = 0, sizes: bool = True) -> Iterator[Setting]:
    """Ours and GradCache with three seeds; `sizes`: ours at other n, and a batch of 1,024."""
    methods = [replace(method, hard_negatives=hard_negatives) for method in (OURS, GRADCACHE, GRADACCUM, PAPER)]
    methods = [replace(method, bank=bank) if method.bank else method for method in methods]
    yield from by_rate(methods)
    yield from by_rate([replace(method, seed=seed) for seed in (1, 2) for method in methods[:2]])
    if sizes:
        yield from by_rate([replace(OURS, n=n) for n in (2, 32)])
        yield from by_rate([LARGE], rates=(2e-4, 4e-4, 8e-4, 1.6e-3), towers=1)


def bank() -> Iterator[Setting]:
    yield from by_rate([GRADCACHE, *(replace(OURS, bank=size) for size in (512, 1024, 2048, 4096))], (2e-5, 1e-4, 4e-4), "dev", towers=1)


def push() -> Iterator[Setting]:
    small = [replace(OURS, n=2, push_window=window) for window in (8, 16, 32)]
    yield from by_rate(small, (2e-5, 2e-4, 4e-4), "dev", towers=1)
    yield from by_rate([replace(OURS, push_window=window) for window in (8, 32, 128)], (4e-4, 1.6e-3), "dev", towers=1)


def scratch() -> Iterator[Setting]:
    """Random weights, on harvested docstrings: tokens with `--lengths 32 32`."""
    for lr, n in product((2e-4, 5e-4, 1e-3), (1, 2, 4, 8)):
        for window in sorted({n, 4, 8, 16, 32, 128}):
            if window >= n:
                yield replace(OURS, n=n, push_window=window, bank=512, pooling="mean", rows=7000, lr=lr)


def regime() -> Iterator[Setting]:
    """40 epochs at 2e-5, dot product, the paper's share of warm-up; on `acl`."""
    schedule: dict[str, Any] = {"rows": 10_240, "epochs": 40, "lr": 2e-5, "similarity": "dot", "warmup": 0.067, "split": "test"}
    paper = replace(PAPER, bank=2048)
    main = [GRADACCUM, GRADCACHE, paper, replace(OURS, bank=640)]  # 640: a sixteenth of the rows
    ablation = [
        replace(paper, name="no query bank", rival="xbm", gradient_scale="in-batch"),
        replace(paper, name="no past encoder", past=False),
        replace(paper, name="neither", rival="xbm", gradient_scale="in-batch", past=False),
        replace(paper, name="no accumulation", n_total=8),
        Setting("dpr, updates of 8", n_total=8),
    ]
    sizes = [replace(paper, bank=size) for size in (128, 512, 1024)]
    larger = [replace(method, n=32) for method in (GRADACCUM, paper, replace(OURS, bank=640))]
    yield from (replace(method, seed=seed, **schedule) for seed in (0, 1, 2) for method in [*main, *ablation, *sizes, *larger])


def rivals() -> Iterator[Setting]:
    methods = [Setting("sogclr", rival="sogclr"), *(Setting(name, bank=1024, rival=name) for name in ("xbm", "xbn"))]
    yield from (setting for setting in by_rate(methods, towers=1) if setting.similarity == "cosine")


GRIDS: dict[str, Callable[[], Iterator[Setting]]] = {
    "lr-acl": lr,
    "lr-deb": lr,
    "lr-deb-l6": lambda: lr(sizes=False),
    "lr-squad-wiki": lambda: lr(bank=406, hard_negatives=1, sizes=False),  # 406: a sixteenth of the rows
    "bank": bank,
    "push": push,
    "scratch": scratch,
    "regime": regime,
    "rivals": rivals,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=GRIDS)
    for setting in GRIDS[parser.parse_args().name]():
        print(json.dumps(asdict(setting)))


if __name__ == "__main__":
    main()
