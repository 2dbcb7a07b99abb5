"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """ "11GB" -> 11,000,000,000; "11GiB" -> 11,811,160,064."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    size = 0.0 if match is None else float(match.group(1)) * _UNITS[match.group(2)]
    if not 1 <= size < 2**63:
        raise ValueError(f"memory {text[:80]!r} is not a size; write it as 11GB or 10.5GiB")
    return int(size)
