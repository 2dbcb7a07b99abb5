"""What a command prints besides its result: notes on stderr, and nothing of the libraries' own."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Weights that retrieval does not use: a model without them, or with them, is no news.
UNUSED_WEIGHTS = re.compile(r"(^|\.)(pooler|cls|lm_head|position_ids)(\.|$)")


def note(text: str) -> None:
    """A line for the user, on stderr: a result on stdout stays readable by a program."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def hide_usual_load_reports() -> None:
    """No report of transformers about weights that are not used here. Any other weight that is missing is still reported."""
    logger = logging.getLogger("transformers.modeling_utils")
    if not any(isinstance(known, _UsualReports) for known in logger.filters):
        logger.addFilter(_UsualReports())


class _UsualReports(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())
        if "LOAD REPORT" not in text:
            return True
        weights = [line.split("|")[0].strip() for line in text.splitlines() if line.count("|") >= 2]
        return not all(UNUSED_WEIGHTS.search(weight) for weight in weights if weight and weight != "Key")


@contextmanager
def without_bars() -> Iterator[None]:
    """Progress bars of others go nowhere: one bar at a time, the command's own."""
    shown, sys.stderr = sys.stderr, io.StringIO()
    try:
        yield
    finally:
        sys.stderr = shown


@contextmanager
def without_loading_bars() -> Iterator[None]:
    """No bar of transformers' and the hub's about weights that are loaded; afterwards as the caller had it."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    shown, hidden = transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
        (disable_progress_bars if hidden else enable_progress_bars)()
