"""Time and memory of one optimizer update, with every loss, side by side on one model.

Ways differ in the loss, in precision and in how the towers run, so one pair of towers and one optimizer serve them all. They take turns;
each turn starts with a full bank and a warm-up, compiling included, and ends with the way's memory given back and the towers as they were.
Inputs are random token ids, of fixed length or padded to the longest of a micro-batch, already on the device.

`peak_bytes` is what was allocated at most; with CUDA graphs what was reserved, which is a little more.

`peak_share` is the share of the GPU's dense bf16 peak, whatever precision the variant computes in. Counted are the products of a forward
and a backward pass on real tokens: 6 per weight of the layers and token, and 12 * layers * width * length per token for attention; by
GradCache and with checkpointing a third more each, for another forward pass.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from sentence_transformers import SentenceTransformer
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from contaccum.adapters.losses import ContAccumLoss
from contaccum.common.outputs import check_file, sole_path, write_json
from contaccum.common.provenance import provenance
from contaccum.common.sizes import parse_bytes
from contaccum.experiments.grid import SIZES
from contaccum.experiments.share import shared
from contaccum.experiments.workloads import (
    LENGTHS,
    PRECISIONS,
    VARIANTS,
    Variant,
    Workload,
    fill_bank,
    random_encoder,
    random_features,
    random_lengths,
)
from contaccum.memory.limit import limit_memory
from contaccum.towers.cuda_graphs import check_graphs, graph_towers, ungraph_towers
from contaccum.towers.speed import COUNTS, check_unpadded, compile_towers, encoders, repad_towers, uncompile_towers, unpad_towers

CLIP = 2.0
WARM_UP = 2  # micro-batches
# Dense bf16 operations per second, from NVIDIA's data sheets (SXM), by what the device's name holds.
BF16_PEAKS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "A100-SXM": 312e12}


@dataclass(frozen=True)
class Case:
    """A variant and its workload."""

    way: str
    work: Workload


def bench(
    *,
    model: str = "bert-base",
    n_total: Sequence[int] = (128,),
    n_local: Sequence[int] = (8,),
    bank: Sequence[int] = (1024,),
    query_tokens: int = 32,
    passage_tokens: int = 256,
    hard_negatives: int = 1,
    precision: str = "fp32",
    lengths: str = "fixed",
    compile: bool = False,
    unpad: bool = False,
    gradient_checkpointing: bool = False,
    cuda_graphs: bool = False,
    memory: str | None = None,
    variants: Sequence[str] = tuple(VARIANTS),
    rounds: int = 3,
    updates: int = 3,
    output: str | Path | None = None,
    share: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Time and (on a GPU) peak memory of one update by our methods, sentence-transformers' losses and the paper's own way, side by side.

    Args:
        model: size of the towers: tiny, minilm-l3, minilm-l6, bert-base or bert-large
        n_total: samples per update, with commas between (default 128)
        n_local: samples per micro-batch, with commas between (default 8)
        bank: tuples in the bank, with commas between (default 1024)
        query_tokens: tokens per query
        passage_tokens: tokens per passage
        hard_negatives: hard negatives per query
        precision: fp32 or bf16
        lengths: of texts: fixed, or varied between a quarter of them and all
        compile: compile the towers' layers
        unpad: compute no padding
        gradient_checkpointing: recompute activations in the backward pass
        cuda_graphs: launch a tower's layers at once
        memory: limit PyTorch's GPU memory to this, as 11GB
        variants: variants to measure, with commas between (default: all)
        rounds: turns of each variant
        updates: updates timed per turn
        output: JSON file to write
        share: JSON file to write for others: GPU, driver, versions and rows, without anything of this machine's names and folders
    """
    options = {name: value for name, value in locals().items() if name not in ("output", "share")}
    check_file(output)
    check_file(share, [output], "--share")
    if memory is not None and (cannot := limit_memory(parse_bytes(memory))):
        print(f"note: {cannot}", file=sys.stderr)
    rows = []
    for sizes in product(n_total, n_local, bank):
        work = Workload(*sizes, query_tokens, passage_tokens, hard_negatives, precision, lengths)
        work = replace(work, compile=compile, unpad=unpad, checkpointing=gradient_checkpointing, graphs=cuda_graphs)
        rows += measure(model, work, variants, rounds, updates)
    if output is not None:
        with sole_path(output) as part:
            write_json(part, {"provenance": provenance(0), "rows": rows})
    if share is not None:
        with sole_path(share) as part:
            write_json(part, shared(rows, options))
    return rows


