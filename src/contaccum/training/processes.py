"""How one of several processes ends."""

from __future__ import annotations

import gc

import torch.distributed as dist


def leave_processes() -> None:
    """Leave the group of processes, if there is one, and end its threads.

    A model in a cycle of references keeps the group alive, and with it threads that may ask for the interpreter after its end, which
    aborts the process. So call this where the training is out of scope.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
