"""The command line: parse, build, call one function. Bad input gives one line and exit code 2."""

from __future__ import annotations

import os
import sys

from contaccum.cli import bench, data, plan, report, reproduce, retrieval, training
from contaccum.cli.base import app
from contaccum.errors import CheckpointError

__all__ = ["app", "bench", "data", "main", "plan", "report", "reproduce", "retrieval", "training"]


def main() -> None:
    """Entry point of the `contaccum` command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one bar at a time: ours
    try:
        app()
    except (ValueError, CheckpointError) as error:
        fail(str(error), 2)
    except Exception as error:
        message = " ".join(str(error).split())
        if "out of memory" in message.lower():
            fail(f"{message}; use a smaller --n-local, a smaller --max-seq-length or --gradient-checkpointing", 1)
        if any(word in message for word in ("Connection closed by peer", "Connection reset by peer", "NCCL", "gloo")):
            fail(f"another process of this run is gone ({message}); the run can go on with --resume", 1)
        raise


def fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
