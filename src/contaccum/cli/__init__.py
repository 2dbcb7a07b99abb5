"""The command line: parse, build, call one function. Bad input gives one line and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from itertools import pairwise
from typing import Any, NoReturn, TextIO

import typer

from contaccum.cli import bench, comparison, data, plan, report, reproduce, retrieval, training
from contaccum.cli.base import app
from contaccum.common.console import hide_usual_load_reports
from contaccum.common.errors import CheckpointError, DivergedError, FailedRunsError, is_full_disk
from contaccum.common.hub import go_offline_without_network

__all__ = ["app", "bench", "comparison", "data", "main", "plan", "report", "reproduce", "retrieval", "training"]


FROM_HUB = ("plan", "train", "compare", "encode", "evaluate", "mine", "reproduce")  # commands that may load a model by its name
INTERRUPTED = 130  # as shells have it
FULL = "no room is left on the disk ({}); make room and give the same command again (train: with --resume)"


def main() -> None:
    """Entry point of the `contaccum` command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one bar at a time: ours
    words, asked = _without(sys.argv[1:], ("--quiet", "--verbose", "--debug"))
    if "--verbose" not in asked:
        hide_usual_load_reports()
    if words[:1] and words[0] in FROM_HUB and "--help" not in words and not _names_no_hub(words):
        go_offline_without_network()
    errors = sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere if "--quiet" in asked else errors):
        _run(words, errors, debug="--debug" in asked)


def _names_no_hub(words: Sequence[str]) -> bool:
    """Whether the model is a folder that is here."""
    given = next((value for option, value in pairwise(words) if option == "--model"), None)
    return given is not None and os.path.exists(given)


def _without(words: Sequence[str], options: Sequence[str]) -> tuple[list[str], set[str]]:
    """The words without these options, wherever they stand, and which of them were there."""
    return [word for word in words if word not in options], set(words) & set(options)


def _run(words: list[str], errors: TextIO, debug: bool) -> NoReturn:
    def fail(message: str, code: int) -> NoReturn:
        print(f"error: {' '.join(message.splitlines())}", file=errors)
        raise SystemExit(code)

    if odd := next((word for word in words if any("\ud800" <= letter <= "\udfff" for letter in word)), None):
        fail(f"{odd!r} is not UTF-8; rename the file or folder", 2)
    try:
        code = app(words, standalone_mode=False) or 0
    except (ValueError, CheckpointError) as error:
        fail(str(error), 2)
    except (DivergedError, FailedRunsError) as error:
        fail(str(error), 1)
    except ModuleNotFoundError as error:
        if (error.name or "contaccum").startswith("contaccum") and debug:
            raise
        fail(f"{error.name} is not installed; pip install 'contaccum[train,mine,search,report]'", 2)
    except OSError as error:
        if is_full_disk(error):
            fail(FULL.format(error.filename or error.strerror), 2)
        if error.filename is None or error.strerror is None:
            if debug:
                raise
            fail(f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}; {_traceback_file()}", 1)
        fail(f"{error.filename}: {error.strerror}; choose another place, or make it possible there", 2)
    except typer.Abort as error:  # Ctrl-C, by an older typer; an end of file in a command is one too
        if isinstance(error.__cause__, EOFError) and debug:
            raise
        if isinstance(error.__cause__, EOFError):
            fail(f"a file that was read ends too early ({error.__cause__}); {_traceback_file()}", 1)
        code = INTERRUPTED
    except Exception as error:
        if is_full_disk(error):
            fail(FULL.format(" ".join(str(error).split())), 2)
        if hasattr(error, "format_message"):  # typer's own, for what it cannot parse
            _refuse(error, fail)
        message = " ".join(str(error).split())
        if "Symlink loop" in message:
            fail(f"{message}; give a path that leads somewhere", 2)
        if "out of memory" in message.lower() or "can't allocate memory" in message:
            fail(f"{message}; use a smaller --n-local, a smaller --max-seq-length or --gradient-checkpointing", 1)
        if any(word in message for word in ("Connection closed by peer", "Connection reset by peer", "NCCL", "gloo")):
            fail(f"another process of this run is gone ({message}); the run can go on with --resume", 1)
        if debug:
            raise
        fail(f"unexpected {type(error).__name__}: {message[:300]}; {_traceback_file()}", 1)
    if code == INTERRUPTED:
        fail("interrupted", code)
    raise SystemExit(code)


def _traceback_file() -> str:
    """Where the traceback of the exception in hand was written, in words."""
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="contaccum-error-", suffix=".log", delete=False, encoding="utf-8") as file:
            file.write(f"{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
        return f"the traceback is in {file.name}, or shown with --debug"
    except OSError:
        return "--debug shows the traceback"


def _refuse(error: Any, fail: Callable[[str, int], NoReturn]) -> NoReturn:
    """Without arguments the help, otherwise what is wrong in one line."""
    if not error.format_message():
        error.show()
        raise SystemExit(error.exit_code)
    context = getattr(error, "ctx", None)
    fail(f"{error.format_message().rstrip('.')}; see {context.command_path if context else 'contaccum'} --help", error.exit_code)
