"""The memory of an update, from what its parts allocate: the parts' recordings are played to the allocator in the order of training.

1. Parameters, and the work space of the matrix library for the forward and the backward thread.
2. The texts of an update, all its micro-batches at once.
3. A micro-step: both towers forward; loss and bank; backward through the passage tower, then the query tower. Or, by GradCache: all
   embeddings, loss and bank, then every mini-batch forward and backward alone.
4. The first update ends: AdamW's two moments are allocated, gradients are released.
5. The second update: a micro-step that makes the gradients, and where there are several micro-steps, one that adds to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from contaccum.memory.prediction import loss as plan_loss
from contaccum.memory.prediction import towers as plan_towers
from contaccum.memory.prediction.allocator import Block, CachingAllocator
from contaccum.memory.prediction.loss import LossTrace
from contaccum.memory.prediction.towers import Tower
from contaccum.memory.prediction.trace import Events

INT64 = 8
FEATURES = 3  # input_ids, attention_mask, token_type_ids


@dataclass(frozen=True)
class TowerInput:
    """A tower and the texts that pass through it at once."""

    tower: Tower
    tokens: int
    columns: int  # 1 for queries; positives and hard negatives for passages


@dataclass(frozen=True)
class Update:
    """All that decides the memory of an update."""

    queries: TowerInput
    passages: TowerInput
    tied: bool
    samples: int  # whose activations are alive at once
    micro_steps: int
    loss: LossTrace
    cached: int | None = None  # GradCache: samples in the batch, `samples` of one column at a time in a mini-batch
    apart: bool = False  # each micro-step's gradients are computed apart and added when it has succeeded, as `HalvingTrainer` does
    workspace_bytes: int = 0  # of the matrix library, per thread

    @property
    def towers(self) -> list[Tower]:
        return [self.queries.tower] if self.tied else [self.queries.tower, self.passages.tower]


Holding = tuple[Block, str, int]


class Meter:
    """An allocator that knows what its memory is for."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.allocator = CachingAllocator(limit_bytes)
        self.live: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}

    def allocate(self, size: int, kind: str) -> Holding:
        before = self.allocator.peak_allocated
        block = self.allocator.allocate(size)
        self.live[kind] += block.size
        if self.allocator.peak_allocated > before:
            self.at_peak = dict(self.live)
        return block, kind, block.size

    def release(self, holdings: Iterable[Holding]) -> None:
        for block, kind, size in holdings:
            self.live[kind] -= size
            self.allocator.release(block)


class Replay:
    """A recording played to a meter, a segment at a time."""

    def __init__(self, meter: Meter, sizes: list[int] | tuple[int, ...], kinds: list[str]) -> None:
        self.meter, self.sizes, self.kinds = meter, sizes, kinds
        self.held: dict[int, Holding] = {}

    def play(self, events: Events) -> None:
        for event in events:
            if event >= 0:
                self.held[event] = self.meter.allocate(self.sizes[event], self.kinds[event])
            else:
                self.meter.release([self.held.pop(~event)])


class Pass(Replay):
    """A forward and a backward pass through a tower."""

    def __init__(self, meter: Meter, tower: Tower, samples: int) -> None:
        self.passes = tower.passes
        gradients = {number for _, number in self.passes.kept}
        kinds = ["gradients" if i in gradients else "temporary" for i in range(len(self.passes.base))]
        for number in self.passes.alive_after(plan_towers.FORWARD):
            kinds[number] = "activations"
        super().__init__(meter, self.passes.sizes(samples), kinds)

    def forward(self) -> None:
        self.play(self.passes.segments[plan_towers.FORWARD])

    def drop_outputs(self) -> None:
        self.play(self.passes.segments[plan_towers.DROP])

    def backward(self) -> list[Holding]:
        """The gradients that stay."""
        self.play(self.passes.segments[plan_towers.BACKWARD])
        return list(self.held.values())

    def backward_adding(self) -> None:
        """Where there are gradients: each new one is added to them and released at once."""
        events, start = self.passes.segments[plan_towers.BACKWARD], 0
        for place, number in self.passes.kept:
            self.play(events[start:place])
            self.play((~number,))
            start = place
        self.play(events[start:])


