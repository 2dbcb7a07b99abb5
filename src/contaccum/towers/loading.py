"""Models from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from contaccum.common.errors import DataError


@contextmanager
def same_missing_weights() -> Iterator[None]:
    """Weights that a model lacks, as a pooler that nothing uses, are drawn; here they are the same each time, and so is its checksum."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def load_model(name: str | Path, kind: type[Any] = SentenceTransformer, **options: Any) -> Any:
    """`kind(name)` in single precision, whatever it is stored in: half of it is many times slower on a CPU, and autocast is for the GPU."""
    try:
        with same_missing_weights():
            return kind(str(name), model_kwargs={"dtype": torch.float32}, **options)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{name} cannot be loaded as a {kind.__name__}; give a model folder or a hub name ({why})") from error
