"""Towers as CUDA graphs: what the layers launch is recorded once for each shape, and replayed as a whole.

A micro-batch of a few texts is computed faster than Python can launch its kernels, and the GPU waits. A recorded pass is one launch.

- Recorded are a tower's layers, forward and backward, when a shape is first seen in training. Batches are padded to a multiple of
  `MULTIPLE` tokens, so that shapes are few. Everything else (embeddings, pooling, the loss, passes without gradients) runs as always.
- A recording reads and writes fixed addresses. So one pass at a time owns a `RecordingPool`, from its forward to the end of its backward
  pass; the recordings of a pool share its memory. Where a tower has more passes under way than `POOLS`, they are not replayed.
- A recorded backward pass adds to the gradients of all parameters itself, not through autograd. (So does `torch.autograd.grad`, whatever
  it is asked for.) They are parts of one tensor of the tower's, which stays where it is. Hooks would not be called, so where there are
  any, and with several processes, nothing is replayed.
- Weights that are moved, frozen or released are noticed, and everything is recorded again.
- Random numbers go on as if nothing had been recorded: dropout draws what it always draws.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from contaccum.towers.recording import Gradients, Recording, RecordingPool, Replay
from contaccum.towers.speed import UNPADDABLE, attends_to_all, count_tokens, encoders, shows_layers, stacks, towers, uncount_tokens

MULTIPLE = 32  # tokens
POOLS = 2  # passes of one tower at a time: two where it serves queries and passages
LIMIT = 64  # recordings of a pool


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
    """Give their memory back, and what else PyTorch holds unused. What is needed again is recorded again."""
    for encoder in encoders(model):
        for stack, _ in stacks(encoder):
            if isinstance(graphed := stack.__dict__.get("forward"), GraphedStack):
                graphed.pools = []  # gradients stay: parameters have them
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
            pool = self._pool(key, sum(tensor.numel() for tensor in inputs)) if self._replayable() else None
            if pool is None:
                return self.plain(*arguments, **options)
            if key not in pool.recordings:
                pool.recordings[key] = self._record(pool, arguments, options)
            recording = pool.recordings[key]
            return recording.result(Replay.apply(pool, recording, self.parameters[0], *inputs))

    def _look(self) -> None:
        """What there is to record; nothing is, so far."""
        self.modules = list(self.stack.modules())
        self.places = [(module._parameters, name) for module in self.modules for name in module._parameters]
        self.parameters = [p for p in self.stack.parameters() if p.requires_grad]
        self.of_one_kind = len({(p.dtype, p.device) for p in self.parameters}) == 1
        self.state = self._state()
        self.gradients: Gradients | None = None
        self.pools: list[RecordingPool] = []

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

    def _pool(self, key: Any, size: int) -> RecordingPool | None:
        """One that no pass owns, and that has a recording or room for it."""
        pool = next((pool for pool in self.pools if pool.free), None)
        if pool is None and len(self.pools) < POOLS:
            self.gradients = self.gradients or Gradients(self.parameters)
            self.pools.append(pool := RecordingPool(self.gradients))
        if pool is None or key in pool.recordings:
            return pool
        if len(pool.recordings) == LIMIT:
            return None
        if size > pool.largest:  # its memory can serve the smaller ones that follow, but not theirs this one
            pool.forget()
            pool.largest = size
        return pool

    def _record(self, pool: RecordingPool, arguments: Sequence[Any], options: dict[str, Any]) -> Recording:
        """Of a call with these arguments, the tensors among them being inputs. Where memory runs out, others are given up for it."""
        values = [*arguments, *options.values()]

        def call(inputs: Sequence[Tensor]) -> Any:
            tensors = iter(inputs)
            now = [next(tensors) if isinstance(value, Tensor) else value for value in values]
            return self.plain(*now[: len(arguments)], **dict(zip(options, now[len(arguments) :], strict=True)))

        for last in (False, True):  # not within the first's handling, which holds what it had computed
            try:
                with _nothing_collected(), _others_in_place_of(self.parameters, self.stack) as others:
                    return Recording(call, [value for value in values if isinstance(value, Tensor)], others, pool)
            except torch.OutOfMemoryError:
                for other in self.pools:
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
