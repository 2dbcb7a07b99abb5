"""What code allocates and releases, recorded while it runs on tensors without data; and how that grows with the batch.

1. `Recorder` sees every operation's results. A storage that it has not seen is an allocation; when the last tensor and the last node of the
   autograd graph that hold it are gone, it is released. What autograd saves for the backward pass is therefore what is still allocated
   when the forward pass has ended, each storage counted once.
2. The same code with another batch gives the same sequence with other sizes, each affine in the number of samples: `fit` takes base and
   slope of every allocation from two batches and checks them with a third. `AffineTrace.sizes` is then exact for any batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Events = tuple[int, ...]  # i: allocation number i is made; ~i: it is released


@dataclass(frozen=True)
class Trace:
    sizes: tuple[int, ...]  # bytes of each allocation
    segments: tuple[Events, ...]  # consecutive parts of what happened
    kept: tuple[tuple[int, int], ...] = ()  # (place in the last segment, allocation) that became a parameter's gradient


@dataclass(frozen=True)
class AffineTrace:
    """`sizes(n)[i] = base[i] + n * slope[i]`; what happens is the same for every n."""

    base: tuple[int, ...]
    slope: tuple[int, ...]
    segments: tuple[Events, ...]
    kept: tuple[tuple[int, int], ...]

    def sizes(self, samples: int) -> list[int]:
        return [base + samples * slope for base, slope in zip(self.base, self.slope, strict=True)]

    def alive_after(self, segment: int) -> set[int]:
        """Allocations made and not released by the end of a segment."""
        alive: set[int] = set()
        for event in (event for part in self.segments[: segment + 1] for event in part):
            if event >= 0:
                alive.add(event)
            else:
                alive.discard(~event)
        return alive


def fit(traces: dict[int, Trace], what: str) -> AffineTrace:
    """The affine trace through the recorded ones, by number of samples; at least three of them."""
    (first, a), (second, b), *others = sorted(traces.items())
    alike = all((t.segments, t.kept) == (a.segments, a.kept) for t in traces.values())
    slope = [(y - x) // (second - first) for x, y in zip(a.sizes, b.sizes, strict=alike)]
    base = [x - first * s for x, s in zip(a.sizes, slope, strict=alike)]
    fitted = AffineTrace(tuple(base), tuple(slope), a.segments, a.kept)
    if not alike or any(tuple(fitted.sizes(n)) != t.sizes for n, t in [(second, b), *others]):
        raise ValueError(f"the memory of {what} does not grow evenly with the batch, so that it cannot be planned; give --n-local yourself")
    return fitted


class Recorder(TorchDispatchMode):
    """Allocations and releases of the operations under it, in their order."""

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._sizes: list[int] = []
        self._segments: list[list[int]] = [[]]
        self._kept: list[tuple[int, int]] = []
        self._numbers: dict[int, int | None] = {}  # of the storages that live now; None: not counted
        self._ignored: list[Tensor] = []
        self.ignore(ignore)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Not counted. They are held, lest another storage take the place of theirs."""
        tensors = list(tensors)
        self._ignored += tensors
        self._numbers |= dict.fromkeys((_storage_id(tensor) for tensor in tensors), None)

    def next_segment(self) -> None:
        self._segments.append([])

    def number(self, tensor: Tensor) -> int | None:
        """Of the allocation that holds `tensor`."""
        return self._numbers.get(_storage_id(tensor))

    def keep(self, tensor: Tensor) -> None:
        """`tensor` has just become a gradient that stays."""
        number = self.number(tensor)
        if number is not None:
            self._kept.append((len(self._segments[-1]), number))

    def trace(self) -> Trace:
        *others, last = self._segments
        segments = [*(sorted_releases(segment) for segment in others), sorted_releases(last, {place for place, _ in self._kept})]
        return Trace(tuple(self._sizes), tuple(segments), tuple(self._kept))

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._see(result)
        return results

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._numbers:
            return
        number = len(self._sizes)
        self._numbers[identity] = number
        self._sizes.append(storage.nbytes())
        self._segments[-1].append(number)
        weakref.finalize(storage, self._released, identity, number)

    def _released(self, identity: int, number: int) -> None:
        if self._numbers.get(identity) == number:
            del self._numbers[identity]
            self._segments[-1].append(~number)


def sorted_releases(events: list[int], marks: set[int] | None = None) -> Events:
    """Releases that follow each other, sorted: autocast drops its cache in no certain order. None moves across a mark."""
    result: list[int] = []
    run: list[int] = []
    for place, event in enumerate(events):
        if run and (event >= 0 or place in (marks or ())):
            result += sorted(run, reverse=True)
            run = []
        (result if event >= 0 else run).append(event)
    return (*result, *sorted(run, reverse=True))


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
