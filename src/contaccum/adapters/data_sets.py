"""Which data sets a loss serves, and how large a bank of automatic size is for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import TrainerState, TrainingArguments

from contaccum.adapters.losses import ContAccumLoss
from contaccum.core.bank_size import auto_bank

Losses = nn.Module | dict[str, nn.Module]


def bank_losses(loss: Losses) -> Iterator[ContAccumLoss]:
    """Each once, also where one serves several data sets; by the names of their data sets, in whatever order those were given."""
    parts = [loss[name] for name in sorted(loss)] if isinstance(loss, dict) else [loss]
    found = [module for part in parts for module in part.modules() if isinstance(module, ContAccumLoss)]
    yield from dict.fromkeys(found)


def rows_by_data_set(loader: Any) -> dict[str, int]:
    """Rows of each training data set of a `DatasetDict`, by name where its batches carry it, else by number. Empty: there is but one."""
    parts = getattr(getattr(loader, "dataset", None), "datasets", [])
    return {part[0].get("dataset_name", str(i)): len(part) for i, part in enumerate(parts)}


def served_by(loss: ContAccumLoss, losses: Losses, rows: dict[str, int]) -> list[str]:
    """The data sets whose batches come to this loss."""
    return [name for name in rows if not isinstance(losses, dict) or (name in losses and loss in losses[name].modules())]


def names_of(loss: ContAccumLoss, losses: Losses) -> list[str]:
    """Under which it stands in a dict of losses."""
    return sorted(name for name in losses if loss in losses[name].modules()) if isinstance(losses, dict) else []


@dataclass(frozen=True)
class BankSizes:
    """Automatic sizes: `auto_bank` of what enters a bank, from all processes if its loss gathers, and of several losses its share."""

    losses: Losses
    args: TrainingArguments
    state: TrainerState
    loader: Any

    def of(self, loss: ContAccumLoss, data_sets: list[str]) -> int:
        batch = self.state.train_batch_size or self.args.train_batch_size
        processes = self.args.world_size if loss.gather_across_devices else 1
        _, share = self._rows_and_share(data_sets)
        n_total = max(1, round(batch * self.args.gradient_accumulation_steps * processes * share))
        return auto_bank(n_total, (loss.micro_batch_size or batch) * processes, self.rows(loss, data_sets))

    def rows(self, loss: ContAccumLoss, data_sets: list[str]) -> int | None:
        """Training rows that enter its bank, where they are known."""
        rows, _ = self._rows_and_share(data_sets)
        return rows if rows is None or loss.gather_across_devices else rows // self.args.world_size

    def _rows_and_share(self, data_sets: list[str]) -> tuple[int | None, float]:
        """Training rows of these data sets, where they are known, and their share of the micro-batches."""
        by_name = rows_by_data_set(self.loader)
        if not by_name:
            data = getattr(self.loader, "dataset", None)
            rows = len(data) if isinstance(data, Sized) else None
            losses = len({id(part) for part in self.losses.values()}) if isinstance(self.losses, dict) else 1
            return (None if rows is None else rows // losses), 1 / losses
        mine = [by_name[name] for name in data_sets]
        in_turn = getattr(getattr(self.args, "multi_dataset_batch_sampler", None), "value", None) == "round_robin"
        return sum(mine), len(mine) / len(by_name) if in_turn else sum(mine) / sum(by_name.values())
