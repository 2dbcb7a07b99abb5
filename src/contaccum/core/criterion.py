"""`DualBankInfoNCE`: the dual-bank loss as a module for any PyTorch training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.core.bank import DualBank
from contaccum.core.bank_size import AUTO_BANK
from contaccum.core.corrected_bank import CorrectedBank
from contaccum.core.drift import CORRECTIONS, resolve_correction
from contaccum.core.infonce import GRADIENT_SCALES, Blocks, Columns, Gradients, Past, Rows, dual_bank_infonce, unit_vectors, with_gradients
from contaccum.core.stored_bank import StoredBank

SIMILARITIES = ("dot", "cosine")
BANK_DEPENDS_ON = ("scale", "similarity", "drift_correction")  # a saved bank fits a loss where these are equal


@dataclass(frozen=True)
class MicroStep:
    """What a training micro-step was computed from, for whoever watches it. Views: copy what is kept."""

    rows: Rows
    columns: Columns
    past: Past | None
    blocks: Blocks
    loss: Tensor  # detached
    ages: Tensor | None = None  # (m,) of the bank's tuples, in the order of past.columns

    @property
    def negatives_per_query(self) -> int:
        """Columns that a current query is compared with, its positive apart (masked duplicates included)."""
        banked = 0 if self.past is None else self.past.columns.passages.shape[0] * self.past.columns.passages.shape[1]
        return self.columns.passages.shape[0] * self.columns.passages.shape[1] + banked - 1


class DualBankInfoNCE(nn.Module):
    """InfoNCE over the current micro-batch and a bank of past queries and passages.

    With `drift_correction=None` this equals `contaccum.core.infonce.naive_dual_bank_infonce`, loss and gradients, at a cost linear in the
    bank. The default also corrects the stored vectors and the gradients on the passages. In training each call reads the bank and then
    lets the micro-batch enter; in evaluation mode or under `torch.no_grad()` the loss is the in-batch one and the bank is neither read
    nor written.

    Args:
        bank_size: tuples (query, positive, hard negatives) whose passages are kept. 0: plain in-batch InfoNCE. "auto": 1,024 until
            `resize_bank`, or a loaded state, says otherwise.
        scale: factor on the similarity, the inverse temperature.
        similarity: "dot" or "cosine". With cosine the bank holds unit vectors.
        query_bank_size: tuples whose queries are kept, at most `bank_size`; None: as many. 0: pre-batch negatives.
        clear_after_update: empty the bank at every `after_update`, so that it holds vectors of the present weights only.
        cache_hard_negatives: False banks positives only.
        mask_duplicates: use the keys, where given, to take a passage equal to a query's positive, and the positive of an
            identical query, out of that query's negatives.
        gradient_scale: "in-batch" keeps gradients on the scale of training without a bank, whatever the bank holds: a learning rate that
            suits in-batch training suits this. "paper" divides them by the banked rows too, so they shrink while the bank fills. The loss
            is the mean over all rows either way.
        drift_correction: "mean" reads stored vectors with the present mean of their tower instead of the mean of their time, which lets a
            bank help where weights move fast. "mean+zero-sum" also takes their running mean off the gradients on the passages, so that
            nothing pushes all of them the same way: see `contaccum.core.drift`. The mean runs over 16 samples, because that of one small
            micro-step is noise. Both cost O(bank_size^2) per micro-step: for banks of up to several thousand. None: the paper's way,
            vectors as they were stored. "auto": "mean+zero-sum" where the bank holds vectors of older weights, else None
            (not with `clear_after_update`, nor without a bank). The attribute shows which.
        start_update: updates before which there is no bank.
        query_bank_stop_update: update from which on the query bank is off; None: never.
        bank_dtype: precision of the stored vectors; None: float32 (float64 for float64 input).

    `observers` are called with a `MicroStep` after each training micro-step, before the micro-batch enters the bank.
    """

    def __init__(
        self,
        bank_size: int | str = AUTO_BANK,
        scale: float = 1.0,
        similarity: str = "dot",
        query_bank_size: int | None = None,
        clear_after_update: bool = False,
        cache_hard_negatives: bool = True,
        mask_duplicates: bool = True,
        gradient_scale: str = "in-batch",
        drift_correction: str | None = "auto",
        start_update: int = 0,
        query_bank_stop_update: int | None = None,
        bank_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        one_of("similarity", similarity, SIMILARITIES)
        one_of("gradient_scale", gradient_scale, GRADIENT_SCALES)
        if isinstance(scale, Tensor):
            raise ValueError("scale must be a number: scores between bank entries are kept, so a learnable scale cannot reach them")
        if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale={scale!r} must be a positive number; use 1.0 for dot and 20.0 for cosine")
        if drift_correction is not None:
            one_of("drift_correction", drift_correction, CORRECTIONS, "or None for the paper's way")
        self.auto_bank = bank_size == "auto"
        size = AUTO_BANK if self.auto_bank else _tuples("bank_size", bank_size)
        self.scale = float(scale)
        self.similarity = similarity
        self.clear_after_update = clear_after_update
        self.cache_hard_negatives = cache_hard_negatives
        self.mask_duplicates = mask_duplicates
        self.gradient_scale = gradient_scale
        self.start_update = _update("start_update", start_update)
        self.query_bank_stop_update = None if query_bank_stop_update is None else _update("query_bank_stop_update", query_bank_stop_update)
        self.drift_correction = resolve_correction(drift_correction, past_vectors=size > 0 and not clear_after_update)
        self._query_bank_size = None if query_bank_size is None else whole_number("query_bank_size", query_bank_size)
        self._bank_dtype = bank_dtype
        self.bank = self._empty_bank(size)
        self.updates = 0
        self.observers: list[Callable[[MicroStep], None]] = []

    def forward(
        self,
        queries: Tensor,
        positives: Tensor,
        negatives: Tensor | None = None,
        query_keys: Tensor | None = None,
        passage_keys: Tensor | None = None,
    ) -> Tensor:
        """Loss of a micro-batch: (n, d), (n, d), (n, h, d); keys int64 (n,), (n, 1 + h). Vectors of half precision give a float32 loss."""
        check_micro_batch(queries, positives, negatives, query_keys, passage_keys)
        queries, passages = self._vectors(queries, positives, negatives)
        if self._uses_bank():
            loss, gradients = self._banked(queries, passages, query_keys, passage_keys)
        else:
            rows, columns = self._tuples(queries, passages, query_keys, passage_keys, first=0)
            loss, gradients, blocks = dual_bank_infonce(rows, columns, None, self.scale, self.gradient_scale)
            if self.training and torch.is_grad_enabled():
                self._notify(MicroStep(rows, columns, None, blocks, loss))
        return with_gradients(loss, gradients, queries, passages)

    def _banked(
        self, queries: Tensor, passages: Tensor, query_keys: Tensor | None, passage_keys: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Loss over micro-batch and bank; then the micro-batch enters the bank."""
        self.bank.use_queries = self.query_bank_stop_update is None or self.updates < self.query_bank_stop_update
        rows, columns = self._tuples(queries, passages, query_keys, passage_keys, first=self.bank.count)
        banked = columns if self.cache_hard_negatives else columns.positives_only()
        self.bank.prepare(rows, banked)
        past = self.bank.past(rows, banked)
        loss, gradients, blocks = dual_bank_infonce(rows, columns, past, self.scale, self.gradient_scale)
        self.bank.adjust(gradients)
        self._notify(MicroStep(rows, columns, past, blocks, loss, None if past is None else self.bank.ages_by_slot))
        self.bank.push(rows, banked, past, blocks)
        return loss, gradients

    def _notify(self, step: MicroStep) -> None:
        for observer in self.observers:
            observer(step)

    def _uses_bank(self) -> bool:
        return self.bank.size > 0 and self.training and torch.is_grad_enabled() and self.updates >= self.start_update

    def after_update(self, lr_fraction: float = 1.0) -> None:
        """Call once after every optimizer update; `lr_fraction` is its learning rate over the peak one."""
        if not (math.isfinite(lr_fraction) and lr_fraction >= 0):
            raise ValueError(f"lr_fraction={lr_fraction} must be a number of at least 0: the learning rate over its peak")
        self.updates += 1
        if self.clear_after_update:
            self.bank.clear()
        else:
            self.bank.after_update(lr_fraction)

    def reset(self) -> None:
        """As new: no updates counted, no bank allocated."""
        self.updates = 0
        self.bank.release()

    def resize_bank(self, size: int) -> None:
        """Another `bank_size`, before anything has entered."""
        if self.bank.count:
            raise ValueError(f"the bank holds {len(self.bank)} tuples and cannot become one of {size}; call reset() to start a new bank")
        self.bank = self._empty_bank(size)

    def _empty_bank(self, size: int) -> DualBank:
        queries = self._query_bank_size
        if queries is not None and self.auto_bank:
            queries = min(queries, size)
        if self.drift_correction is None:
            return StoredBank(size, queries, self.scale, self._bank_dtype)
        unit, zero_sum = self.similarity == "cosine", self.drift_correction == "mean+zero-sum"
        return CorrectedBank(size, queries, self.scale, self._bank_dtype, unit, zero_sum)

    def _vectors(self, queries: Tensor, positives: Tensor, negatives: Tensor | None) -> tuple[Tensor, Tensor]:
        """(n, d) and (n, 1 + h, d) in computing precision, normalised for cosine; part of the autograd graph."""
        dtype = torch.promote_types(queries.dtype, torch.float32)
        with torch.autocast(queries.device.type, enabled=False):
            passages = positives[:, None] if negatives is None else torch.cat([positives[:, None], negatives], dim=1)
            queries, passages = queries.to(dtype), passages.to(dtype)
            if self.similarity == "cosine":
                queries, passages = unit_vectors(queries), unit_vectors(passages)
        return queries, passages

    def _tuples(
        self, queries: Tensor, passages: Tensor, query_keys: Tensor | None, passage_keys: Tensor | None, first: int
    ) -> tuple[Rows, Columns]:
        queries, passages = queries.detach(), passages.detach()
        ids = torch.arange(first, first + len(queries), device=queries.device)
        if not self.mask_duplicates:
            query_keys = passage_keys = None
        positive_keys = None if passage_keys is None else passage_keys[:, 0]
        return Rows(queries, ids, query_keys, positive_keys), Columns(passages, ids, query_keys, passage_keys)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A bank of automatic size becomes that of the state, before the bank loads its own part. What was kept must be of such a loss."""
        settings = state_dict.get(f"{prefix}_extra_state", {})
        for name in BANK_DEPENDS_ON:
            if name in settings and settings[name] != getattr(self, name):
                raise ValueError(
                    f"the saved bank is of {name}={settings[name]!r}, this loss has {name}={getattr(self, name)!r}; "
                    "use what it was saved with, or start again"
                )
        saved = state_dict.get(f"{prefix}bank._extra_state")
        if self.auto_bank and saved is not None:
            self.bank = self._empty_bank(saved["size"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> dict[str, Any]:
        return {"updates": self.updates, **{name: getattr(self, name) for name in BANK_DEPENDS_ON}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]

    def extra_repr(self) -> str:
        return (
            f"bank_size={self.bank.size}, query_bank_size={self.bank.query_size}, scale={self.scale}, similarity={self.similarity!r}, "
            f"gradient_scale={self.gradient_scale!r}, clear_after_update={self.clear_after_update}, "
            f"drift_correction={self.drift_correction!r}"
        )


def check_micro_batch(
    queries: Tensor, positives: Tensor, negatives: Tensor | None, query_keys: Tensor | None, passage_keys: Tensor | None
) -> None:
    """ValueError that names the first shape, type or device that does not fit."""
    if queries.dim() != 2 or len(queries) == 0 or not queries.is_floating_point():
        raise ValueError(f"queries must be floating-point vectors (n, d) with n > 0, not {_describe(queries)}")
    n, d = queries.shape
    if positives.shape != queries.shape:
        raise ValueError(f"positives must be (n, d) = ({n}, {d}) as the queries are, not {_describe(positives)}")
    if negatives is not None and (negatives.dim() != 3 or negatives.shape[0] != n or negatives.shape[2] != d):
        raise ValueError(
            f"negatives must be (n, h, d) = ({n}, h, {d}), not {_describe(negatives)}; stack the hard negatives of a query in dim 1"
        )
    h = 0 if negatives is None else negatives.shape[1]
    _check_keys("query_keys", query_keys, (n,))
    _check_keys("passage_keys", passage_keys, (n, 1 + h))
    for name, tensor in (("positives", positives), ("negatives", negatives), ("query_keys", query_keys), ("passage_keys", passage_keys)):
        if tensor is not None and tensor.device != queries.device:
            raise ValueError(f"{name} lie on {tensor.device} but queries on {queries.device}; move them to one device")


def _check_keys(name: str, keys: Tensor | None, shape: tuple[int, ...]) -> None:
    if keys is not None and (tuple(keys.shape) != shape or keys.dtype != torch.int64):
        raise ValueError(f"{name} must be int64 of shape {shape}: one key per text, not {_describe(keys)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def one_of(name: str, value: str, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join([*choices, more] if more else choices)}")


def _tuples(name: str, value: int | str) -> int:
    if isinstance(value, str):
        raise ValueError(f'{name}={value!r} is not a number of tuples; give one, or "auto"')
    return whole_number(name, value)


def _update(name: str, value: int) -> int:
    if whole_number(name, value) < 0:
        raise ValueError(f"{name}={value} is negative; updates are counted from 0")
    return int(value)


def whole_number(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a whole number; give one")
    return int(value)
