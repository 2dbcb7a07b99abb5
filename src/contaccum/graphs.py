"""Towers as CUDA graphs: what the layers launch is recorded once for each shape, and replayed as a whole.

A micro-batch of a few texts is computed faster than Python can launch its kernels, and the GPU waits. A recorded pass is one launch.

- Recorded are a tower's layers, forward and backward, when a shape is first seen in training. Batches are padded to a multiple of
  `MULTIPLE` tokens, so that shapes are few. Everything else (embeddings, pooling, the loss, passes without gradients) runs as always.
- A recording reads and writes fixed addresses. So one pass at a time owns a `Lane`, from its forward pass to the end of its backward
  pass; the recordings of a lane share its memory. Where a tower has more passes under way than `LANES`, they are not replayed.
- A recorded backward pass adds to the gradients of all parameters itself, not through autograd. (So does `torch.autograd.grad`, whatever
  it is asked for.) They are parts of one tensor of the tower's, which stays where it is. Hooks would not be called, so where there are
  any, and with several processes, nothing is replayed.
- Weights that are moved, frozen or released are noticed, and everything is recorded anew.
- Random numbers go on as if nothing had been recorded: dropout draws what it always draws.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PretrainedConfig, PreTrainedModel

from contaccum.speed import UNPADDABLE, attends_to_all, count_tokens, encoders, shows_layers, stacks, towers, uncount_tokens

MULTIPLE = 32  # tokens
LANES = 2  # passes of one tower at a time: two where it serves queries and passages
LIMIT = 64  # recordings of a lane
_TENSOR = object()


def graph_towers(model: SentenceTransformer) -> None:
    """Record and replay the layers of all towers in training; ValueError for an encoder that cannot."""
    for encoder in encoders(model):
        if not attends_to_all(encoder.config):
            raise ValueError(f"cuda_graphs=true is not possible for {encoder.config.model_type}; it is for {', '.join(UNPADDABLE)}")
        if encoder.config._attn_implementation != "sdpa":
            raise ValueError(f"cuda_graphs=true is not possible with {encoder.config._attn_implementation} attention; it is with sdpa")
        if shows_layers(encoder.config):
            raise ValueError("cuda_graphs=true is not possible for an encoder that also gives what is inside its layers; leave it out")
    for tower in towers(model):
        count_tokens(tower)
        # sentence-transformers calls `forward`, not the module
        tower.auto_model.forward = types.MethodType(_forward_padded, tower.auto_model)
        for stack, _ in stacks(tower.auto_model):
            stack.forward = GraphedStack(stack)


def can_graph(config: PretrainedConfig) -> bool:
    """Whether `graph_towers` can record such an encoder, with the attention that it comes with."""
    return attends_to_all(config) and not shows_layers(config)


def ungraph_towers(model: SentenceTransformer) -> None:
    for tower in towers(model):
        graphed = [stack for stack, _ in stacks(tower.auto_model) if isinstance(stack.__dict__.get("forward"), GraphedStack)]
        for stack in graphed:
            del stack.forward
        if graphed:
            uncount_tokens(tower)
            del tower.auto_model.forward


def forget_recordings(model: nn.Module) -> None:
    """Give their memory back. What is needed again is recorded again."""
    for encoder in encoders(model):
        for stack, _ in stacks(encoder):
            if isinstance(graphed := stack.__dict__.get("forward"), GraphedStack):
                graphed.lanes = []  # gradients stay: parameters have them


def check_graphs(checkpointing: bool, unpad: bool, cuda: bool, processes: int = 1) -> None:
    """ValueError for what does not go together with recorded layers."""
    if not cuda:
        raise ValueError("cuda_graphs needs an NVIDIA GPU; leave it out")
    if processes > 1:
        raise ValueError(f"cuda_graphs is for one process, not {processes}; leave it out")
    if checkpointing or unpad:
        other = "gradient_checkpointing" if checkpointing else "unpad"
        raise ValueError(f"cuda_graphs and {other} do not go together; leave one of them out")


def _forward_padded(
    self: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    token_counts: Tensor | list[int] | None = None,
    **options: Any,
) -> Any:
    """As the encoder's own forward, in training on a multiple of `MULTIPLE` tokens where it has positions for them, and without asking the
    device whether a mask is needed.
    """
    texts, tokens = input_ids.shape
    room = int(self.config.max_position_embeddings) - tokens
    longer = -tokens % MULTIPLE if self.training and -tokens % MULTIPLE <= room else 0
    full = attention_mask is None
    if token_counts is not None and len(token_counts) == texts:  # else unknown, or of a batch that this is a part of
        full = int(torch.as_tensor(token_counts).min()) == tokens
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = functional.pad(mask.bool(), (0, longer))
    if token_type_ids is not None:
        options["token_type_ids"] = functional.pad(token_type_ids, (0, longer))
    output = type(self).forward(
        self,
        input_ids=functional.pad(input_ids, (0, longer), value=self.config.pad_token_id or 0),
        attention_mask=None if full and not longer else mask[:, None, None],  # as it is then passed on to the layers
        **options,
    )
    output.last_hidden_state = output.last_hidden_state[:, :tokens]
    return output


class GraphedStack:
    """The `forward` of a stack of layers, replayed where it can be."""

    def __init__(self, stack: nn.Module) -> None:
        self.stack = stack
        self.plain: Callable[..., Any] = types.MethodType(type(stack).forward, stack)
        self._look()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        values = [*arguments, *options.values()]
        inputs = [value for value in values if isinstance(value, Tensor)]
        if not (self.stack.training and torch.is_grad_enabled() and can_record(inputs)):
            return self.plain(*arguments, **options)
        if self._state() != self.state:  # recordings would read where weights were, and give gradients to those that were trained
            self._look()
        key = (*options, *map(_shape, values), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        with _on(inputs[0].device):
            lane = self._lane(key, sum(tensor.numel() for tensor in inputs)) if self._replayable() else None
            if lane is None:
                return self.plain(*arguments, **options)
            if key not in lane.recordings:
                lane.recordings[key] = self._record(lane, arguments, options)
            recording = lane.recordings[key]
            return recording.result(_Replay.apply(lane, recording, self.parameters[0], *inputs))

    def _look(self) -> None:
        """What there is to record; nothing is, so far."""
        self.modules = list(self.stack.modules())
        self.places = [(module._parameters, name) for module in self.modules for name in module._parameters]
        self.parameters = [p for p in self.stack.parameters() if p.requires_grad]
        self.of_one_kind = len({(p.dtype, p.device) for p in self.parameters}) == 1
        self.state = self._state()
        self.gradients: Gradients | None = None
        self.lanes: list[Lane] = []

    def _state(self) -> list[Any]:
        parameters = [place.get(name) for place, name in self.places]
        found: list[Any] = [None if p is None else (id(p), p.data_ptr(), p.requires_grad) for p in parameters]
        return found + [module.training for module in self.modules]

    def _replayable(self) -> bool:
        """Whether there are gradients, of one kind, and nobody waits for each or looks inside."""
        if not self.of_one_kind or (dist.is_initialized() and dist.get_world_size() > 1):
            return False
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters):
            return False
        watched = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "gradient_checkpointing")
        inner = self.modules[1:]  # calls of the stack itself are not replayed
        return not any(module.__dict__.get(name) for module in inner for name in watched)

    def _lane(self, key: Any, size: int) -> Lane | None:
        """One that no pass owns, and that has a recording or room for it."""
        lane = next((lane for lane in self.lanes if lane.free), None)
        if lane is None and len(self.lanes) < LANES:
            self.gradients = self.gradients or Gradients(self.parameters)
            self.lanes.append(lane := Lane(self.gradients))
        if lane is None or key in lane.recordings:
            return lane
        if len(lane.recordings) == LIMIT:
            return None
        if size > lane.largest:  # its memory can serve the smaller ones that follow, but not theirs this one
            lane.forget()
            lane.largest = size
        return lane

    def _record(self, lane: Lane, arguments: Sequence[Any], options: dict[str, Any]) -> Recording:
        """Of a call with these arguments, the tensors among them being inputs. Where memory runs out, others are given up for it."""
        values = [*arguments, *options.values()]

        def call(inputs: Sequence[Tensor]) -> Any:
            given = iter(inputs)
            now = [next(given) if isinstance(value, Tensor) else value for value in values]
            return self.plain(*now[: len(arguments)], **dict(zip(options, now[len(arguments) :], strict=True)))

        for last in (False, True):  # not within the first's handling, which holds what it had computed
            try:
                with _nothing_collected(), _others_in_place_of(self.parameters, self.stack) as others:
                    return Recording(call, [value for value in values if isinstance(value, Tensor)], others, lane)
            except torch.OutOfMemoryError:
                for other in self.lanes:
                    if other.free:
                        other.forget()
                if last:
                    raise
        raise AssertionError("returned or raised above")


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def can_record(inputs: Sequence[Tensor]) -> bool:
    return bool(inputs) and all(tensor.is_cuda for tensor in inputs)


def _shape(value: Any) -> Any:
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else value


class Gradients:
    """Where the recorded backward passes of a tower add: the parameters' own gradients, unless somebody else holds what is there."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.whole = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        self.parts = _unflatten_dense_tensors(self.whole, parameters)
        self.alone = self._holders()

    def _holders(self) -> int:
        """Tensors in this memory."""
        return int(torch._C._storage_Use_Count(self.whole.untyped_storage()._cdata))

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
        if len(without) == len(places):
            self.whole.zero_()
        for p, part in without:
            p.grad = part.view_as(part) if len(without) == len(places) else part.view_as(part).zero_()
        yield

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """The same where what is there has to be there again afterwards."""
        kept = self.whole.clone()
        self.whole.zero_()
        try:
            yield
            new = _unflatten_dense_tensors(self.whole.clone(), self.parameters)
        finally:
            self.whole.copy_(kept)
        there = [(p.grad, part) for p, part in zip(self.parameters, new, strict=True) if p.grad is not None]
        if there:
            torch._foreach_add_([gradient for gradient, _ in there], [part for _, part in there])
        for p, part in zip(self.parameters, new, strict=True):
            if p.grad is None:
                p.grad = part


