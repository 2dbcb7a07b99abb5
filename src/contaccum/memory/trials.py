"""A plan tried out: what real updates on this machine's GPU make of what was predicted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

from contaccum.memory.planner import Fit, Measured, Plan, Planner, describe
from contaccum.methods.config import TrainConfig
from contaccum.towers.cuda_graphs import can_graph

DOUBT = 1.2  # a prediction this far above the room is believed


def verified(plan: Plan, planner: Planner, fixed: bool = False, larger: bool = True) -> Plan:
    """`plan` with the largest micro-batch size whose real updates fit in the planned part of the memory, and what they took.

    Begins with the predicted size. Where memory runs out, the smaller ones are bisected, else with `larger` those are tried that may fit
    after all. `fixed`: tries that size alone.
    """
    sizes = [plan.config.n_local] if fixed else planner.sizes(plan.config)
    first = sizes.index(plan.config.n_local)

    def attempt(place: int) -> Measured | None:
        config = replace(plan.config, n_local=sizes[place])
        assert planner.try_out is not None
        found = planner.try_out(config, planner.room, planner.query_tokens)
        planner.say(
            f"tried {describe(config)}: " + (f"{found.samples_per_second:.0f} samples/s" if found is not None else "memory ran out")
        )
        return found

    best = attempt(first)
    # between them lies the smallest that does not fit
    low, high = (first + 1, len(sizes) if larger else first + 1) if best is not None else (0, first)
    while low < high:
        place = low if low > first else (low + high) // 2
        if place > first and not _may_fit(planner, plan, sizes[place]):
            break
        measured = attempt(place)
        best = measured or best
        low, high = (place + 1, high) if measured is not None else (low, place)
    if best is None:
        raise ValueError(
            f"n_local={sizes[0]} did not run in {planner.room / 1e9:.2f} GB on this GPU; use more memory or a shorter --max-seq-length"
        )
    fit = planner.predict(replace(plan.config, n_local=best.n_local))
    return replace(plan, config=fit.config, prediction=fit.prediction, measured=best)


def faster(plan: Plan, planner: Planner) -> Plan:
    """The verified `plan`, or one whose updates were faster: with CUDA graphs, or with gradient checkpointing and larger micro-batches."""
    plans = [plan]
    for fit in _others(plan.config, planner):
        try:
            # what does not fit without CUDA graphs does not with them
            plans.append(verified(Plan(fit.config, plan.memory_bytes, fit.prediction), planner, larger=not fit.config.cuda_graphs))
        except (RuntimeError, ValueError) as error:
            warnings.warn(f"{describe(fit.config)}, which may be faster, could not be tried: {error}", stacklevel=2)
    best = max(plans, key=_rate)
    return replace(best, slower=[other.measured for other in plans if other is not best and other.measured is not None])


def _rate(plan: Plan) -> float:
    return 0.0 if plan.measured is None else plan.measured.samples_per_second


def _others(config: TrainConfig, planner: Planner) -> Iterator[Fit]:
    if config.gradient_checkpointing or config.cuda_graphs:
        return
    if planner.processes == 1 and all(map(can_graph, planner.predictor.configs)):
        yield planner.predict(replace(config, cuda_graphs=True))  # of towers without
    if planner.predictor.can_checkpoint:
        found = planner.largest(replace(config, gradient_checkpointing=True))
        if found is not None and found.config.n_local > config.n_local:
            yield found


def _may_fit(planner: Planner, plan: Plan, n_local: int) -> bool:
    return planner.predict(replace(plan.config, n_local=n_local)).prediction.peak_bytes <= DOUBT * planner.room
