"""Memory: sizes as people write them, and a limit on the CUDA allocator."""

from __future__ import annotations

import re

import torch

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """ "11GB" -> 11,000,000,000; "11GiB" -> 11,811,160,064."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or float(match.group(1)) <= 0:
        raise ValueError(f"memory {text!r} is not a size; write it as 11GB or 10.5GiB")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


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
