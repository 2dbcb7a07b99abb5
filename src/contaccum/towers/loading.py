"""Models from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from contaccum.common.errors import DataError


def load_model(name: str | Path, kind: type[Any] = SentenceTransformer, **options: Any) -> Any:
    """`kind(name)` in single precision, whatever it is stored in: half of it is many times slower on a CPU, and autocast is for the GPU."""
    try:
        return kind(str(name), model_kwargs={"dtype": torch.float32}, **options)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{name} cannot be loaded as a {kind.__name__}; give a model folder or a hub name ({why})") from error