def measure(
    size: str,
    work: Workload,
    ways: Sequence[str] = tuple(VARIANTS),
    rounds: int = 3,
    updates: int = 3,
    device: str | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """`measure_cases` of one workload."""
    return measure_cases(size, [Case(way, work) for way in ways], rounds, updates, device, seed)


def measure_cases(
    size: str,
    cases: Sequence[Case],
    rounds: int = 3,
    updates: int = 3,
    device: str | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """A row per case: median seconds of an update, samples per second, peak memory, share of the GPU's peak, and its seconds over those of
    gradaccum with the same workload, where that is among the cases. Where memory ran out or PyTorch could not compile the towers, these
    are None and `failed` says so. `say` is called with a line for each turn.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check(size, cases, rounds, updates, device.startswith("cuda"))
    torch.manual_seed(seed)
    longest = max(max(case.work.query_tokens, case.work.passage_tokens) for case in cases)
    model = random_encoder(size, longest).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.startswith("cuda"))
    turns: dict[Case, list[Turn]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            if not any(turn.failed for turn in turns[case]):
                turns[case].append(turn := _turn(case, model, optimizer, updates, seed))
                say(_as_line(case, turn))
    rows = [_row(size, case, turns[case], seed) for case in cases]
    bases = {_comparable(case): row["seconds"] for case, row in zip(cases, rows, strict=True) if case.way == "gradaccum"}
    for case, row in zip(cases, rows, strict=True):
        base = bases.get(_comparable(case))
        row["time_over_gradaccum"] = row["seconds"] / base if row["seconds"] and base else None
    return rows


def _as_line(case: Case, turn: Turn) -> str:
    work = case.work
    marks = [work.precision, f"n = {work.n_local}", f"N_total = {work.n_total}"] + [f"bank = {work.bank}"] * VARIANTS[case.way].banked
    marks += ["compiled"] * work.compile + ["unpadded"] * work.unpad + ["checkpointing"] * work.checkpointing
    marks += ["CUDA graphs"] * work.graphs
    found = turn.failed or f"{statistics.median(turn.seconds):.3f} s"
    return f"{case.way}, {', '.join(marks)}: {found}"


def _comparable(case: Case) -> Workload:
    """gradaccum has no bank, so its time holds for any."""
    return replace(case.work, bank=0)


@dataclass(frozen=True)
class Turn:
    seconds: list[float]
    peak_bytes: int | None = None
    failed: str | None = None  # what kept it from the end


def _row(size: str, case: Case, turns: Sequence[Turn], seed: int) -> dict[str, Any]:
    failed = next((turn.failed for turn in turns if turn.failed), None)
    row = {"way": case.way, "banked": VARIANTS[case.way].banked, "model": size, **asdict(case.work), "failed": failed}
    if failed:
        return {**row, **dict.fromkeys(("seconds", "all_seconds", "samples_per_second", "peak_bytes", "peak_share"))}
    seconds = [second for turn in turns for second in turn.seconds]
    middle, peak = statistics.median(seconds), _bf16_peak()
    return {
        **row,
        "seconds": middle,
        "all_seconds": seconds,
        "samples_per_second": case.work.n_total / middle,
        "peak_bytes": turns[-1].peak_bytes,
        "peak_share": None if peak is None else operations(size, case, seed) / middle / peak,
    }


def _bf16_peak() -> float | None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)


def operations(size: str, case: Case, seed: int) -> float:
    """Of one update on real tokens, as the module says."""
    layers, width, _ = SIZES[size]
    lengths = random_lengths(case.work, seed)
    weights = 12 * layers * width**2  # 4 of attention, 8 of the feed-forward part; biases and norms left out
    tokens, squares = float(lengths.sum()), float((lengths.double() ** 2).sum())
    once = 6 * weights * tokens + 12 * layers * width * squares
    return once * (1 + (VARIANTS[case.way].cached + case.work.checkpointing) / 3)


def _turn(case: Case, model: SentenceTransformer, optimizer: torch.optim.Optimizer, updates: int, seed: int) -> Turn:
    work = case.work
    if work.checkpointing:
        for encoder in encoders(model):
            encoder.gradient_checkpointing_enable({"use_reentrant": False})
    if work.unpad:
        unpad_towers(model)
    if work.compile:
        compile_towers(model)
    if work.graphs:
        graph_towers(model)
    set_precision(model, work.precision)
    try:
        return _timed(VARIANTS[case.way], model, optimizer, work, updates, seed)
    except torch.OutOfMemoryError:
        return Turn([], failed="out of memory")
    except TorchDynamoException as error:
        first_line, *_ = str(error).strip().split("\n")
        return Turn([], failed=f"not compiled ({type(error).__name__}: {first_line})")
    finally:
        model.__dict__.pop("forward", None)
        for encoder in encoders(model):
            encoder.gradient_checkpointing_disable()
        ungraph_towers(model)
        uncompile_towers(model)
        repad_towers(model)
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _timed(way: Variant, model: SentenceTransformer, optimizer: torch.optim.Optimizer, work: Workload, updates: int, seed: int) -> Turn:
    """Time `updates` updates after a warm-up, and the peak that the allocator reached in them."""
    loss = way.build(model, work).to(model.device)
    batches = list(_micro_batches(model, way, work, seed))
    if way.banked:
        fill_bank(loss, model, work)
    few = replace(work, n_total=min(work.n_total, WARM_UP * work.n_local))
    warm_up = batches if (work.compile or work.graphs) and work.lengths == "varied" else list(_micro_batches(model, way, few, seed))
    for _ in range(2):  # the second finds everything compiled and recorded, for every length that there is
        make_update(model, loss, optimizer, warm_up)
    _wait(model.device, reset=True)
    seconds = []
    for _ in range(updates):
        started = time.perf_counter()
        make_update(model, loss, optimizer, batches)
        _wait(model.device)
        seconds.append(time.perf_counter() - started)
    if model.device.type != "cuda":
        return Turn(seconds, None)
    # what recordings use is not allocated while they are idle
    return Turn(seconds, torch.cuda.max_memory_reserved() if work.graphs else torch.cuda.max_memory_allocated())


def make_update(model: SentenceTransformer, loss: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[dict[str, Any]]]) -> None:
    for features in batches:
        (loss([dict(column) for column in features], None) / len(batches)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if isinstance(loss, ContAccumLoss):
        loss.criterion.after_update()


def _micro_batches(model: SentenceTransformer, way: Variant, work: Workload, seed: int) -> Iterator[list[dict[str, Any]]]:
    size = work.n_total if way.whole else work.n_local
    for lengths in random_lengths(work, seed).split(size):
        tasks = ["query"] + ["document"] * (1 + work.hard_negatives)
        columns = [random_features(model, task, column) for task, column in zip(tasks, lengths.unbind(1), strict=True)]
        # as towers count them when they tokenise, where they have to know
        counted = [{**column, COUNTS: counts} for column, counts in zip(columns, lengths.unbind(1), strict=True)]
        yield counted if work.unpad or work.graphs else columns


def set_precision(model: SentenceTransformer, precision: str) -> None:
    """As accelerate prepares a model: `forward` itself is in half precision, also where GradCache calls it in the backward pass."""
    dtype, forward = PRECISIONS[precision], type(model).forward
    if dtype is not None:
        half = torch.autocast(model.device.type, dtype)(lambda *inputs, **options: forward(model, *inputs, **options))
        model.forward = convert_outputs_to_fp32(half)  # type: ignore[method-assign]


def _wait(device: torch.device, reset: bool = False) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()


def _check(size: str, cases: Sequence[Case], rounds: int, updates: int, cuda: bool) -> None:
    if size not in SIZES:
        raise ValueError(f"model {size!r} is unknown; choose one of {', '.join(SIZES)}")
    if min(rounds, updates) < 1:
        raise ValueError(f"rounds={rounds} and updates={updates} must be 1 or more")
    for way, work in ((case.way, case.work) for case in cases):
        if way not in VARIANTS:
            raise ValueError(f"variant {way!r} is unknown; choose among {', '.join(VARIANTS)}")
        if work.n_local < 1 or work.n_total % work.n_local:
            raise ValueError(f"n_total={work.n_total} is not a multiple of n_local={work.n_local}")
        for name, least in {"n_total": 1, "query_tokens": 1, "passage_tokens": 1, "hard_negatives": 0, "bank": 0}.items():
            if getattr(work, name) < least:
                raise ValueError(f"{name}={getattr(work, name)} must be at least {least}")
        for name, choices in {"precision": PRECISIONS, "lengths": LENGTHS}.items():
            if getattr(work, name) not in choices:
                raise ValueError(f"{name} {getattr(work, name)!r} is unknown; choose one of {', '.join(choices)}")
        if work.unpad:
            check_unpadded(work.precision, work.compile, cuda)
        if work.graphs:
            check_graphs(work.checkpointing, work.unpad, cuda)
