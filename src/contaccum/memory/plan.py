"""`plan`: the largest micro-batch that fits in a memory, and what would let a larger one fit. Needs no GPU, no weights and little time.

1. `Predictor` predicts the peak of a configuration (see `contaccum.memory.prediction.update` for what is counted).
2. Micro-batch sizes are the divisors of an update; the largest whose peak leaves `MARGIN` of the memory free is taken.
3. Where not even one sample fits, gradient checkpointing is switched on. Where the plan is tried out on a GPU that its micro-batches cannot
   fill, two ways may be faster, and are where they were measured to be: larger micro-batches by gradient checkpointing, or CUDA graphs.
4. The same is asked of half precision, checkpointing and one tower for both, to say what they would buy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from contaccum.common.sizes import parse_bytes
from contaccum.memory.limit import device_bytes
from contaccum.memory.planner import MARGIN, Alternative, Fit, Plan, Planner, TryOut, gigabytes
from contaccum.memory.prediction.predict import Predictor, check
from contaccum.memory.trials import faster, verified
from contaccum.methods.config import TrainConfig, with_bank
from contaccum.methods.table import get_method, split_update


def plan(
    config: TrainConfig,
    query_tokens: int | None = None,
    n_local: int | None = None,
    processes: int = 1,
    apart: bool = False,
    alternatives: bool = True,
    try_out: TryOut | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """The plan for `config.memory`; ValueError if nothing fits.

    Args:
        config: what is to be trained. `n_local` is not looked at, and `gradient_checkpointing` switched on where nothing fits without. The
            rows are not known here: a bank of automatic size counts as large as it can get.
        query_tokens: longest query, where shorter than `config.max_seq_length`.
        n_local: judge this micro-batch size alone.
        apart: for `HalvingTrainer`, which keeps each micro-step's gradients apart until it has succeeded.
        alternatives: also look for what would allow a larger micro-batch.
        try_out: runs real updates (`contaccum.training.trial.try_in_process`); the largest micro-batch size that they allow is taken, with
            gradient checkpointing or CUDA graphs where that is faster. A given `n_local` is tried as it is. None: nothing is run.
        say: called with a line for each size that was tried, which takes a while.
    """
    config = with_bank(config)
    if config.memory is None:
        raise ValueError("no memory to plan for: give --memory, as 11GB")
    check(config, query_tokens)
    method = get_method(config.method)
    split_update(method, config.n_total, max(1, config.n_total // processes) if n_local is None else n_local, processes)
    planner = Planner(Predictor(config), parse_bytes(config.memory), query_tokens, processes, apart, try_out, say)
    fit = _best(planner, config) if n_local is None else _given(planner, replace(config, n_local=n_local))
    result = Plan(fit.config, planner.memory_bytes, fit.prediction)
    if try_out is not None:
        result = verified(result, planner, fixed=n_local is not None)
        if n_local is None:
            result = faster(result, planner)
    if alternatives and not method.one_batch and result.config.n_local < planner.sizes(result.config)[-1]:
        result = replace(result, more=list(_alternatives(planner, result.config)))
    return result


def planned(config: TrainConfig, hard_negatives: int, processes: int = 1) -> TrainConfig:
    """`config` with `n_local`, and gradient checkpointing where it is needed, as planned for `--n-local auto`."""
    if config.whole_updates:
        raise ValueError("n_local=auto fits micro-batches into the memory, but whole_updates encodes n_total at once; use one of them")
    memory = config.memory or (f"{device_bytes()}B" if torch.cuda.is_available() else None)
    if memory is None:
        raise ValueError("n_local=auto needs a memory to fill: give --memory, as 11GB")
    asked = replace(config, hard_negatives=hard_negatives, memory=memory)  # a run is resumed with the memory it was given
    found = plan(asked, processes=processes, apart=processes == 1, alternatives=False)
    return replace(config, n_local=found.config.n_local, gradient_checkpointing=found.config.gradient_checkpointing)


def _best(planner: Planner, config: TrainConfig) -> Fit:
    found = planner.largest(config)
    if found is None and not config.gradient_checkpointing and _may_checkpoint(planner, config):
        found = planner.largest(replace(config, gradient_checkpointing=True))
    if found is None:
        raise ValueError(_nothing_fits(planner, config))
    return found


def _may_checkpoint(planner: Planner, config: TrainConfig) -> bool:
    return planner.predictor.can_checkpoint and not config.cuda_graphs


def _given(planner: Planner, config: TrainConfig) -> Fit:
    fit = planner.predict(config)
    if fit.prediction.peak_bytes > planner.room:
        best = planner.largest(config)
        remedy = f"n_local={best.config.n_local} fits" if best else "no n_local fits; try --gradient-checkpointing or --precision bf16"
        raise ValueError(f"n_local={config.n_local} needs {gigabytes(fit.prediction.peak_bytes)}, {_room(planner)}; {remedy}")
    return fit


def _nothing_fits(planner: Planner, config: TrainConfig) -> str:
    smallest = replace(config, n_local=planner.sizes(config)[0], gradient_checkpointing=_may_checkpoint(planner, config))
    needed = planner.predict(smallest).prediction.peak_bytes
    checkpointing = " and gradient checkpointing" if smallest.gradient_checkpointing else ""
    what = f"{config.method} with n_local={smallest.n_local}, {config.max_seq_length} tokens, {config.precision}{checkpointing}"
    fitting = [options for options, changed, _ in _changes(planner, smallest) if planner.largest(changed) is not None]
    remedy = f"{fitting[0]} would fit" if fitting else "use a smaller model, a shorter --max-seq-length or more memory"
    if get_method(config.method).one_batch:
        remedy = "use gradaccum or contaccum, whose micro-batches can be smaller"
    return f"memory {config.memory} is too small: {what} needs {gigabytes(needed)}, {_room(planner)}; {remedy}"


def _alternatives(planner: Planner, config: TrainConfig) -> Iterator[Alternative]:
    """Changes that allow a larger micro-batch than `config.n_local`; two at once only where that allows more than each alone."""
    reached = config.n_local
    for options, changed, price in _changes(planner, config):
        if options.count("--") > 1 and reached == planner.sizes(config)[-1]:
            continue
        found = planner.largest(changed)
        if found is None or found.config.n_local <= (reached if options.count("--") > 1 else config.n_local):
            continue
        reached = max(reached, found.config.n_local)
        yield Alternative(options, found.config.n_local, found.prediction.peak_bytes, price)


def _changes(planner: Planner, config: TrainConfig) -> Iterator[tuple[str, TrainConfig, str]]:
    half = replace(config, precision="bf16")
    recompute = "one more forward pass"
    if config.precision == "fp32":
        yield "--precision bf16", half, "half precision"
    if not config.gradient_checkpointing and _may_checkpoint(planner, config):
        yield "--gradient-checkpointing", replace(config, gradient_checkpointing=True), recompute
        if config.precision == "fp32":
            yield "--precision bf16 --gradient-checkpointing", replace(half, gradient_checkpointing=True), f"half precision; {recompute}"
    if not config.tied and config.passage_model is None:
        yield "--tied", replace(config, tied=True), "one tower for queries and passages: another model"


def _room(planner: Planner) -> str:
    return f"more than {1 - MARGIN:.0%} of {gigabytes(planner.memory_bytes)}"
