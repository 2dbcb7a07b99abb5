"""Train dense retrievers under a memory budget: InfoNCE with a dual bank of past queries and passages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contaccum.adapters.gradcache import CachedContAccumLoss
    from contaccum.adapters.losses import ContAccumLoss
    from contaccum.adapters.trainer import ContAccumCallback, ContAccumTrainer
    from contaccum.comparison.compare import compare
    from contaccum.core.bank import DualBank
    from contaccum.core.criterion import DualBankInfoNCE
    from contaccum.core.infonce import dual_bank_infonce, naive_dual_bank_infonce
    from contaccum.towers.dual_encoder import dual_encoder

__version__ = "0.1.0"
__all__ = [
    "CachedContAccumLoss",
    "ContAccumCallback",
    "ContAccumLoss",
    "ContAccumTrainer",
    "DualBank",
    "DualBankInfoNCE",
    "compare",
    "dual_bank_infonce",
    "dual_encoder",
    "naive_dual_bank_infonce",
]

# Imported when they are asked for: the core needs torch alone, and the command line shows its help without it.
_LAZY = {
    "CachedContAccumLoss": "contaccum.adapters.gradcache",
    "ContAccumCallback": "contaccum.adapters.trainer",
    "ContAccumLoss": "contaccum.adapters.losses",
    "ContAccumTrainer": "contaccum.adapters.trainer",
    "DualBank": "contaccum.core.bank",
    "DualBankInfoNCE": "contaccum.core.criterion",
    "compare": "contaccum.comparison.compare",
    "dual_bank_infonce": "contaccum.core.infonce",
    "dual_encoder": "contaccum.towers.dual_encoder",
    "naive_dual_bank_infonce": "contaccum.core.infonce",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'contaccum' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("contaccum"):
            raise
        raise ModuleNotFoundError(f"contaccum.{name} needs {error.name}; pip install 'contaccum[train]'", name=error.name) from error