class Lane:
    """What recordings of one tower share: their memory, and where they leave the gradients of its parameters. Owned by one pass."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self._owner: weakref.ref[Any] | None = None
        self.forget()

    def forget(self) -> None:
        """All recordings, and then their memory: not every PyTorch lets it go before them."""
        self.largest = 0
        self.recordings: dict[Any, Recording] = {}
        self.pool = torch.cuda.MemPool() if torch.cuda.is_available() else None

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
    """Owns a lane as long as autograd may ask for its backward pass."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lane: Lane, recording: Recording, parameter: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        # `parameter`: one of those that have gradients, whether the inputs do or not
        ctx.recording, ctx.lane, ctx.owner = recording, lane, _Pass()  # let go in this order, see `Lane.forget`
        lane.take(ctx.owner)
        return tuple(output.clone() for output in recording.replay_forward(inputs))  # the next pass writes to the same place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        lane: Lane = ctx.lane
        if not lane.owned_by(ctx.owner):
            raise RuntimeError("a second backward pass through towers with CUDA graphs; leave cuda_graphs out")
        with lane.gradients.added():
            of_inputs = ctx.recording.replay_backward(gradients)
        lane.give_back()
        return (None, None, None, *of_inputs)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage collection: PyTorch ends the process where a pool of an earlier model goes while something is recorded."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _others_in_place_of(parameters: Sequence[nn.Parameter], module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Parameters of the same memory. Autograd may have nodes for the parameters themselves already, which belong to another stream."""
    others = {id(p): nn.Parameter(p.detach()) for p in parameters}
    places = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if id(p) in others]
    for part, name, p in places:
        part._parameters[name] = others[id(p)]
    try:
        yield [others[id(p)] for p in parameters]
    finally:
        for part, name, p in places:
            part._parameters[name] = p


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


