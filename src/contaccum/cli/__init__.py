"""The command line: parse, build, call one function. Bad input gives one line and exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer

from contaccum.cli import bench, comparison, data, plan, report, reproduce, retrieval, training
from contaccum.cli.base import app
from contaccum.common.errors import CheckpointError

__all__ = ["app", "bench", "comparison", "data", "main", "plan", "report", "reproduce", "retrieval", "training"]


INTERRUPTED = 130  # as shells have it


def main() -> None:
    """Entry point of the `contaccum` command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one bar at a time: ours
    try:
        code = app(standalone_mode=False) or 0
    except (ValueError, CheckpointError) as error:
        fail(str(error), 2)
    except ModuleNotFoundError as error:
        if (error.name or "contaccum").startswith("contaccum"):
            raise
        fail(f"{error.name} is not installed; pip install 'contaccum[train,mine,search,report]'", 2)
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        fail(f"{error.filename}: {error.strerror}; choose another place, or make it possible there", 2)
    except typer.Abort:  # Ctrl-C, by an older typer
        code = INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own, for what it cannot parse
            _refuse(error)
        message = " ".join(str(error).split())
        if "out of memory" in message.lower():
            fail(f"{message}; use a smaller --n-local, a smaller --max-seq-length or --gradient-checkpointing", 1)
        if any(word in message for word in ("Connection closed by peer", "Connection reset by peer", "NCCL", "gloo")):
            fail(f"another process of this run is gone ({message}); the run can go on with --resume", 1)
        raise
    if code == INTERRUPTED:
        fail("interrupted", code)
    raise SystemExit(code)


def _refuse(error: Any) -> NoReturn:
    """Without arguments the help, otherwise what is wrong in one line."""
    if not error.format_message():
        error.show()
        raise SystemExit(error.exit_code)
    context = getattr(error, "ctx", None)
    fail(f"{error.format_message().rstrip('.')}; see {context.command_path if context else 'contaccum'} --help", error.exit_code)


def fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
