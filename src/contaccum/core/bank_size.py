"""How large a bank of automatic size is."""

from __future__ import annotations

AUTO_BANK = 1024  # tuples, where neither the update's samples nor the training rows are known
AUTO_UPDATES = 8  # what a bank of automatic size holds at most, in updates ...
AUTO_SHARE = 16  # ... and as a part of the training rows


def auto_bank(n_total: int, micro_batch: int, rows: int | None = None) -> int:
    """Tuples of a bank of automatic size: 8 updates' worth, at most a sixteenth of the training rows, at least a micro-batch.

    `rows` is None where they are not known; the bank is then at most as large with them.
    """
    size = AUTO_UPDATES * n_total if rows is None else min(AUTO_UPDATES * n_total, rows // AUTO_SHARE)
    return max(size, micro_batch)
