"""A bench's table as one file that may be posted: what the figures depend on, and nothing that names a machine, a user or a folder."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from contaccum.common.options import as_options
from contaccum.common.provenance import provenance


def shared(rows: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """`options` are the arguments of `bench`, of which the command is made; as it was typed it might name files."""
    about = provenance(0)
    known = ("device", "python", "versions", "cuda", "commit", "seed")
    return {
        "command": f"contaccum bench {as_options({name: value for name, value in options.items() if value not in (None, False)})}",
        **{name: about[name] for name in known},
        "driver": driver(),
        "device_bytes": torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None,
        "rows": rows,
    }


def driver() -> str | None:
    """Version of the NVIDIA driver; None where there is none to ask."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None
