"""Identifiers seen so far, in little memory."""

from __future__ import annotations

BITMAP_IDS = 2**28  # identifiers below this are bits of one map: at most 32 MB


class SeenIds:
    """A set of identifiers that only grows.

    Whole numbers, as in psgs_w100.tsv and MS MARCO, cost a bit each and are exact; other texts cost a 64-bit hash each, so that among
    ten million of them two different ones are taken for one with a chance of about 3 in a million.
    """

    def __init__(self) -> None:
        self._bits = bytearray()
        self._hashes: set[int] = set()

    def add(self, key: str) -> bool:
        """Whether `key` is new."""
        if len(key) < 10 and key.isascii() and key.isdigit() and (key[0] != "0" or key == "0") and int(key) < BITMAP_IDS:
            return self._add_bit(int(key))
        known = len(self._hashes)
        self._hashes.add(hash(key))
        return len(self._hashes) > known

    def _add_bit(self, number: int) -> bool:
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1, 2 * len(self._bits)) - len(self._bits)))
        new = not self._bits[byte] & bit
        self._bits[byte] |= bit
        return new