class Simulation:
    """`run` plays two updates; the meter then knows the peak."""

    def __init__(self, update: Update, limit_bytes: int | None = None) -> None:
        self.update = update
        self.meter = Meter(limit_bytes)
        self.loss = Replay(self.meter, update.loss.trace.sizes, update.loss.kinds)
        self.loss_steps = 0
        self.gradients: dict[int, list[Holding]] = {}  # by tower, queries' and passages' the same where tied

    def run(self) -> Meter:
        update = self.update
        for _ in range(2):
            self.meter.allocate(update.workspace_bytes, "workspace")
        for tower in update.towers:
            self._allocate_all(tower.fixed, "parameters")
        for number in range(2):
            texts = self._texts()
            for _ in range(min(update.micro_steps, 1 + number)):
                self._micro_step()
            if number == 0:
                for tower in update.towers:
                    for size in tower.trainable:
                        self._allocate_all((4, size, size), "optimizer")
            self._release_gradients(self.gradients)
            self.meter.release(texts)
        return self.meter

    def _texts(self) -> list[Holding]:
        update = self.update
        samples = update.cached or update.samples
        sizes = [INT64 * samples * t.tokens for t in (update.queries, update.passages) for _ in range(t.columns * FEATURES)]
        return self._allocate_all(sizes * update.micro_steps, "texts")

    def _micro_step(self) -> None:
        fresh: dict[int, list[Holding]] = {} if self.update.apart else self.gradients
        if self.update.cached is None:
            self._towers_together(fresh)
        else:
            self._mini_batches(fresh)
        if fresh is self.gradients:
            return
        if self.gradients:
            self._release_gradients(fresh)
        else:
            self.gradients = fresh

    def _towers_together(self, gradients: dict[int, list[Holding]]) -> None:
        update = self.update
        queries = Pass(self.meter, update.queries.tower, update.samples * update.queries.columns)
        passages = Pass(self.meter, update.passages.tower, update.samples * update.passages.columns)
        queries.forward()
        passages.forward()
        self._loss(plan_loss.FORWARD)
        queries.drop_outputs()
        passages.drop_outputs()
        self._loss(plan_loss.BACKWARD)
        self._backward(passages, 0 if update.tied else 1, gradients)
        self._backward(queries, 0, gradients)
        self._loss(plan_loss.END)

    def _mini_batches(self, gradients: dict[int, list[Holding]]) -> None:
        update = self.update
        batch = update.cached or 0
        sides = ((0, update.queries), (0 if update.tied else 1, update.passages))
        mini_batches = [(index, texts.tower) for index, texts in sides for _ in range(texts.columns * -(-batch // update.samples))]
        embeddings = self._allocate_all((4 * tower.width * update.samples for _, tower in mini_batches), "embeddings")
        self._loss(plan_loss.FORWARD)
        self._loss(plan_loss.BACKWARD)
        played: Counter[int] = Counter()
        for index, tower in mini_batches:
            played[index] += 1
            if played[index] <= 2:  # the others repeat the second
                one = Pass(self.meter, tower, update.samples)
                one.forward()
                one.drop_outputs()
                self._backward(one, index, gradients)
        self.meter.release(embeddings)
        self._loss(plan_loss.END)

    def _backward(self, one: Pass, index: int, gradients: dict[int, list[Holding]]) -> None:
        if index in gradients:
            one.backward_adding()
        else:
            gradients[index] = one.backward()

    def _loss(self, part: int) -> None:
        self.loss.play(self.update.loss.segment(self.loss_steps, part))
        self.loss_steps += part == plan_loss.END

    def _allocate_all(self, sizes: Iterable[int], kind: str) -> list[Holding]:
        return [self.meter.allocate(size, kind) for size in sizes]

    def _release_gradients(self, gradients: dict[int, list[Holding]]) -> None:
        for held in gradients.values():
            self.meter.release(held)
        gradients.clear()
