"""PyTorch's CUDA caching allocator for one stream, on paper: what it reserves for a sequence of allocations and releases.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings:

1. sizes are rounded up to 512 bytes;
2. up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more from a segment of its own, rounded up to 2 MiB;
3. the smallest free block that is large enough is taken, and split where what remains is worth keeping;
4. a released block joins free neighbours of its segment and stays reserved;
5. where the limit forbids a new segment, all wholly free segments are given back first; if that is not enough, memory has run out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
BLOCK = 512
SMALL = 1 * MIB  # largest allocation of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from here on an allocation has a segment of its own
SEGMENT_ROUNDING = 2 * MIB


class OutOfBudget(Exception):
    """What the limited allocator would answer with torch.OutOfMemoryError."""


@dataclass(eq=False)
class Block:
    """A piece of a segment, between its neighbours."""

    address: int
    size: int
    small: bool
    previous: Block | None = None
    next: Block | None = None
    free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


def rounded(size: int) -> int:
    return max(BLOCK, -(-size // BLOCK) * BLOCK)


def segment_size(size: int) -> int:
    """Of the segment that is reserved where no free block holds `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


class CachingAllocator:
    """Counts what is allocated (in blocks) and reserved (in segments) now and at most."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit = limit_bytes
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by pool, smallest first, then by address
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        size = rounded(size)
        small = size <= SMALL
        block = self._best_fit(size, small) or self._new_segment(size, small)
        rest = block.size - size
        if rest >= BLOCK if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        self.allocated -= block.size
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block = _joined(neighbour, block) if neighbour is block.previous else _joined(block, neighbour)
        block.free = True
        insort(self._free[block.small], (*block.key, block))

    def _best_fit(self, size: int, small: bool) -> Block | None:
        pool = self._free[small]
        place = bisect_left(pool, (size,))
        return pool.pop(place)[2] if place < len(pool) else None

    def _new_segment(self, size: int, small: bool) -> Block:
        wanted = segment_size(size)
        if self.limit is not None and self.reserved + wanted > self.limit:
            self._give_back_free_segments()
            if self.reserved + wanted > self.limit:
                raise OutOfBudget(f"{self.reserved + wanted:,} bytes would be reserved, {self.limit:,} are allowed")
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = Block(self._next_address, wanted, small)
        self._next_address += wanted
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, block, block.next, free=True)
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        insort(self._free[block.small], (*rest.key, rest))

    def _take(self, block: Block) -> None:
        """Out of the free list."""
        pool = self._free[block.small]
        del pool[bisect_left(pool, block.key)]

    def _give_back_free_segments(self) -> None:
        for small, pool in self._free.items():
            kept = [entry for entry in pool if entry[2].previous is not None or entry[2].next is not None]
            self.reserved -= sum(size for size, _, _ in pool) - sum(size for size, _, _ in kept)
            self._free[small] = kept


def _joined(left: Block, right: Block) -> Block:
    """Two neighbours as one, which is `left`."""
    left.size += right.size
    left.next = right.next
    if right.next is not None:
        right.next.previous = left
    return left
