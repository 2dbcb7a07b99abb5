"""One recording of a tower's layers, and what recordings share. What is recorded, and when it is replayed: `contaccum.towers.cuda_graphs`.

- `Recording`: a forward and a backward pass for inputs of one shape, each a CUDA graph.
- `RecordingPool`: the memory that recordings use, one pass at a time.
- `Gradients`: where their backward passes add. These are the parameters' own gradients, parts of one tensor that stays where it is.
- `Replay`: a replayed recording as autograd sees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.utils._pytree import tree_flatten, tree_unflatten

_TENSOR = object()
SPARE = 64 << 20  # bytes that a recording leaves to what comes between micro-steps: it keeps its memory, where other passes give it back


class Recording:
    """The forward and backward pass of `call` for inputs of one shape. Gradients of `parameters` are added where the pool has them."""

    def __init__(
        self, call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter], pool: RecordingPool
    ) -> None:
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        random = torch.cuda.get_rng_state()
        try:
            self._capture(call, parameters, pool)
        finally:
            torch.cuda.set_rng_state(random)

    def _capture(self, call: Callable[[Sequence[Tensor]], Any], parameters: Sequence[nn.Parameter], pool: RecordingPool) -> None:
        assert pool.memory is not None
        handle: Any = pool.memory.id
        wanted = [*(tensor for tensor in self.inputs if tensor.requires_grad), *parameters]
        # other threads may copy and allocate meanwhile
        recorded = partial(torch.cuda.graph, pool=handle, stream=_stream(), capture_error_mode="thread_local")
        # weights change between replays, so each has to cast them again
        half = torch.autocast("cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False)
        with half, torch.autograd.set_multithreading_enabled(False):
            torch.cuda.empty_cache()  # where memory runs out in what follows, PyTorch does not do so by itself
            spare = torch.empty(SPARE, dtype=torch.uint8, device="cuda")
            _stream().wait_stream(torch.cuda.current_stream())
            # kernels are loaded and compiled before they are recorded
            with torch.cuda.stream(_stream()), torch.cuda.use_mem_pool(pool.memory), _gradients_dropped(wanted):
                outputs = self._keep(call(self.inputs))
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs], inputs=wanted)
                del outputs
            with recorded(self.forward):
                outputs = self._keep(call(self.inputs))
            self.output_gradients = [torch.zeros_like(output) for output in outputs]
            for parameter, part in zip(parameters, pool.gradients.parts, strict=True):
                parameter.grad = part  # which autograd adds to in place, one after the other
            with recorded(self.backward):
                torch.autograd.backward(outputs, self.output_gradients, inputs=wanted)
            del spare
        self.outputs = [output.detach() for output in outputs]  # without what the backward pass needs, which others may overwrite
        self.input_gradients = [tensor.grad for tensor in self.inputs]

    def _keep(self, result: Any) -> list[Tensor]:
        """The tensors of `call`'s result; of the result itself its form is kept, and what is no tensor."""
        leaves, self.form = tree_flatten(result)
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """As `call` returns it."""
        values = iter(outputs)
        return tree_unflatten([next(values) if leaf is _TENSOR else leaf for leaf in self.leaves], self.form)

    def replay_forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.detach().copy_(tensor)
        self.forward.replay()
        return self.outputs

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the inputs; those of parameters are then in the pool."""
        for place, gradient in zip(self.output_gradients, gradients, strict=True):
            place.copy_(gradient)
        self.backward.replay()
        return self.input_gradients


@contextmanager
def _gradients_dropped(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Gradients that a backward pass computes go as soon as they are there."""
    hooks = [leaf.register_post_accumulate_grad_hook(_drop_gradient) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None


_streams: dict[int, torch.cuda.Stream] = {}


def _stream() -> torch.cuda.Stream:
    """The one that is recorded on: memory that is freed on one stream can be used again there only."""
    return _streams.setdefault(torch.cuda.current_device(), torch.cuda.Stream())


class Gradients:
    """Where the recorded backward passes of a tower add: the parameters' own gradients, unless somebody else holds what is there."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        self.parts = _unflatten_dense_tensors(self.flat, parameters)
        self.alone = self._holders()

    def _holders(self) -> int:
        """Tensors in this memory."""
        return int(torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata))

    @contextmanager
    def added(self) -> Iterator[None]:
        """What is added to `parts` inside is added to the gradients of the parameters."""
        places = list(zip(self.parameters, self.parts, strict=True))
        without = [(p, part) for p, part in places if p.grad is None]
        elsewhere = any(p.grad is not None and p.grad.data_ptr() != part.data_ptr() for p, part in places)
        held = self._holders() > self.alone + len(places) - len(without)  # by somebody else, and not to be written to
        if elsewhere or held:
            with self._lent():
                yield
            return
        if without:
            torch._foreach_zero_([part for _, part in without])
        for p, part in without:
            p.grad = part.view_as(part)
        yield

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """The same where what is there has to be there again afterwards."""
        kept = self.flat.clone()
        self.flat.zero_()
        try:
            yield
            new = _unflatten_dense_tensors(self.flat.clone(), self.parameters)
        finally:
            self.flat.copy_(kept)
        there = [(p.grad, part) for p, part in zip(self.parameters, new, strict=True) if p.grad is not None]
        if there:
            torch._foreach_add_([gradient for gradient, _ in there], [part for _, part in there])
        for p, part in zip(self.parameters, new, strict=True):
            if p.grad is None:
                p.grad = part


class RecordingPool:
    """What recordings of one tower share: their memory, and where they leave the gradients of its parameters. Owned by one pass."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self._owner: weakref.ref[Any] | None = None
        self.forget()

    def forget(self) -> None:
        """All recordings, and then their memory: not every PyTorch lets it go before them."""
        self.largest = 0
        self.recordings: dict[Any, Recording] = {}
        self.memory = torch.cuda.MemPool() if torch.cuda.is_available() else None

    @property
    def free(self) -> bool:
        return self._owner is None or self._owner() is None

    def owned_by(self, owner: Any) -> bool:
        return self._owner is not None and self._owner() is owner

    def take(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    def give_back(self) -> None:
        self._owner = None


class _Pass:
    """Owns a pool as long as autograd may ask for its backward pass."""


class Replay(torch.autograd.Function):
    """A recording in place of what was recorded, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, pool: RecordingPool, recording: Recording, parameter: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        # `parameter`: one of those that have gradients, whether the inputs do or not
        ctx.recording, ctx.pool, ctx.owner = recording, pool, _Pass()  # let go in this order, see `RecordingPool.forget`
        pool.take(ctx.owner)
        return tuple(output.clone() for output in recording.replay_forward(inputs))  # the next pass writes to the same place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        pool: RecordingPool = ctx.pool
        if not pool.owned_by(ctx.owner):
            raise RuntimeError("a second backward pass through towers with CUDA graphs; leave cuda_graphs out")
        with pool.gradients.added():
            of_inputs = ctx.recording.replay_backward(gradients)
        pool.give_back()
        return (None, None, None, *of_inputs)
