"""Memory: hold the CUDA allocator to a limit, and say what was used."""

from __future__ import annotations

import sys

import torch

HOPPER_WORKSPACE = 32 * 2**20  # cuBLAS's per thread and stream, on compute capability 9 and later
OLDER_WORKSPACE = 8_519_680


def limit_memory(limit_bytes: int) -> str | None:
    """Hold this process's CUDA allocator to `limit_bytes`; a sentence where that is not possible."""
    if not torch.cuda.is_available():
        return "the memory limit cannot be enforced: there is no CUDA device here"
    total = device_bytes()
    if limit_bytes > total:
        return f"the memory limit of {limit_bytes / 1e9:.1f} GB is above the device's {total / 1e9:.1f} GB and changes nothing"
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    return None


def peak_bytes() -> int | None:
    """The most that PyTorch held on the CUDA device so far, as its allocator reserved it; None without one."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def process_peak_bytes() -> int | None:
    """The most that this process held in main memory so far; None where the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def device_bytes() -> int:
    """All memory of the current CUDA device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def blas_workspace_bytes() -> int:
    """What cuBLAS takes from PyTorch's allocator for each thread; where there is no CUDA device to ask, the most that it takes on any."""
    if not torch.cuda.is_available():
        return HOPPER_WORKSPACE
    if hasattr(torch.backends.cuda, "cublas_workspace_size"):  # PyTorch 2.13 and later
        return int(torch.backends.cuda.cublas_workspace_size())
    return HOPPER_WORKSPACE if torch.cuda.get_device_capability()[0] >= 9 else OLDER_WORKSPACE
