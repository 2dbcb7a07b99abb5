"""Run under torchrun, or alone: a few updates of a tower that FSDP2 shards. Arguments: tiny model, file to write."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import contaccum
from conftest import texts
from contaccum import dual_encoder
from contaccum.towers.speed import encoders, stacks
from contaccum.training.processes import leave_processes

MICRO_BATCH, MICRO_STEPS, UPDATES = 8, 2, 3


def main(model_folder: str, file: str) -> None:
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if processes > 1:
        dist.init_process_group("gloo")
    found = {name: train(model_folder, name, processes, rank) for name in ("ContAccumLoss", "CachedContAccumLoss")}
    if rank == 0:
        torch.save(found, file)


def train(model_folder: str, loss_name: str, processes: int, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = dual_encoder(model_folder, tied=True, pooling="mean", max_seq_length=32).to("cpu").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # processes draw apart
    before = {name: value.clone() for name, value in model.state_dict().items()}
    further = {"mini_batch_size": 2} if loss_name.startswith("Cached") else {}
    loss = getattr(contaccum, loss_name)(model, bank_size=20, gather_across_devices=processes > 1, **further)
    if processes > 1:
        mesh = init_device_mesh("cpu", (processes,))
        for layer in [layer for encoder in encoders(model) for _, layers in stacks(encoder) for layer in layers]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    share = MICRO_BATCH // processes
    for micro_step in range(UPDATES * MICRO_STEPS):
        mine = texts(MICRO_BATCH, seed=micro_step)[rank * share : (rank + 1) * share]
        columns = [model.preprocess([f"{text} w{column}" for text in mine]) for column in range(2)]
        (loss(columns, None) / MICRO_STEPS).backward()
        if micro_step % MICRO_STEPS == MICRO_STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
            loss.criterion.after_update()
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    weights = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()}
    return {"weights": weights, "before": before, "banked": len(loss.criterion.bank), "sharded": sharded}


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_processes()
