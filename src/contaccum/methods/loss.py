"""From a configuration to its loss."""

from __future__ import annotations

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import cos_sim, dot_score

from contaccum.adapters.gradcache import CachedContAccumLoss
from contaccum.adapters.losses import ContAccumLoss
from contaccum.methods.config import TrainConfig
from contaccum.methods.table import Batches, get_method

SCALES = {"dot": 1.0, "cosine": 20.0}  # where none is given


def build_loss(
    config: TrainConfig, model: SentenceTransformer, batches: Batches, gather_across_devices: bool = False, mask_labels: bool = False
) -> ContAccumLoss:
    """The loss of `config.method` around `model`; `config.bank` must be a number."""
    method = get_method(config.method)
    options = {
        "similarity_fct": {"dot": dot_score, "cosine": cos_sim}[config.similarity],
        "scale": config.scale or SCALES[config.similarity],
        "gather_across_devices": gather_across_devices,
        "mask_labels": mask_labels and config.mask_duplicates,
        "bank_size": config.bank_size if method.bank else 0,
        "query_bank_size": (config.query_bank if method.query_bank else 0) if method.bank else None,
        "clear_after_update": method.clear_after_update,
        "directions": config.direction_names,
        "bank_dtype": getattr(torch, config.bank_dtype) if config.bank_dtype else None,
        **{name: getattr(config, name) for name in SAME_NAMES},
    }
    if batches.mini is not None:
        return CachedContAccumLoss(model, mini_batch_size=batches.mini, mini_batch_num_tokens=config.local_tokens, **options)
    return ContAccumLoss(model, micro_batch_size=batches.slice, **options)


# Options of the loss that are the configuration's own.
SAME_NAMES = (
    *("start_update", "query_bank_stop_update", "cache_hard_negatives"),
    *("mask_duplicates", "gradient_scale", "drift_correction"),
    *("partition_mode", "margin", "margin_strategy"),
)
