"""Diagnostics against independent computations; that they change nothing; dev queries and the best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import DatasetDict
from sentence_transformers import SentenceTransformer
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from conftest import rows, write_beir
from contaccum import ContAccumLoss, ContAccumTrainer, DualBankInfoNCE
from contaccum.methods.config import TrainConfig
from contaccum.training.dev import dev_evaluator
from contaccum.training.diagnostics import Diagnostics, Scores, bank_shift, sim_mass, troubles
from contaccum.training.logfile import read_log
from contaccum.training.run import train
from test_train import options
from test_trainer import arguments, dataset, trained


class ByHand(TrainerCallback):
    """Norm of each tower's gradient from its parameters' names, right before the optimizer's step."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        squares = {"query": 0.0, "document": 0.0}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                (tower,) = [tower for tower in squares if f"sub_modules.{tower}." in name]
                squares[tower] += float((parameter.grad.double() ** 2).sum())
        self.norms.append({tower: square**0.5 for tower, square in squares.items()})


def test_gradient_norms_are_those_that_the_optimizer_sees(tiny_encoder, tmp_path) -> None:
    by_hand = ByHand()
    model = tiny_encoder()
    loss = ContAccumLoss(model, bank_size=8)
    diagnostics = Diagnostics(tmp_path / "diagnostics.jsonl", loss, every=2)
    trained(model, tmp_path / "run", loss=loss, callbacks=[diagnostics, by_hand], max_grad_norm=0.1)
    lines = read_log(tmp_path / "diagnostics.jsonl")
    assert [line["update"] for line in lines] == list(range(1, len(by_hand.norms) + 1))
    for line, norms in zip(lines, by_hand.norms, strict=True):
        assert line["query_grad_norm"] == pytest.approx(norms["query"], rel=1e-4)
        assert line["passage_grad_norm"] == pytest.approx(norms["document"], rel=1e-4)
        assert line["grad_norm_ratio"] == pytest.approx(norms["document"] / norms["query"], rel=1e-4)
        assert (norms["query"] ** 2 + norms["document"] ** 2) ** 0.5 == pytest.approx(0.1, rel=1e-3)  # clipped, and it mattered


