"""Texts by identifier, on disk: for collections that do not fit in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

CACHE_KIB = 128 * 1024


class TextStore:
    """id -> text in a scratch file, filled once; holds at most `CACHE_KIB` in memory."""

    def __init__(self, path: Path, texts: Iterable[tuple[str, str]]) -> None:
        path.touch()  # says why, where nothing can be written there
        self._database = sqlite3.connect(path)
        # A scratch file: whoever is interrupted starts again, so nothing has to survive a crash.
        self._database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KIB};")
        self._database.execute("CREATE TABLE texts (id TEXT PRIMARY KEY, text TEXT)")
        with self._database:
            self._database.executemany("INSERT INTO texts VALUES (?, ?)", texts)

    def get(self, key: str) -> str | None:
        row = self._database.execute("SELECT text FROM texts WHERE id = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def __enter__(self) -> TextStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._database.close()
