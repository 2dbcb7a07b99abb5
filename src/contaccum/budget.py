"""Memory: hold the CUDA allocator to a limit, and say what was used."""

from __future__ import annotations

import torch


def limit_memory(limit_bytes: int) -> str | None:
    """Hold this process's CUDA allocator to `limit_bytes`; a sentence where that is not possible."""
    if not torch.cuda.is_available():
        return "the memory limit cannot be enforced: there is no CUDA device here"
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if limit_bytes > total:
        return f"the memory limit of {limit_bytes / 1e9:.1f} GB is above the device's {total / 1e9:.1f} GB and changes nothing"
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    return None


def peak_bytes() -> int | None:
    """The most that PyTorch held on the CUDA device so far, as its allocator reserved it; None without one."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