def test_a_tied_tower_has_one_norm_and_no_ratio(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder(tied=True)
    loss = ContAccumLoss(model, bank_size=8)
    trained(model, tmp_path / "run", loss=loss, callbacks=[Diagnostics(tmp_path / "d.jsonl", loss)], router_mapping={})
    lines = read_log(tmp_path / "d.jsonl")
    assert lines
    assert all(line["grad_norm_ratio"] is None and line["both_grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("negatives", [0, 2])
def test_similarity_mass_equals_the_softmax_by_hand(similarity: str, negatives: int) -> None:
    torch.manual_seed(0)
    criterion = DualBankInfoNCE(bank_size=12, scale=0.7, similarity=similarity, mask_duplicates=False, drift_correction=None)
    seen: list[Scores] = []
    criterion.observers.append(lambda step: seen.append(Scores.of(step)))
    for micro_step in range(9):  # updates of two micro-steps of 3, the bank full from the fifth on
        queries, positives = torch.randn(3, 6, requires_grad=True), torch.randn(3, 6)
        others = torch.randn(3, negatives, 6) if negatives else None
        held, ages = criterion.bank.passages, criterion.bank.ages
        criterion(queries, positives, others)
        current = torch.cat([positives[:, None], others], 1) if negatives else positives[:, None]
        unit = (lambda x: normalize(x, dim=-1)) if similarity == "cosine" else (lambda x: x)
        columns = torch.cat([unit(current).flatten(0, 1), held.reshape(-1, 6)]).double()
        weights = (0.7 * unit(queries.detach()).double() @ columns.T).softmax(1)
        c = 1 + negatives
        column_ages = torch.cat([torch.zeros(3 * c), ages.repeat_interleave(c)])
        positive_columns = torch.arange(3) * c
        result = sim_mass(seen[-1])
        assert result["positive"] == pytest.approx(float(weights[torch.arange(3), positive_columns].mean()), rel=1e-5)
        weights[torch.arange(3), positive_columns] = 0
        for entry in result["by_age"]:
            of_age = column_ages == entry["age"]
            assert entry["mass"] == pytest.approx(float(weights[:, of_age].sum() / 3), rel=1e-4)
            assert entry["passages"] == int(of_age.sum()) - (entry["age"] == 0)
        assert result["positive"] + sum(entry["mass"] for entry in result["by_age"]) == pytest.approx(1)
        assert [entry["age_updates"] for entry in result["by_age"]] == list(range(len(result["by_age"])))
        if micro_step % 2:
            criterion.after_update(0.5)
    assert len(result["by_age"]) == 3


def test_a_run_tells_time_memory_mass_and_drift(jsonl, model_folder, tmp_path) -> None:
    config = TrainConfig(**options(jsonl(64, negatives=1), model_folder, tmp_path / "run", diagnose_every=5, drift_every=5, save_every=0))
    summary = train(config)
    lines = read_log(tmp_path / "run" / "diagnostics.jsonl")
    assert [line["update"] for line in lines] == list(range(1, summary["updates"] + 1))
    timed = [line for line in lines if "seconds" in line]
    assert [line["update"] for line in timed] == [5, 10, 15]
    for line in timed:
        assert all(line["seconds"][phase] > 0 for phase in ("forward", "loss", "backward", "update"))
        assert line["samples_per_second"] > 0
        assert line["memory"]["bank_predicted_bytes"] == 20 * (2 + 1) * 16 * 4  # tuples, texts a tuple, width, bytes
        assert line["memory"]["bank_bytes"] >= line["memory"]["bank_predicted_bytes"]
    assert [entry["age_updates"] for entry in timed[-1]["drift"]] == [0, 1, 2]
    assert timed[-1]["drift"][-1]["passage_cosine"] < 1


def test_the_banks_shift_is_a_distance_of_means_over_the_spread() -> None:
    torch.manual_seed(0)
    plain, corrected = DualBankInfoNCE(bank_size=64, drift_correction=None), DualBankInfoNCE(bank_size=64)
    for step in range(16):
        for criterion in (plain, corrected):
            assert (bank_shift(criterion.bank) is None) == (step * 8 < 64)
            moving = torch.full((8, 5), float(step))  # the mean moves by sqrt(5) a micro-step
            criterion(torch.randn(8, 5, requires_grad=True) + moving, torch.randn(8, 5) + moving)
            criterion.after_update()
    held = plain.bank.passages[:, 0]
    spread = ((held - held.mean(0)) ** 2).sum(1).mean() ** 0.5
    by_hand = (held[-16:].mean(0) - held[:16].mean(0)).norm() / spread
    assert bank_shift(plain.bank)["passage"] == pytest.approx(float(by_hand), rel=1e-5)
    assert bank_shift(plain.bank)["passage"] > 1.5
    assert bank_shift(corrected.bank)["passage"] < 0.8


def test_troubles_are_named_with_their_remedy() -> None:
    calm = {"bank_shift": {"query": 0.1, "passage": 0.2}, "grad_norm_ratio": 1.3}
    assert list(troubles([calm] * 3)) == []
    assert list(troubles([{"grad_norm_ratio": None, "bank_shift": None}])) == []
    ((kind, text),) = troubles([calm, calm | {"bank_shift": {"query": 0.5, "passage": 2.04}}])
    assert (kind, "shifted by 2.0 of their spread" in text) == ("shift", True)
    assert 'use drift_correction="mean+zero-sum", a smaller bank' in text
    ((kind, text),) = troubles([calm, calm | {"grad_norm_ratio": 12.0}, calm | {"grad_norm_ratio": 31.0}])
    assert (kind, "12 times" in text, "query_bank_size=None" in text) == ("ratio", True, True)
    assert 'use drift_correction="mean+zero-sum", as many queries as passages' in text
    ((kind, text),) = troubles([calm | {"grad_norm_ratio": 0.05}])
    assert (kind, "0.05 times" in text) == ("ratio", True)


def test_what_is_done_already_is_no_remedy() -> None:
    line = {"bank_shift": {"query": 3.0, "passage": 2.0}, "grad_norm_ratio": 40.0}
    result = dict(troubles([line], "mean+zero-sum"))
    assert result["shift"].endswith("use a smaller bank or a lower learning rate")
    assert "drift_correction" not in result["ratio"]
    assert all('"mean+zero-sum"' in text for text in dict(troubles([line], "mean")).values())


def test_a_bank_that_drifts_is_warned_of_once(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder(dropout=0.0)
    loss = ContAccumLoss(model, bank_size=32, scale=100.0, drift_correction=None)
    diagnostics = Diagnostics(tmp_path / "d.jsonl", loss, every=1)
    with pytest.warns(UserWarning, match="have shifted by") as result:
        trained(model, tmp_path / "run", loss=loss, callbacks=[diagnostics], learning_rate=0.1, num_train_epochs=4)
    assert len([w for w in result if "have shifted by" in str(w.message)]) == 1


def test_without_learning_nothing_drifts(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder(dropout=0.0)
    loss = ContAccumLoss(model, bank_size=16, drift_correction=None)  # a mean of other samples is another mean
    diagnostics = Diagnostics(tmp_path / "d.jsonl", loss, drift_every=2)
    options = arguments(tmp_path / "run", learning_rate=0.0)
    ContAccumTrainer(model=model, args=options, train_dataset=dataset(), loss=loss, callbacks=[diagnostics]).train()
    drifts = [line["drift"] for line in read_log(tmp_path / "d.jsonl") if "drift" in line]
    assert drifts
    assert all(e[f"{what}_cosine"] == pytest.approx(1, abs=1e-5) for entries in drifts for e in entries for what in ("query", "passage"))


def test_there_are_none_unless_they_are_asked_for_and_drift_is_enough(jsonl, model_folder, tmp_path) -> None:
    for name, asked in (("plain", {}), ("drift", {"drift_every": 2})):
        train(TrainConfig(**options(jsonl(48), model_folder, tmp_path / name, save_every=0, **asked)))
    assert not (tmp_path / "plain" / "diagnostics.jsonl").exists()
    lines = read_log(tmp_path / "drift" / "diagnostics.jsonl")
    assert [line["update"] for line in lines if "drift" in line] == list(range(2, len(lines) + 1, 2))
    assert not any("seconds" in line for line in lines)


class Reads(TorchDispatchMode):
    """Counts values that are read one by one, which waits for a device."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(operator) == "aten._local_scalar_dense.default"
        return operator(*args, **(kwargs or {}))


def test_nothing_is_read_from_the_device_before_it_is_written(tiny_encoder, tmp_path) -> None:
    found = []
    for watched in (False, True):
        model = tiny_encoder(dropout=0.0)
        loss = ContAccumLoss(model, bank_size=8)
        callbacks = [Diagnostics(tmp_path / "d.jsonl", loss, every=10_000, mass_every=0, writes=False)] if watched else []
        with Reads() as reads:
            trained(model, tmp_path / f"run-{watched}", loss=loss, callbacks=callbacks)
        found.append(reads.count)
    assert 0 < found[0] == found[1]


def test_watching_changes_no_bit(jsonl, model_folder, tmp_path) -> None:
    data = jsonl(48)
    for name, watched in (("plain", {"diagnose_every": 0}), ("watched", {"diagnose_every": 1, "drift_every": 1})):
        train(TrainConfig(**options(data, model_folder, tmp_path / name, save_every=0, **watched)))
    assert (tmp_path / "plain" / "log.jsonl").read_text() == (tmp_path / "watched" / "log.jsonl").read_text()
    assert not (tmp_path / "plain" / "diagnostics.jsonl").exists()
    a, b = (SentenceTransformer(str(tmp_path / name / "model")).state_dict() for name in ("plain", "watched"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """40 learnable pairs, 20 of them dev queries."""
    pairs = rows(40, seed=5)
    queries, passages = ([pair[name] for pair in pairs] for name in ("query", "positive"))
    return write_beir(tmp_path / "beir", queries, passages, train=range(20), dev=range(20, 40))


def test_the_best_model_by_dev_metric_is_kept(beir, model_folder, tmp_path) -> None:
    changes = {"n_total": 4, "n_local": 2, "dev": str(beir), "dev_every": 3, "dev_metric": "NDCG@10", "epochs": 3, "keep_checkpoints": 1}
    summary = train(TrainConfig(**options(str(beir), model_folder, tmp_path / "run", **changes)))
    lines = read_log(tmp_path / "run" / "dev.jsonl")
    assert [line["update"] for line in lines] == [3, 6, 9, 12, 15]
    best = max(lines, key=lambda line: line["NDCG@10"])
    assert (summary["dev_best"], summary["dev_best_update"]) == (best["NDCG@10"], best["update"])
    found = dev_evaluator(beir, "dev", None, 0)(SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu"))
    assert found["dev_cosine_ndcg@10"] == pytest.approx(best["NDCG@10"], abs=1e-6)


def test_dev_rows_of_a_training_file_rank_their_own_passages(jsonl) -> None:
    judge = dev_evaluator(jsonl(10, negatives=2, seed=3), "dev", None, 0)
    assert len(judge.queries) == 10
    assert len(judge.corpus) == len({t for row in rows(10, 2, 3) for t in [row["positive"], *row["negatives"]]})
    fewer = dev_evaluator(jsonl(10, negatives=2, seed=3), "dev", 5, 0)
    assert len(fewer.corpus) == len({row["positive"] for row in rows(10, 2, 3)}) + 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dev_metric": "MRR@7"}, "dev_metric='MRR@7' is unknown"),
        ({"dev_every": 1000}, "dev_every=1000 is more than"),
        ({"dev": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_dev_mistakes_are_named(beir, model_folder, tmp_path, changes, message) -> None:
    base = {"dev": str(beir), "dev_every": 2}
    with pytest.raises(ValueError, match=message):
        train(TrainConfig(**options(str(beir), model_folder, tmp_path / "run", **{**base, **changes})))
    assert not (tmp_path / "run").exists()


def test_drift_is_measured_in_the_bank_of_each_data_set(tiny_encoder, tmp_path) -> None:
    """Without training or dropout the vectors in a bank are those of now, whichever data set they are of."""
    model = tiny_encoder(dropout=0.0)
    loss = ContAccumLoss(model, bank_size=12, drift_correction=None)
    diagnostics = Diagnostics(tmp_path / "d.jsonl", loss, drift_every=1)
    data = DatasetDict({"a": dataset(40), "b": dataset(24)})
    trainer = ContAccumTrainer(
        model=model, args=arguments(tmp_path, learning_rate=1e-12), train_dataset=data, loss=loss, callbacks=[diagnostics]
    )
    trainer.train()
    cosines = [entry["passage_cosine"] for line in read_log(tmp_path / "d.jsonl") for entry in line["drift"]]
    assert len(cosines) > 10
    assert min(cosines) > 1 - 1e-5


def test_negatives_that_are_left_out_are_counted(tiny_encoder, tmp_path) -> None:
    counted = {}
    for margin in (-10.0, 0.0):
        model = tiny_encoder()
        loss = ContAccumLoss(model, bank_size=8, margin=margin)
        trained(model, tmp_path / "run", loss=loss, callbacks=[Diagnostics(tmp_path / "d.jsonl", loss, every=2)])
        counted[margin] = [line["left_out_per_query"] for line in read_log(tmp_path / "d.jsonl") if "left_out_per_query" in line]
    assert set(counted[-10.0]) == {0.0}
    assert max(counted[0.0]) > 1
