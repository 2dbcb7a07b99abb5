"""The methods by name: how an update of n_total samples is cut up, and what the bank holds. One table, no copies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    summary: str
    one_batch: bool = False  # one batch of n_total instead of micro-batches of n_local
    cached: bool = False  # GradCache: n_total at once, n_local samples' activations alive
    bank: bool = False
    query_bank: bool = True
    clear_after_update: bool = False


METHODS = {
    "dpr": Method("one batch of n_total, negatives from all of it", one_batch=True),
    "gradaccum": Method("micro-batches of n_local, negatives from each alone"),
    "gradcache": Method("gradient of the whole batch in two passes", cached=True),
    "prebatch": Method("micro-batches and a bank of past passages", bank=True, query_bank=False),
    "contaccum": Method("micro-batches and a bank of past queries and passages", bank=True),
    "contaccum-gradcache": Method("whole batch in two passes, and the dual bank", cached=True, bank=True),
    "contaccum-no-past": Method("dual bank, emptied at every update", bank=True, clear_after_update=True),
    "prebatch-no-past": Method("bank of passages, emptied at every update", bank=True, query_bank=False, clear_after_update=True),
}


@dataclass(frozen=True)
class Batches:
    """One process's share of an update."""

    per_process: int  # samples in one forward of the loss
    accumulation: int  # such forwards per update
    mini: int | None  # samples whose activations are alive at once, under GradCache
    slice: int | None = None  # samples per micro-loss, where a forward holds several
    by_tokens: bool = False  # cut further as the texts' lengths allow (`contaccum.memory.token_budget`)

    @property
    def micro_batch(self) -> int:
        """Samples of this process in one loss, at least."""
        return 1 if self.by_tokens else self.slice or self.per_process


def get_method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def split_update(
    method: Method, n_total: int, n_local: int, processes: int = 1, whole_updates: bool = False, by_tokens: bool = False
) -> Batches:
    """How `processes` processes, each with room for `n_local` samples, share an update of `n_total`.

    With `whole_updates` each has room for all of its share: one forward, from which the same gradients are computed. `by_tokens`: each
    gets its share, to cut it by the texts' lengths.
    """
    if n_total < 1 or n_local < 1:
        raise ValueError(f"n_total={n_total} and n_local={n_local} must be at least 1")
    if n_total % processes:
        raise ValueError(f"n_total={n_total} cannot be shared by {processes} processes; use a multiple")
    share = n_total // processes
    if method.one_batch:
        return Batches(share, 1, None)
    if by_tokens:
        return Batches(share, 1, n_local) if method.cached else Batches(share, 1, None, by_tokens=True)
    if share % n_local:
        of = f"n_total={n_total}" + (f" over {processes} processes" if processes > 1 else "")
        fits = next(n for n in range(min(n_local, share), 0, -1) if share % n == 0)
        larger = max(1, share // n_local) * n_local * processes
        raise ValueError(f"{of} is not a multiple of n_local={n_local}; use n_local={fits}, or n_total={larger}")
    if whole_updates:
        return Batches(share, 1, None, None if method.cached else n_local)
    if method.cached:
        return Batches(share, 1, n_local)
    return Batches(n_local, share // n_local, None)
