"""A stand-in for a recording, for machines without a GPU, and what was recorded."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.towers.cuda_graphs import GraphedStack
from contaccum.towers.recording import Recording, RecordingPool
from contaccum.towers.speed import encoders, stacks


def graphed(model: nn.Module) -> list[GraphedStack]:
    return [stack.forward for encoder in encoders(model) for stack, _ in stacks(encoder)]


class ReplayedByHand(Recording):
    """Computes what is recorded, and reads and writes only the places that a recording has."""

    def __init__(self, call: Any, inputs: Any, parameters: Any, pool: RecordingPool) -> None:
        self.call, self.pool = call, pool
        assert not gc.isenabled()
        self.parameters = pool.gradients.parameters
        assert [p.data_ptr() for p in parameters] == [p.data_ptr() for p in self.parameters]
        assert not any(mine is its for mine, its in zip(parameters, self.parameters, strict=True))
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        with torch.enable_grad():
            self.outputs = [output.detach() for output in self._keep(call(self.inputs))]
        self.output_gradients = [torch.zeros_like(output) for output in self.outputs]
        self.input_gradients = [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in self.inputs]

    def replay_forward(self, inputs: Any) -> list[Tensor]:
        with torch.no_grad():
            for place, tensor in zip(self.inputs, inputs, strict=True):
                place.copy_(tensor)
        with torch.enable_grad():
            self.pool.alive = self, self._keep(self.call(self.inputs))  # of this pool's last pass alone
        for place, output in zip(self.outputs, self.pool.alive[1], strict=True):
            place.copy_(output.detach())
        return self.outputs

    def replay_backward(self, gradients: Any) -> Any:
        recording, outputs = self.pool.alive
        assert recording is self
        for place, gradient in zip(self.output_gradients, gradients, strict=True):
            place.copy_(gradient)
        given = [tensor for tensor in self.inputs if tensor.requires_grad]
        found = torch.autograd.grad(outputs, [*given, *self.parameters], self.output_gradients)
        for place, gradient in zip(filter(lambda g: g is not None, self.input_gradients), found[: len(given)], strict=True):
            place.copy_(gradient)
        for place, gradient in zip(self.pool.gradients.parts, found[len(given) :], strict=True):
            place.add_(gradient)
        return self.input_gradients