class Recording:
    """The forward and backward pass of `call` for inputs of one shape. Gradients of `parameters` are added where the lane has them."""

    def __init__(
        self, call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter], lane: Lane
    ) -> None:
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        random = torch.cuda.get_rng_state()
        try:
            self._capture(call, parameters, lane)
        finally:
            torch.cuda.set_rng_state(random)

    def _capture(self, call: Callable[[Sequence[Tensor]], Any], parameters: Sequence[nn.Parameter], lane: Lane) -> None:
        assert lane.pool is not None
        pool: Any = lane.pool.id
        wanted = [*(tensor for tensor in self.inputs if tensor.requires_grad), *parameters]
        # other threads may copy and allocate meanwhile
        recorded = partial(torch.cuda.graph, pool=pool, stream=_stream(), capture_error_mode="thread_local")
        # weights change between replays, so each has to cast them anew
        half = torch.autocast("cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False)
        with half, torch.autograd.set_multithreading_enabled(False):
            torch.cuda.empty_cache()  # where memory runs out in what follows, PyTorch does not do so by itself
            _stream().wait_stream(torch.cuda.current_stream())
            # kernels are loaded and compiled before they are recorded
            with torch.cuda.stream(_stream()), torch.cuda.use_mem_pool(lane.pool), _gradients_dropped(wanted):
                outputs = self._keep(call(self.inputs))
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs], inputs=wanted)
                del outputs
            with recorded(self.forward):
                outputs = self._keep(call(self.inputs))
            self.output_gradients = [torch.zeros_like(output) for output in outputs]
            for parameter, part in zip(parameters, lane.gradients.parts, strict=True):
                parameter.grad = part  # which autograd adds to in place, one after the other
            with recorded(self.backward):
                torch.autograd.backward(outputs, self.output_gradients, inputs=wanted)
        self.outputs = [output.detach() for output in outputs]  # without what the backward pass needs, which others may overwrite
        self.input_gradients = [tensor.grad for tensor in self.inputs]

    def _keep(self, result: Any) -> list[Tensor]:
        """The tensors of `call`'s result; of the result itself its form is kept, and what is no tensor."""
        leaves, self.form = tree_flatten(result)
        self.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """As `call` returns it."""
        given = iter(outputs)
        return tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in self.leaves], self.form)

    def replay_forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.detach().copy_(tensor)
        self.forward.replay()
        return self.outputs

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the inputs; those of parameters are then in the lane."""
        for place, gradient in zip(self.output_gradients, gradients, strict=True):
            place.copy_(gradient)
        self.backward.replay()
        return self.input_gradients


_streams: dict[int, torch.cuda.Stream] = {}


def _stream() -> torch.cuda.Stream:
    """The one that is recorded on: memory that is freed on one stream can be used again there only."""
    return _streams.setdefault(torch.cuda.current_device(), torch.cuda.Stream())
