"""Memory that runs out at any operation of a bank leaves a bank that works, and equals an undisturbed one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contaccum import DualBankInfoNCE
from test_criterion import batch, losses_and_gradients


class RunsOut(TorchDispatchMode):
    """Memory runs out at operation number `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("made up")
        return function(*args, **(kwargs or {}))


def failures(criterion: DualBankInfoNCE, call: Callable[[DualBankInfoNCE], Any]) -> Iterator[DualBankInfoNCE]:
    """Copies of it, for each of which memory has run out at another operation of `call`."""
    for last in itertools.count():
        failed = copy.deepcopy(criterion)
        try:
            with RunsOut(last):
                call(failed)
        except torch.OutOfMemoryError:
            yield failed
        else:
            return


@pytest.mark.parametrize("query_bank_size", [None, 5])
@pytest.mark.parametrize("correction", [None, "mean"])
@pytest.mark.parametrize("size", [4, 9, 13])
def test_a_micro_batch_whose_entering_ran_out_of_memory_enters_at_the_next_use(
    size: int, correction: str | None, query_bank_size: int | None
) -> None:
    """Wherever in its entering that was; micro-batches that fill a part of the bank, nearly all, and more than all of it."""
    criterion = DualBankInfoNCE(bank_size=10, query_bank_size=query_bank_size, drift_correction=correction)
    for seed in range(4):
        keys = torch.arange(2 * size).view(-1, 2) + seed % 3
        then = {"query_keys": keys[:3, 0], "passage_keys": keys[:3]}
        criterion(*batch(n=size, seed=seed), query_keys=keys[:, 0], passage_keys=keys)
        undisturbed = copy.deepcopy(criterion)
        losses = [undisturbed(*batch(n=3, seed=90 + i), **then).item() for i in range(2)]
        entering = failures(criterion, lambda c: c.bank.admit_arrivals())
        found = [[failed(*batch(n=3, seed=90 + i), **then).item() for i in range(2)] for failed in entering]
        assert len(found) > 10
        assert torch.allclose(torch.tensor(found), torch.tensor(losses), rtol=1e-6)


@pytest.mark.parametrize("correction", [None, "mean"])
def test_a_first_micro_batch_that_ran_out_of_memory_leaves_a_bank_that_works(correction: str | None) -> None:
    """Among other places, where the bank is allocated."""
    criterion = DualBankInfoNCE(bank_size=10, query_bank_size=5, drift_correction=correction)
    expected = losses_and_gradients(copy.deepcopy(criterion), range(3))
    all_failed = list(failures(criterion, lambda c: losses_and_gradients(c, range(1))))
    assert len(all_failed) > 20
    for failed in all_failed:
        failed.bank.arrivals = None  # what a pass that failed later had left for it
        found = losses_and_gradients(failed, range(3))
        assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
