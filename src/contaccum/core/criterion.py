"""`DualBankInfoNCE`: the dual-bank loss as a module for any PyTorch training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from contaccum.core.bank import DualBank
from contaccum.core.bank_size import AUTO_BANK
from contaccum.core.checks import check_comparison, check_guide, check_micro_batch, check_scale, one_of, tuples, update_number, whole_number
from contaccum.core.comparison import Comparison, general_infonce
from contaccum.core.corrected_bank import CorrectedBank
from contaccum.core.direct_bank import DirectBank
from contaccum.core.drift import CORRECTIONS, resolve_correction
from contaccum.core.infonce import GRADIENT_SCALES, Blocks, Columns, Gradients, Past, Rows, dual_bank_infonce, unit_vectors, with_gradients
from contaccum.core.micro_batch import MicroStep, WholeVectors, as_tuples
from contaccum.core.stored_bank import StoredBank

SIMILARITIES = ("dot", "cosine")
COMPARED_BY = ("directions", "hardness_mode", "hardness_strength", "margin")


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
        mask_duplicates: use the keys, where given: see `contaccum.core.infonce.duplicate_mask`.
        gradient_scale: "in-batch" keeps gradients on the scale of training without a bank, whatever the bank holds: a learning rate that
            suits in-batch training suits this. "paper" divides them by the banked rows too, so they shrink while the bank fills. The loss
            is the mean over all rows either way.
        drift_correction: "mean" reads stored vectors with the present mean of their tower instead of the mean of their time, which lets a
            bank help where weights move fast. "mean+zero-sum" also takes their running mean off the gradients on the passages, so that
            nothing pushes all of them the same way: see `contaccum.core.drift`. Both cost O(bank_size^2) per micro-step: for banks of up
            to several thousand. None: the paper's way, vectors as they were stored. "auto": "mean+zero-sum" where the bank holds vectors
            of older weights, else None (not with `clear_after_update`, nor without a bank). The attribute shows which.
        start_update: updates before which there is no bank.
        query_bank_stop_update: update from which on the query bank is off; None: never.
        bank_dtype: precision of the stored vectors; None: float32 (float64 for float64 input).
        comparison: options of `contaccum.core.comparison.Comparison`: directions, harder negatives, negatives that are left out. Other
            than its defaults cost O(bank_size^2) per micro-step, and "auto" is "mean" with other directions.

    Several data sets whose passages must not be each other's negatives have a bank each: `use_bank(name)` before a micro-batch of one.
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
        **comparison: Any,
    ) -> None:
        super().__init__()
        one_of("similarity", similarity, SIMILARITIES)
        one_of("gradient_scale", gradient_scale, GRADIENT_SCALES)
        if drift_correction is not None:
            one_of("drift_correction", drift_correction, CORRECTIONS, "or None for the paper's way")
        self.auto_bank = bank_size == "auto"
        size = AUTO_BANK if self.auto_bank else tuples("bank_size", bank_size)
        check_scale(scale)
        self.how = Comparison(float(scale), **comparison)
        self._first_scale = float(scale)
        check_comparison(self.how)
        self.similarity = similarity
        self.clear_after_update = clear_after_update
        self.cache_hard_negatives = cache_hard_negatives
        self.mask_duplicates = mask_duplicates
        self.gradient_scale = gradient_scale
        self.start_update = update_number("start_update", start_update)
        stop = query_bank_stop_update
        self.query_bank_stop_update = None if stop is None else update_number("query_bank_stop_update", stop)
        one_direction, past_vectors = len(self.how.directions) == 1, size > 0 and not clear_after_update
        self.drift_correction = resolve_correction(drift_correction, past_vectors, one_direction)
        self._query_bank_size = None if query_bank_size is None else whole_number("query_bank_size", query_bank_size)
        self._bank_dtype = bank_dtype
        self.banks = nn.ModuleList([self._empty_bank(size)])
        self.bank_names = [""]  # of each of them: the first needs no name
        self._selected = 0
        self.updates = 0
        self.observers: list[Callable[[MicroStep], None]] = []
        self.kept_with: dict[str, Any] = {}  # what else a saved bank depends on, as who makes the keys knows it

    @property
    def scale(self) -> float:
        return self.how.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        """What the bank keeps of scores is computed again."""
        check_scale(scale)
        if scale == self.scale:
            return
        self.how = replace(self.how, scale=float(scale))
        for bank in self._all_banks():
            bank.rescale(self.how)

    @property
    def bank(self) -> DualBank:
        """The bank in use."""
        bank: DualBank = self.banks[self._selected]  # type: ignore[assignment]
        return bank

    @property
    def bank_name(self) -> str:
        return self.bank_names[self._selected]

    def use_bank(self, name: str = "") -> None:
        """Go on with the bank of this name, an empty one where there is none yet."""
        if name not in self.bank_names:
            self.bank_names.append(name)
            self.banks.append(self._empty_bank(self._all_banks()[0].size))
        self._selected = self.bank_names.index(name)

    def forward(
        self,
        queries: Tensor,
        positives: Tensor,
        negatives: Tensor | None = None,
        query_keys: Tensor | None = None,
        passage_keys: Tensor | None = None,
        guide: tuple[Tensor, Tensor] | None = None,
        whole: WholeVectors | None = None,
    ) -> Tensor:
        """Loss of a micro-batch: (n, d), (n, d), (n, h, d); keys int64 (n,), (n, 1 + h). Vectors of half precision give a float32 loss.

        `guide`: a guide model's vectors of the same texts, (n, g) and (n, 1 + h, g). `whole`: the micro-batch at full width, of which these
        vectors are a cut (see `whole`); keys and guide are then its own.
        """
        check_micro_batch(queries, positives, negatives, query_keys, passage_keys)
        check_guide(guide, queries, negatives, self.how)
        queries, passages = self._vectors(queries, positives, negatives)
        banked, vectors = self._uses_bank(), (queries.detach(), passages.detach())
        first = self.bank.count if banked and not (whole and whole.entered) else 0
        tuples = self._tuples(vectors, query_keys, passage_keys, guide, first) if whole is None else whole.cut_to(*vectors, first)
        if not banked:
            loss, gradients = self._in_batch(whole, *tuples)
        elif whole is None:
            loss, gradients = self._banked(*tuples)
        else:
            loss, gradients = self._banked_cut(whole, *tuples)
        return with_gradients(loss, gradients, queries, passages)

    def whole(
        self,
        queries: Tensor,
        positives: Tensor,
        negatives: Tensor | None = None,
        query_keys: Tensor | None = None,
        passage_keys: Tensor | None = None,
        guide: tuple[Tensor, Tensor] | None = None,
    ) -> WholeVectors:
        """A micro-batch whose loss is taken at several widths, one call each: `criterion(cut queries, ..., whole=this)`.

        Its vectors enter the bank at the first of them, scaled to unit length, and are seen by later micro-batches. Each call reads the
        bank cut to its width and scaled to unit length: with drift correction after the means were added.
        """
        check_micro_batch(queries, positives, negatives, query_keys, passage_keys)
        check_guide(guide, queries, negatives, self.how)
        queries, passages = self._vectors(queries, positives, negatives)
        vectors = unit_vectors(queries.detach()), unit_vectors(passages.detach())
        return WholeVectors(*self._tuples(vectors, query_keys, passage_keys, guide))

    def _in_batch(self, whole: WholeVectors | None, rows: Rows, columns: Columns) -> tuple[Tensor, Gradients]:
        loss, gradients, blocks = self._loss(rows, columns, None)
        if self.training and torch.is_grad_enabled() and not (whole and whole.entered):
            self._notify(MicroStep(rows, columns, None, blocks, loss))
        if whole is not None:
            whole.entered = True  # nothing does, but observers have been called
        return loss, gradients

    def _banked(self, rows: Rows, columns: Columns) -> tuple[Tensor, Gradients]:
        """Loss over micro-batch and bank; then the micro-batch enters the bank."""
        banked = self._prepared(rows, columns)
        past = self.bank.past(rows, banked)
        loss, gradients, blocks = self._seen(rows, columns, past)
        self.bank.push(rows, banked, past, blocks)
        return loss, gradients

    def _banked_cut(self, whole: WholeVectors, rows: Rows, columns: Columns) -> tuple[Tensor, Gradients]:
        """The same at a width of several: only the first lets the micro-batch enter, and none reads it."""
        width = rows.queries.shape[1]
        if whole.entered:
            with self.bank.without_arrivals():
                past = self.bank.past(whole.rows, self._to_bank(whole.columns), width)
                loss, gradients, _ = self._loss(rows, columns, past)
                self.bank.adjust(gradients)
                return loss, gradients
        banked = self._prepared(whole.rows, whole.columns)
        loss, gradients, _ = self._seen(rows, columns, self.bank.past(whole.rows, banked, width))
        self.bank.push(whole.rows, banked)
        whole.entered = True
        return loss, gradients

    def _prepared(self, rows: Rows, columns: Columns) -> Columns:
        """What of a micro-batch will enter the bank, which is ready for it."""
        self.bank.use_queries = self.query_bank_stop_update is None or self.updates < self.query_bank_stop_update
        banked = self._to_bank(columns)
        self.bank.prepare(rows, banked)
        return banked

    def _to_bank(self, columns: Columns) -> Columns:
        return columns if self.cache_hard_negatives else columns.positives_only()

    def _seen(self, rows: Rows, columns: Columns, past: Past | None) -> tuple[Tensor, Gradients, Blocks]:
        """Loss and corrected gradients; observers are called."""
        loss, gradients, blocks = self._loss(rows, columns, past)
        self.bank.adjust(gradients)
        ages = None if past is None else self.bank.ages_by_slot
        self._notify(MicroStep(rows, columns, past, blocks, loss, ages, self.bank_name))
        return loss, gradients, blocks

    def _loss(self, rows: Rows, columns: Columns, past: Past | None) -> tuple[Tensor, Gradients, Blocks]:
        if self.how.plain:
            return dual_bank_infonce(rows, columns, past, self.scale, self.gradient_scale)
        return general_infonce(rows, columns, past, self.how, self.gradient_scale)

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
        for bank in self._all_banks():
            if self.clear_after_update:
                bank.clear()
            else:
                bank.after_update(lr_fraction)

    def after_skipped_update(self) -> None:
        """Call instead where the optimizer has skipped its step, as for an overflow in half precision."""
        for bank in self._all_banks():
            bank.after_skipped_update()

    def reset(self) -> None:
        """As new: no updates counted, no bank allocated, none named."""
        self.updates = 0
        self.banks, self.bank_names, self._selected = self.banks[:1], [""], 0
        self.bank.release()

    def resize_bank(self, size: int) -> None:
        """Another `bank_size` for the bank in use, before anything has entered."""
        if self.bank.count:
            raise ValueError(f"the bank holds {len(self.bank)} tuples and cannot become one of {size}; call reset() to start a new bank")
        self.banks[self._selected] = self._empty_bank(size)

    def _all_banks(self) -> list[DualBank]:
        return list(self.banks)  # type: ignore[arg-type]

    def _empty_bank(self, size: int) -> DualBank:
        queries = self._query_bank_size
        if queries is not None and self.auto_bank:
            queries = min(queries, size)
        if self.drift_correction is None:
            return (StoredBank if self.how.plain else DirectBank)(size, queries, self.how, self._bank_dtype)
        unit, zero_sum = self.similarity == "cosine", self.drift_correction == "mean+zero-sum"
        return CorrectedBank(size, queries, self.how, self._bank_dtype, unit, zero_sum)

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
        self,
        vectors: tuple[Tensor, Tensor],
        query_keys: Tensor | None,
        passage_keys: Tensor | None,
        guide: tuple[Tensor, Tensor] | None,
        first: int = 0,
    ) -> tuple[Rows, Columns]:
        keys = (query_keys, passage_keys) if self.mask_duplicates else (None, None)
        return as_tuples(*vectors, *keys, guide, first)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Banks get the names of the state, those of automatic size its sizes, before each loads its own part. What was kept must be of
        such a loss."""
        settings = state_dict.get(f"{prefix}_extra_state", {})
        for name, value in self._bank_depends_on().items():
            if name in settings and settings[name] != value:
                raise ValueError(
                    f"the saved bank is of {name}={settings[name]!r}, this loss has {name}={value!r}; "
                    "use what it was saved with, or start again"
                )
        if "present_scale" in settings:
            self.how = replace(self.how, scale=settings["present_scale"])
        self._take_banks([state_dict.get(f"{prefix}banks.{i}._extra_state") for i in range(len(settings.get("bank_names", [])))])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _take_banks(self, saved: list[dict[str, Any] | None]) -> None:
        """As many empty banks as were saved; of automatic size, each as large."""
        sizes = [state["size"] if self.auto_bank and state is not None else self.banks[0].size for state in saved]
        if saved:
            self.banks, self._selected = nn.ModuleList([self._empty_bank(size) for size in sizes]), 0  # type: ignore[arg-type]

    def get_extra_state(self) -> dict[str, Any]:
        return {"updates": self.updates, "bank_names": self.bank_names, "present_scale": self.scale, **self._bank_depends_on()}

    def _bank_depends_on(self) -> dict[str, Any]:
        """A saved bank fits a loss where these are equal."""
        dtype = None if self._bank_dtype in (None, torch.float32) else str(self._bank_dtype)
        compared = {name: getattr(self.how, name) for name in COMPARED_BY}
        own = {name: getattr(self, name) for name in ("similarity", "drift_correction", "mask_duplicates")}
        return {"scale": self._first_scale, **own, "bank_dtype": dtype, **compared, **self.kept_with}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.updates, self.bank_names = state["updates"], list(state["bank_names"])

    def extra_repr(self) -> str:
        return (
            f"bank_size={self.bank.size}, query_bank_size={self.bank.query_size}, scale={self.scale}, similarity={self.similarity!r}, "
            f"gradient_scale={self.gradient_scale!r}, clear_after_update={self.clear_after_update}, "
            f"drift_correction={self.drift_correction!r}"
        )
