"""Several data sets, one loss: a bank for each. And a loss in a trainer that knows nothing of banks."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

from conftest import rows
from contaccum import CachedContAccumLoss, ContAccumCallback, ContAccumLoss, ContAccumTrainer, DualBankInfoNCE
from contaccum.adapters.data_sets import bank_losses
from contaccum.common.errors import CheckpointError
from test_trainer import arguments, assert_bit_equal, dataset, state_of, trained

ROUTES = {"query": "query", "positive": "document", "negative": "document"}


def two_data_sets() -> DatasetDict:
    """The second has a hard negative."""
    triplets = [{"query": r["query"], "positive": r["positive"], "negative": r["negatives"][0]} for r in rows(24, 1, seed=5)]
    return DatasetDict({"pairs": dataset(40), "triplets": Dataset.from_list(triplets)})


def banks_of(loss: ContAccumLoss) -> list[dict[str, Tensor]]:
    named = zip(loss.criterion.bank_names, loss.criterion.banks, strict=True)
    return [{k: v for k, v in bank.state_dict().items() if isinstance(v, Tensor)} for name, bank in named if len(bank) or name]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"bank_size": 12}, {"bank_size": 12, "clear_after_update": True}, {"bank_size": "auto"}, {"bank_size": 20, "drift_correction": None}],
)
def test_one_loss_for_two_data_sets_equals_a_loss_for_each(tiny_encoder, tmp_path, cached: bool, options: dict[str, Any]) -> None:
    """Bit by bit: weights and banks."""
    kind = partial(CachedContAccumLoss, mini_batch_size=2) if cached else ContAccumLoss
    trainers, common = [], {"router_mapping": ROUTES, "num_train_epochs": 2, "multi_dataset_batch_sampler": "round_robin"}
    for alone in (True, False):
        model = tiny_encoder()
        loss: Any = kind(model, **options)
        if not alone:
            loss = {"pairs": loss, "triplets": kind(model, **options)}
        trainers.append(trained(model, tmp_path / str(alone), loss=loss, data=two_data_sets(), **common))
    (one,), two = bank_losses(trainers[0].loss), list(bank_losses(trainers[1].loss))
    assert one.criterion.bank_names == ["", "pairs", "triplets"]
    assert_bit_equal(trainers[0].model.state_dict(), trainers[1].model.state_dict())
    assert [bank.size for bank in one.criterion.banks[1:]] == [loss.criterion.bank.size for loss in two]
    cleared = "clear_after_update" in options
    assert [len(bank) > 0 for bank in one.criterion.banks] == [False, not cleared, not cleared]
    for mine, loss in zip(banks_of(one), two, strict=True):
        assert_bit_equal(mine, {k: v for k, v in loss.criterion.bank.state_dict().items() if isinstance(v, Tensor)})


def test_one_bank_for_both_would_be_another_training(tiny_encoder, tmp_path) -> None:
    """Guards the test above: a loss that does not know the data set mixes them."""
    data = {"a": dataset(40), "b": dataset(24)}
    outcome = trained(tiny_encoder(), tmp_path / "a", data=DatasetDict(data))

    class Deaf(ContAccumTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            inputs.pop("dataset_name")
            return super().compute_loss(model, inputs, *args, **kwargs)

    mixed = trained(tiny_encoder(), tmp_path / "b", Deaf, data=DatasetDict(data))
    assert not torch.equal(*(next(iter(t.model.parameters())) for t in (outcome, mixed)))


def test_a_resumed_training_has_the_bank_of_each_data_set(tiny_encoder, tmp_path) -> None:
    def run(folder: str, **more: Any) -> ContAccumTrainer:
        model = tiny_encoder()
        options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "router_mapping": ROUTES, **more}
        return trained(model, tmp_path / folder, loss=ContAccumLoss(model), data=two_data_sets(), **options)

    whole = run("a")
    resumed = run("a", resume=str(tmp_path / "a" / "checkpoint-3"))
    assert_bit_equal(whole.model.state_dict(), resumed.model.state_dict())
    mine, theirs = (banks_of(trainer.loss) for trainer in (whole, resumed))
    assert len(mine) == len(theirs) == 2
    for a, b in zip(mine, theirs, strict=True):
        assert_bit_equal(a, b)


@pytest.mark.parametrize(("sampler", "expected"), [("proportional", [4, 56, 8]), ("round_robin", [4, 32, 20])])
def test_automatic_sizes_follow_each_data_set(tiny_encoder, tmp_path, sampler: str, expected: list[int]) -> None:
    """As those of a loss each (tests/test_trainer.py). What a data set does not use stays as small as it was."""
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size="auto")
    loss.criterion.resize_bank(4)
    data = DatasetDict({"b": dataset(1600), "a": dataset(320)})
    trained(model, tmp_path, loss=loss, data=data, max_steps=2, multi_dataset_batch_sampler=sampler)
    assert [bank.size for bank in loss.criterion.banks] == expected
    cards = [re.findall(r'"bank_size": (\d+)', info["loss"]["config_code"]) for info in model.model_card_data.train_datasets]
    assert cards == [[str(size)] for size in expected[1:]]


def test_observers_hear_which_bank_it_was(tiny_encoder, tmp_path) -> None:
    model, seen = tiny_encoder(), []
    loss = ContAccumLoss(model, bank_size=12)
    loss.criterion.observers.append(lambda step: seen.append(step.bank_name))
    trained(model, tmp_path, loss=loss, data=DatasetDict({"a": dataset(16), "b": dataset(16)}))
    assert sorted(seen) == ["a"] * 4 + ["b"] * 4


def test_a_new_training_has_banks_for_its_own_data_sets(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=12)
    trained(model, tmp_path, loss=loss, data=DatasetDict({"a": dataset(16), "b": dataset(16)}))
    trained(model, tmp_path, loss=loss, data=dataset(16))
    assert loss.criterion.bank_names == [""]
    assert len(loss.criterion.bank) == 12


@pytest.mark.parametrize("callback", [False, True])
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_plain_trainer_refuses_to_mix_data_sets(tiny_encoder, tmp_path, callback: bool, as_dict: bool) -> None:
    model = tiny_encoder()
    loss: Any = ContAccumLoss(model, bank_size=12)
    loss = {"a": loss, "b": loss} if as_dict else loss
    callbacks = [ContAccumCallback(loss)] if callback else None
    data = DatasetDict({"a": dataset(16), "b": dataset(16)})
    with pytest.raises(ValueError, match=re.escape("one ContAccumLoss serves the data sets a, b, and this trainer does not tell it")):
        trained(model, tmp_path, SentenceTransformerTrainer, loss, data, callbacks=callbacks)


@pytest.mark.parametrize("callback", [False, True])
def test_a_plain_trainer_may_have_a_loss_for_each_data_set(tiny_encoder, tmp_path, callback: bool) -> None:
    results = []
    for plain in (False, True):
        model = tiny_encoder()
        losses = {"a": ContAccumLoss(model), "b": ContAccumLoss(model), "c": MultipleNegativesRankingLoss(model)}
        data = DatasetDict({name: dataset(16 * (1 + i)) for i, name in enumerate("abc")})
        callbacks = [ContAccumCallback(losses)] if callback and plain else None
        kind = SentenceTransformerTrainer if plain else ContAccumTrainer
        trained(model, tmp_path / str(plain), kind, losses, data, callbacks=callbacks)
        results.append([model.state_dict(), *(banks_of(loss)[0] for loss in bank_losses(losses))])
    for mine, theirs in zip(*results, strict=True):
        assert_bit_equal(mine, theirs)


def test_gathering_would_mix_data_sets(tiny_encoder) -> None:
    """At one step each process may have a batch of another data set."""
    loss = ContAccumLoss(tiny_encoder(), gather_across_devices=True)
    args, state = SimpleNamespace(should_save=True, world_size=2), SimpleNamespace(global_step=0)
    loader = SimpleNamespace(dataset=torch.utils.data.ConcatDataset([dataset(8), dataset(8)]))
    with pytest.raises(ValueError, match="gather_across_devices=True would mix data sets"):
        ContAccumCallback(loss).on_train_begin(args, state, None, train_dataloader=loader)


@pytest.mark.parametrize("options", [{}, {"start_update": 2}, {"query_bank_stop_update": 2}, {"clear_after_update": True}])
@pytest.mark.parametrize("cached", [False, True])
def test_a_plain_trainer_without_callback_equals_contaccum_s(tiny_encoder, tmp_path, options: dict[str, Any], cached: bool) -> None:
    """Size of the bank, updates, ages, checkpoints: the loss adds the callback itself."""
    results = []
    for kind in (ContAccumTrainer, SentenceTransformerTrainer):
        model = tiny_encoder()
        loss = (partial(CachedContAccumLoss, mini_batch_size=2) if cached else ContAccumLoss)(model, **options)
        folder = tmp_path / kind.__name__
        trainer = trained(model, folder, kind, loss, dataset(320), max_steps=6, save_strategy="steps", save_steps=3)
        assert (folder / "checkpoint-3" / "contaccum_state.pt").exists()
        assert (loss.criterion.updates, loss.criterion.bank.size) == (6, 20)
        results.append(state_of(trainer))
        again = tiny_encoder()
        loss = (partial(CachedContAccumLoss, mini_batch_size=2) if cached else ContAccumLoss)(again, **options)
        saved = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "resume": str(folder / "checkpoint-3")}
        results.append(state_of(trained(again, folder, kind, loss, dataset(320), **saved)))
    for result in results[1:]:
        assert_bit_equal(result, results[0])


def test_a_second_training_by_a_plain_trainer_starts_with_an_empty_bank(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=100)
    trainer = trained(model, tmp_path, SentenceTransformerTrainer, loss)
    trainer.train()
    assert (len(loss.criterion.bank), loss.criterion.updates) == (32, 4)
    assert sum(isinstance(c, ContAccumCallback) for c in trainer.callback_handler.callbacks) == 1


SOME = {"gradient_accumulation_steps": 1, "multi_dataset_batch_sampler": "round_robin", "save_strategy": "steps", "save_steps": 1}


def some_are_ours(model: Any) -> dict[str, Any]:
    """The first batch is not for ours."""
    return {"other": MultipleNegativesRankingLoss(model), "ours": ContAccumLoss(model, bank_size=12)}


@pytest.mark.parametrize("step", [1, 4])
def test_a_plain_trainer_some_of_whose_losses_have_a_bank_is_resumed(tiny_encoder, tmp_path, step: int) -> None:
    """Bit by bit, also from a checkpoint before the first batch for them, in another folder and beside checkpoints of another run."""
    data = DatasetDict({"other": dataset(16), "ours": dataset(16)})

    def run(folder: str, kind: Any = SentenceTransformerTrainer, **options: Any) -> Any:
        model = tiny_encoder()
        return trained(model, tmp_path / folder, kind, some_are_ours(model), data, **SOME, **options)

    whole = run("whole")
    assert whole.loss["ours"].criterion.updates == whole.state.global_step == 8
    assert (tmp_path / "whole" / "checkpoint-1" / "contaccum_state.pt").exists()
    run("other", seed=2)
    from_start = {"resume": str(tmp_path / "whole" / f"checkpoint-{step}")}
    for again in (run("given", ContAccumTrainer), run("other", **from_start), run("new", **from_start)):
        assert_bit_equal(state_of(again), state_of(whole))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_loss_that_a_plain_trainer_gets_late_counts_the_updates_before(tiny_encoder, tmp_path, resumed: bool) -> None:
    """Where the trainer was made with another."""
    data = DatasetDict({"other": dataset(16), "ours": dataset(16)})
    model = tiny_encoder()
    trained(model, tmp_path, SentenceTransformerTrainer, some_are_ours(model), data, **SOME, max_steps=2)
    args = arguments(tmp_path, **SOME | {"save_strategy": "no"})
    losses = {name: MultipleNegativesRankingLoss(model) for name in data}
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=losses)
    trainer.loss["ours"] = ours = ContAccumLoss(model, bank_size=12, start_update=4)
    sizes: list[int] = []
    ours.criterion.observers.append(lambda step: sizes.append(0 if step.past is None else len(step.past.columns)))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
    assert ours.criterion.updates == trainer.state.global_step == 8
    assert sizes == ([0, 4, 8] if resumed else [0, 0, 0, 4])


def test_a_loss_that_the_trainer_does_not_show_is_refused(tiny_encoder, tmp_path) -> None:
    """Or named by a callback."""

    class Hidden(nn.Module):
        def __init__(self, loss: ContAccumLoss) -> None:
            super().__init__()
            self.model, self.losses = loss.model, [loss]

        def forward(self, *args: Any) -> Tensor:
            return self.losses[0](*args)

    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=12)
    with pytest.raises(ValueError, match=re.escape("is not found in trainer.loss: it is in a plain list there")):
        trained(model, tmp_path, SentenceTransformerTrainer, Hidden(loss))
    trained(model, tmp_path, SentenceTransformerTrainer, Hidden(loss), callbacks=[ContAccumCallback(loss)])
    assert loss.criterion.updates == 4


def test_a_callback_that_is_added_to_a_plain_trainer_is_the_only_one(tiny_encoder, tmp_path) -> None:
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = tiny_encoder()
        loss = ContAccumLoss(model, bank_size=12)
        args = arguments(tmp_path, save_strategy="steps", save_steps=2)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=dataset(), loss=loss)
        trainer.add_callback(ContAccumCallback(loss))
        trainer.train(resume_from_checkpoint=resume)
        assert loss.criterion.updates == 4
        assert len(torch.load(tmp_path / "checkpoint-4" / "contaccum_state.pt", weights_only=True)) == 1


def test_a_callback_of_another_loss_is_refused(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    callbacks = [ContAccumCallback(ContAccumLoss(model))]
    with pytest.raises(ValueError, match="the trainer's ContAccumCallback is of another loss than it trains with"):
        trained(model, tmp_path, SentenceTransformerTrainer, ContAccumLoss(model), callbacks=callbacks)


def test_banks_by_name_in_a_loop_of_one_s_own() -> None:
    """Each equals a criterion of its own, also from a saved state and with vectors of another width."""

    def batch(seed: int) -> list[Tensor]:
        width = 8 if seed % 2 else 6
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(3, width, generator=generator, requires_grad=True) for _ in range(2)]

    both, apart = DualBankInfoNCE(bank_size=7), [DualBankInfoNCE(bank_size=7) for _ in range(2)]
    for seed in range(12):
        if seed == 6:
            state, both = both.state_dict(), DualBankInfoNCE(bank_size=7)
            [criterion.state_dict() for criterion in apart]  # whoever is asked for it computes its kept scores again
            both.load_state_dict(state)
            assert both.bank_names == ["", "0", "1"]
        both.use_bank(str(seed % 2))
        assert torch.equal(both(*batch(seed)), apart[seed % 2](*batch(seed)))
        if seed % 3 == 2:
            both.after_update(0.5), [criterion.after_update(0.5) for criterion in apart]
    assert both.updates == 4
    assert torch.equal(both.bank.ages, apart[1].bank.ages)
    both.reset()
    assert both.bank_names == [""]


def test_banks_are_resumed_by_the_names_of_their_data_sets(tiny_encoder, tmp_path) -> None:
    """In whatever order the losses are given."""
    data = DatasetDict({"a": dataset(40), "b": dataset(24)})
    found = []
    for name, names, resume in (("whole", "ab", None), ("resumed", "ba", str(tmp_path / "whole" / "checkpoint-3"))):
        model = tiny_encoder()
        loss: Any = {key: ContAccumLoss(model, bank_size=12) for key in names}
        trainer = trained(model, tmp_path / name, loss=loss, data=data, save_strategy="steps", save_steps=3, resume=resume)
        found.append((trainer.model.state_dict(), {key: banks_of(trainer.loss[key])[0] for key in "ab"}))
    assert_bit_equal(found[0][0], found[1][0])
    for key in "ab":
        assert_bit_equal(found[0][1][key], found[1][1][key])
    assert not torch.equal(found[0][1]["a"]["_queries"], found[0][1]["b"]["_queries"])


@pytest.mark.parametrize(
    ("saved", "present", "one_loss", "message"),
    [
        ("ab", "ac", True, "holds a bank of the data sets a, b, but its loss is now for the data sets a, c; resume with the same"),
        ("ab", "a", True, "holds a bank of the data sets a, b, but its loss is now for data without a name"),
        ("ab", "xa", False, "holds a bank of the data sets b, but its loss is now for the data sets x"),
    ],
)
def test_a_bank_of_other_data_sets_is_refused(tiny_encoder, tmp_path, saved, present, one_loss: bool, message: str) -> None:
    for names in (saved, present):
        model = tiny_encoder()
        loss: Any = ContAccumLoss(model, bank_size=12) if one_loss else {name: ContAccumLoss(model, bank_size=12) for name in names}
        data: Any = DatasetDict({name: dataset(16) for name in names}) if len(names) > 1 else dataset(32)
        options = {"save_strategy": "steps", "save_steps": 2, "resume": None if names == saved else str(tmp_path / "checkpoint-2")}
        with nullcontext() if names == saved else pytest.raises(CheckpointError, match=re.escape(message)):
            trained(model, tmp_path, loss=loss, data=data, **options)


def test_a_training_that_began_with_an_evaluation_is_resumed_without_a_callback(tiny_encoder, tmp_path) -> None:
    options = {"trainer_class": SentenceTransformerTrainer, "eval_dataset": dataset(8), "eval_on_start": True, "save_strategy": "steps"}
    whole = trained(tiny_encoder(dropout=0.0), tmp_path, **options, save_steps=2)
    resumed = trained(tiny_encoder(dropout=0.0), tmp_path, **options, save_steps=2, resume=str(tmp_path / "checkpoint-2"))
    assert_bit_equal(state_of(whole), state_of(resumed))
