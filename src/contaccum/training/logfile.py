"""`log.jsonl`: one line of JSON per update. Reading it needs nothing of what wrote it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.common.outputs import write_text


def read_log(file: Path) -> list[dict[str, Any]]:
    """The lines of a log, up to one that is cut off or of no update."""
    lines: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(found, dict) or not isinstance(found.get("update"), int):
            break
        lines.append(found)
    return lines


def keep_updates(file: Path, last: int) -> None:
    """Cut a log back to the updates that a resumed run starts from."""
    kept = [line for line in read_log(file) if line["update"] <= last]
    write_text(file, "".join(json.dumps(line) + "\n" for line in kept))


def append_lines(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add them to a log; they are on the disk when this returns."""
    if lines:
        with open(file, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)
            log.flush()
            os.fsync(log.fileno())
