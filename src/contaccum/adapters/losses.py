"""The dual-bank loss for sentence-transformers: `ContAccumLoss` in place of `MultipleNegativesRankingLoss`, and its GradCache twin.

Thin adapters over `DualBankInfoNCE`: they embed the columns, take a key per text from the token ids, and gather across processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.util import all_gather, all_gather_with_grad, cos_sim, dot_score
from torch import Tensor, nn

from contaccum.adapters.text_keys import token_keys
from contaccum.core.criterion import DualBankInfoNCE, whole_number
from contaccum.towers.speed import countable

_SIMILARITIES = {cos_sim: "cosine", dot_score: "dot"}
_CITATION = """
@inproceedings{kim2024contaccum,
    title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},
    author={Jaehee Kim and Yukyung Lee and Pilsung Kang},
    booktitle={Advances in Neural Information Processing Systems},
    year={2024}
}
"""


class ContAccumLoss(nn.Module):
    """`MultipleNegativesRankingLoss` with a bank of past queries and passages; equal to it with `bank_size=0` and no duplicate texts.

    Takes pairs (anchor, positive) or tuples with any number of negatives. Works in a plain `SentenceTransformerTrainer`; use
    `ContAccumTrainer`, or add a `ContAccumCallback`, for exact resume, for ages and for `clear_after_update=True`.

    Args:
        model, scale, similarity_fct, gather_across_devices: as in `MultipleNegativesRankingLoss`; `similarity_fct` is `cos_sim` or
            `dot_score`. With `gather_across_devices` every process holds the same bank; without, each its own.
        micro_batch_size: take the loss on slices of this many samples, one after the other, and average, as gradient accumulation would
            with micro-batches of that size: the same gradients, faster, at the memory of the whole batch. None: the batch as it is.
        bank_size: "auto" takes 8 updates' worth of tuples, at most a sixteenth of the training rows, when a `ContAccumTrainer` or a
            `ContAccumCallback` begins to train (see `contaccum.core.bank_size.auto_bank`); without them 1,024.
        bank_options: the other arguments of `DualBankInfoNCE`, from `query_bank_size` on.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        *,
        micro_batch_size: int | None = None,
        bank_size: int | str = "auto",
        **bank_options: Any,
    ) -> None:
        super().__init__()
        if similarity_fct not in _SIMILARITIES:
            name = getattr(similarity_fct, "__name__", similarity_fct)
            raise ValueError(f"similarity_fct={name} has no closed form here; use sentence_transformers.util.cos_sim or dot_score")
        if micro_batch_size is not None and whole_number("micro_batch_size", micro_batch_size) < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1, or None for the whole batch")
        self.micro_batch_size = micro_batch_size
        self.model = model
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.criterion = DualBankInfoNCE(
            bank_size=bank_size,
            scale=scale,
            similarity=_SIMILARITIES[similarity_fct],
            **bank_options,
        )

    @property
    def scale(self) -> float:
        return self.criterion.scale

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        self._refuse_several_layers()
        features = _columns(sentence_features)
        keys = [token_keys(column) for column in features]  # before the model may change the features
        embeddings = embed_columns(self.model, features)
        size = self.micro_batch_size or len(embeddings[0])
        starts = range(0, len(embeddings[0]), size)
        losses = [self.compute_loss_from_embeddings(_slice(embeddings, i, size), labels, _slice(keys, i, size)) for i in starts]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _refuse_several_layers(self) -> None:
        """Each call in training enters the bank. (Of several widths the bank itself would say so.)"""
        replaced = vars(self.model).get("forward")
        if self.criterion.bank.size and self.model.training and type(replaced).__module__.endswith(".adaptive_layer"):
            raise ValueError("AdaptiveLayerLoss takes its loss of several layers, and the bank would hold vectors of all; use bank_size=0")

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None, keys: list[Tensor | None] | None = None
    ) -> Tensor:
        """The loss of one micro-batch from the embeddings of its columns: queries, positives, then hard negatives."""
        if self.gather_across_devices and dist.is_available() and dist.is_initialized():
            # Each column apart: a gathered block of positives and negatives would be cut in the wrong place. Every process then computes
            # the loss of the whole micro-batch; gather sums the gradients of all and the trainer's average divides them again.
            embeddings = [all_gather_with_grad(column) for column in embeddings]
            keys = None if keys is None else [None if column is None else all_gather(column) for column in keys]
        queries, positives, *negatives = embeddings
        query_keys, *passage_keys = keys or [None] * len(embeddings)
        self.criterion.train(self.model.training)
        loss: Tensor = self.criterion(
            queries,
            positives,
            torch.stack(negatives, dim=1) if negatives else None,
            query_keys=query_keys,
            passage_keys=torch.stack([k for k in passage_keys if k is not None], dim=1) if None not in passage_keys else None,
        )
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        criterion = self.criterion
        return {
            "scale": self.scale,
            "similarity_fct": self.similarity_fct.__name__,
            "gather_across_devices": self.gather_across_devices,
            "micro_batch_size": self.micro_batch_size,
            "bank_size": criterion.bank.size,
            "query_bank_size": criterion.bank.query_size,
            "clear_after_update": criterion.clear_after_update,
            "cache_hard_negatives": criterion.cache_hard_negatives,
            "mask_duplicates": criterion.mask_duplicates,
            "gradient_scale": criterion.gradient_scale,
            "drift_correction": criterion.drift_correction,
            "start_update": criterion.start_update,
            "query_bank_stop_update": criterion.query_bank_stop_update,
        }

    @property
    def citation(self) -> str:
        return _CITATION


class CachedContAccumLoss(CachedLossMixin, ContAccumLoss):
    """`ContAccumLoss` by GradCache: the whole batch and the bank, with only `mini_batch_size` samples' activations alive.

    Embeds every sample twice. With `bank_size=0` it equals `CachedMultipleNegativesRankingLoss`, whose first arguments are the same; the
    others are those of `ContAccumLoss`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        *,
        show_progress_bar: bool = False,
        **kwargs: Any,
    ) -> None:
        if has_static_embedding_input(model):
            raise ValueError("CachedContAccumLoss cannot split the inputs of a StaticEmbedding model; use ContAccumLoss")
        if whole_number("mini_batch_size", mini_batch_size) < 1:
            raise ValueError(f"mini_batch_size={mini_batch_size} must be at least 1")
        super().__init__(model, scale, similarity_fct, **kwargs)
        if self.micro_batch_size is not None:
            raise ValueError(f"micro_batch_size={self.micro_batch_size} would cut the batch that GradCache keeps whole; use None")
        self.mini_batch_size = mini_batch_size
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        self._refuse_several_layers()
        features = _columns(sentence_features)
        keys = [token_keys(column) for column in features]
        carried: Any = keys  # what the mixin calls labels is handed to calculate_loss untouched
        return self.forward_cached(features, carried)

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], keys=labels)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size}


def _slice(columns: list[Any], start: int, size: int) -> list[Any]:
    return [None if column is None else column[start : start + size] for column in columns]


def _columns(sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    features = [countable(column) for column in sentence_features]
    if len(features) < 2:
        raise ValueError(f"a query and a positive column are needed, but the batch has {len(features)}; check the data set's columns")
    return features
