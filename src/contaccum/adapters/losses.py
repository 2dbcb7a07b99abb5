"""The dual-bank loss for sentence-transformers: `ContAccumLoss` in place of `MultipleNegativesRankingLoss`.

A thin adapter over `DualBankInfoNCE`: it embeds the columns, takes a key per text from the token ids, and gathers across processes. Its
GradCache twin is in `contaccum.adapters.gradcache`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.util import all_gather, all_gather_with_grad, cos_sim, dot_score
from torch import Tensor, nn

from contaccum.adapters.guide import TEXTS_AT_ONCE, Guide
from contaccum.adapters.matryoshka import embed_undecorated, matryoshka_forward, shrunk, takes_several_layers
from contaccum.adapters.text_keys import token_keys
from contaccum.core.checks import whole_number
from contaccum.core.criterion import DualBankInfoNCE
from contaccum.core.micro_batch import WholeVectors
from contaccum.towers.speed import countable

_SIMILARITIES = {cos_sim: "cosine", dot_score: "dot"}
_COMPARISON = ("directions", "partition_mode", "hardness_mode", "hardness_strength", "margin", "margin_strategy")
_CITATION = """
@inproceedings{kim2024contaccum,
    title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},
    author={Jaehee Kim and Yukyung Lee and Pilsung Kang},
    booktitle={Advances in Neural Information Processing Systems},
    year={2024}
}
"""


@dataclass(frozen=True)
class Batch:
    """What goes with the embeddings of a batch, column by column."""

    keys: list[Tensor | None]
    guide: list[Tensor] | None = None  # a guide's vectors
    whole: WholeVectors | None = None  # at full width, where the embeddings are cut

    def part(self, start: int, size: int) -> Batch:
        return Batch(_slice(self.keys, start, size), None if self.guide is None else _slice(self.guide, start, size))


class ContAccumLoss(nn.Module):
    """`MultipleNegativesRankingLoss` with a bank of past queries and passages; equal to it with `bank_size=0` and no duplicate texts.

    Takes pairs (anchor, positive) or tuples with any number of negatives. A plain `SentenceTransformerTrainer` that is
    made with it gets a `ContAccumCallback`. One loss for several data sets keeps a bank for each, and needs a `ContAccumTrainer`.
    `MatryoshkaLoss` around it is fine. `loss.scale` may be assigned at any time.

    Args:
        model, scale, similarity_fct, gather_across_devices: as in `MultipleNegativesRankingLoss`; `similarity_fct` is `cos_sim` or
            `dot_score`. With `gather_across_devices` every process holds the same bank; without, each its own.
        directions, partition_mode, hardness_mode, hardness_strength: as in `MultipleNegativesRankingLoss`, over micro-batch and bank: see
            `contaccum.core.comparison`.
        micro_batch_size: take the loss on slices of this many samples, one after the other, and average, as gradient accumulation would
            with micro-batches of that size: the same gradients, faster, at the memory of the whole batch. None: the batch as it is.
        bank_size: "auto" takes 8 updates' worth of tuples, at most a sixteenth of the training rows, when a trainer begins to train (see
            `contaccum.core.bank_size.auto_bank`); in a loop of your own 1,024.
        margin, margin_strategy: leave out negatives that are more similar to the query than its positive is minus this, or minus this part
            of it ("relative"), as in `GISTEmbedLoss`. None: none, or 0.0 with a guide.
        guide: a model whose cosine says so, instead of the one that is trained. Its vectors are kept in the bank too.
        mask_labels: the data has a column `label` of whole numbers, as of the document that a pair is from; the positives of one label
            are never each other's negatives, in the micro-batch and in the bank. Equal passages are masked all the same.
        bank_options: the other arguments of `DualBankInfoNCE`, from `query_bank_size` on.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        micro_batch_size: int | None = None,
        bank_size: int | str = "auto",
        margin: float | None = None,
        margin_strategy: str = "absolute",
        guide: SentenceTransformer | None = None,
        mask_labels: bool = False,
        **bank_options: Any,
    ) -> None:
        super().__init__()
        if similarity_fct not in _SIMILARITIES:
            name = getattr(similarity_fct, "__name__", similarity_fct)
            raise ValueError(f"similarity_fct={name} has no closed form here; use sentence_transformers.util.cos_sim or dot_score")
        if micro_batch_size is not None and whole_number("micro_batch_size", micro_batch_size) < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1, or None for the whole batch")
        if mask_labels and not bank_options.get("mask_duplicates", True):
            raise ValueError("mask_labels=True has no effect with mask_duplicates=False; leave one of them out")
        self.micro_batch_size = micro_batch_size
        self.model = model
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.mask_labels = mask_labels
        self.guide = None if guide is None else Guide(guide, model)
        self.criterion = DualBankInfoNCE(
            bank_size=bank_size,
            scale=scale,
            similarity=_SIMILARITIES[similarity_fct],
            directions=directions if isinstance(directions, str) else tuple(directions),
            partition_mode=partition_mode,
            hardness_mode=hardness_mode,
            hardness_strength=hardness_strength,
            margin=0.0 if margin is None and guide is not None else margin,
            margin_strategy=margin_strategy,
            **bank_options,
        )
        self._warned = False
        self.criterion.kept_with = {"mask_labels": mask_labels, "guide": guide is not None}

    @property
    def scale(self) -> float:
        return self.criterion.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self.criterion.scale = scale

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        self._begin()
        features = feature_columns(sentence_features)
        if (decorator := matryoshka_forward(self.model)) is not None:
            return self._at_width(decorator, features, labels)
        batch = self._batch(features, labels)
        embeddings = embed_columns(self.model, features)
        size = (self.micro_batch_size if self.model.training else None) or len(embeddings[0])
        starts = range(0, len(embeddings[0]), size)
        losses = [self.compute_loss_from_embeddings(_slice(embeddings, i, size), labels, batch.part(i, size)) for i in starts]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _apply(self, *args: Any, **kwargs: Any) -> ContAccumLoss:
        """`to` of this loss, or of one around it: a trainer that is made calls it."""
        from contaccum.adapters.plain_trainer import meet_trainer  # which knows this class

        meet_trainer()
        moved: ContAccumLoss = super()._apply(*args, **kwargs)
        return moved

    def _begin(self) -> None:
        if self.model.training and torch.is_grad_enabled():
            from contaccum.adapters.plain_trainer import join_training

            join_training(self)
        self._refuse_several_layers()

    def _refuse_several_layers(self) -> None:
        """In a loop of your own; a trainer's are refused when it begins."""
        if self.criterion.bank.size and self.model.training and takes_several_layers(self.model):
            raise ValueError("AdaptiveLayerLoss takes its loss of several layers, and the bank would hold vectors of all; use bank_size=0")

    def _batch(self, features: list[dict[str, Tensor]], labels: Tensor | None, at_once: int = TEXTS_AT_ONCE) -> Batch:
        """What is known of the texts before the model may change the features."""
        guide = None if self.guide is None else self.guide.embed(features, at_once)
        keys = [token_keys(column) for column in features]
        if self.mask_labels:
            keys[0] = _label_keys(labels)  # the positive of a query with the same key is no negative
        return Batch(keys, guide)

    def _at_width(self, decorator: Any, features: list[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """One of the calls of `MatryoshkaLoss`, which has decorated the model: all of a micro-batch share its vectors and enter it once."""
        shared: dict[ContAccumLoss, tuple[list[Tensor], Batch]] = vars(decorator).setdefault("whole_by_loss", {})  # there it dies with it
        if self not in shared:
            batch = self._batch(features, labels)
            embeddings = embed_undecorated(self.model, features)
            shared[self] = embeddings, replace(batch, whole=self._whole_vectors(embeddings, batch))
        embeddings, batch = shared[self]
        return self.compute_loss_from_embeddings([shrunk(column, decorator.dim) for column in embeddings], keys=batch)

    def _whole_vectors(self, embeddings: list[Tensor], batch: Batch) -> WholeVectors:
        self.criterion.train(self.model.training)
        return self.criterion.whole(*self._gathered([column.detach() for column in embeddings], batch))

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None, keys: Batch | list[Tensor | None] | None = None
    ) -> Tensor:
        """The loss of one micro-batch from the embeddings of its columns: queries, positives, then hard negatives.

        Losses around this one may call it, as `SpladeLoss` does; `keys` are then tensors of `token_keys`, one for each column.
        """
        batch = keys if isinstance(keys, Batch) else self._batch_of_vectors(keys or [None] * len(embeddings), labels)
        if None in batch.keys[1:]:
            self._warn_of_equal_texts()
        self.criterion.train(self.model.training)
        loss: Tensor = self.criterion(*self._gathered(embeddings, batch), whole=batch.whole)
        return loss

    def _batch_of_vectors(self, keys: list[Tensor | None], labels: Tensor | None) -> Batch:
        """For whoever has embedded the texts and calls without `forward`."""
        self._begin()
        if self.guide is not None:
            raise ValueError("a guide needs texts, and the loss around this one gives it embeddings alone; use margin without a guide")
        return Batch([_label_keys(labels), *keys[1:]] if self.mask_labels else keys)

    def _warn_of_equal_texts(self) -> None:
        criterion = self.criterion
        if self._warned or not (criterion.bank.size and criterion.mask_duplicates and self.model.training and torch.is_grad_enabled()):
            return
        self._warned = True
        warnings.warn(
            f"{type(self).__name__} gets no token ids here, so equal texts are each other's negatives, in the bank too; "
            "leave out rows with texts that appear twice, or say mask_duplicates=False where that is meant",
            stacklevel=2,
        )

    def _gathered(self, embeddings: list[Tensor], batch: Batch) -> tuple[Any, ...]:
        """The criterion's arguments, of all processes where this loss gathers."""
        keys, guide = batch.keys, batch.guide
        if self.gather_across_devices and dist.is_available() and dist.is_initialized():
            # Each column apart: a gathered block of positives and negatives would be cut in the wrong place. Every process then computes
            # the loss of the whole micro-batch; gather sums the gradients of all and the trainer's average divides them again.
            embeddings = [all_gather_with_grad(column) for column in embeddings]
            keys = [None if column is None else all_gather(column) for column in keys]
            guide = None if guide is None else [all_gather(column) for column in guide]
        queries, positives, *negatives = embeddings
        query_keys, *passage_keys = keys
        return (
            queries,
            positives,
            torch.stack(negatives, dim=1) if negatives else None,
            query_keys,
            torch.stack([k for k in passage_keys if k is not None], dim=1) if None not in passage_keys else None,
            None if guide is None else (guide[0], torch.stack(guide[1:], dim=1)),
        )

    def get_config_dict(self) -> dict[str, Any]:
        criterion = self.criterion
        return {
            "scale": self.scale,
            "similarity_fct": self.similarity_fct.__name__,
            "gather_across_devices": self.gather_across_devices,
            **{name: getattr(criterion.how, name) for name in _COMPARISON},
            "mask_labels": self.mask_labels,
            "guide": None if self.guide is None else self.guide.name,
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


def _label_keys(labels: Tensor | None) -> Tensor:
    if labels is None or labels.dim() != 1 or labels.is_floating_point():
        raise ValueError("mask_labels=True needs a column `label` with a whole number for each row; add one, or leave it out")
    return labels.to(torch.int64)


def _slice(columns: list[Any], start: int, size: int) -> list[Any]:
    return [None if column is None else column[start : start + size] for column in columns]


def feature_columns(sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    features = [countable(column) for column in sentence_features]
    if len(features) < 2:
        raise ValueError(f"a query and a positive column are needed, but the batch has {len(features)}; check the data set's columns")
    return features
