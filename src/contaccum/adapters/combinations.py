"""What cannot be combined with a bank is refused when training begins, not at a step."""

from __future__ import annotations

from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, MatryoshkaLoss

from contaccum.adapters.data_sets import Losses, bank_losses


def refuse_combinations(losses: Losses) -> None:
    """ValueError for a loss around one with a bank that takes it in a way that has no meaning there."""
    parts = [module for loss in (losses.values() if isinstance(losses, dict) else [losses]) for module in loss.modules()]
    for part in parts:
        if isinstance(part, AdaptiveLayerLoss) and any(loss.criterion.bank.size for loss in bank_losses(part)):
            raise ValueError(
                f"{type(part).__name__} takes its loss of several layers, and the bank would hold vectors of all of them; use bank_size=0, "
                "or MatryoshkaLoss for shorter vectors of the last layer"
            )
        sliced = [loss.micro_batch_size for loss in bank_losses(part)] if isinstance(part, MatryoshkaLoss) else []
        for size in sliced:
            if size is not None:
                raise ValueError(
                    f"micro_batch_size={size} does not work inside MatryoshkaLoss, which takes the loss of the whole batch at each width; "
                    f"use None, per_device_train_batch_size={size} and gradient_accumulation_steps"
                )
