"""GradCache: `CachedContAccumLoss` in place of `CachedMultipleNegativesRankingLoss`.

sentence-transformers' `CachedLossMixin` does the two passes: embed all mini-batches without gradients, take the loss of the whole batch and
its gradients on the vectors, embed again with gradients. The loss between them is `ContAccumLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.util import cos_sim
from torch import Tensor

from contaccum.adapters.losses import ContAccumLoss, feature_columns
from contaccum.core.checks import whole_number


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
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if has_static_embedding_input(model):
            raise ValueError("CachedContAccumLoss cannot split the inputs of a StaticEmbedding model; use ContAccumLoss")
        if whole_number("mini_batch_size", mini_batch_size) < 1:
            raise ValueError(f"mini_batch_size={mini_batch_size} must be at least 1")
        if mini_batch_num_tokens is not None and whole_number("mini_batch_num_tokens", mini_batch_num_tokens) < 1:
            raise ValueError(f"mini_batch_num_tokens={mini_batch_num_tokens} must be at least 1, or None to count samples")
        compared = (directions, partition_mode, hardness_mode, hardness_strength)
        super().__init__(model, scale, similarity_fct, gather_across_devices, *compared, **kwargs)
        if self.micro_batch_size is not None:
            raise ValueError(f"micro_batch_size={self.micro_batch_size} would cut the batch that GradCache keeps whole; use None")
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        self._begin()
        features = feature_columns(sentence_features)
        batch: Any = self._batch(features, labels, self.mini_batch_size)  # what the mixin calls labels reaches calculate_loss untouched
        with self._whole_first():
            return self.forward_cached(features, batch)

    @contextmanager
    def _whole_first(self) -> Iterator[None]:
        """Where `MatryoshkaLoss` has decorated `calculate_loss`, it is called with the whole vectors first."""
        decorated = vars(self).get("calculate_loss")
        if decorated is None:
            yield
            return

        def with_whole(reps: list[list[Tensor]], labels: Any = None, **kwargs: Any) -> Tensor:
            whole = self._whole_vectors([torch.cat(column) for column in reps], labels)
            loss: Tensor = decorated(reps, replace(labels, whole=whole), **kwargs)
            return loss

        self.calculate_loss = with_whole  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.calculate_loss = decorated  # type: ignore[method-assign]

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        loss = self.compute_loss_from_embeddings([torch.cat(column) for column in reps], keys=labels)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        return {**super().get_config_dict(), "mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
