"""Training on pairs drawn from plain text: what is masked, dropout as the only difference, and runs that are killed and resumed."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import cos_sim
from torch import Tensor

from conftest import WORDS, assert_close, texts
from contaccum import CachedContAccumLoss, ContAccumLoss
from contaccum.adapters.text_keys import token_keys
from contaccum.data.prepare import prepare
from contaccum.methods.config import TrainConfig
from contaccum.training import run as running
from contaccum.training.logfile import read_log
from contaccum.training.run import train
from reference import ReferenceInfoNCE


def columns(model: Any, queries: list[str], positives: list[str]) -> list[dict[str, Any]]:
    return [{**model.preprocess(side, task=task), "task": task} for task, side in (("query", queries), ("document", positives))]


def plain_loss(queries: Tensor, passages: Tensor, documents: list[int], rows: range) -> Tensor:
    """Of some rows: each against its own positive and the passages of all other documents. The definition, word by word."""
    losses = []
    for i in rows:
        scores = [20 * cos_sim(queries[i], passages[j])[0, 0] for j in range(len(passages)) if j == i or documents[j] != documents[i]]
        losses.append(torch.stack(scores).logsumexp(0) - 20 * cos_sim(queries[i], passages[i])[0, 0])
    return torch.stack(losses).mean()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cached", [False, True])
def test_crops_of_a_document_are_no_negatives_in_the_micro_batch_and_in_the_bank(tiny_encoder, cached) -> None:
    """Weights stay as they are, so that the bank holds what is encoded now, and the whole can be written down plainly."""
    model = tiny_encoder(dropout=0.0)
    by_hand = copy.deepcopy(model)
    kind, small = (CachedContAccumLoss, {"mini_batch_size": 2}) if cached else (ContAccumLoss, {})
    loss = kind(model, bank_size=4, mask_labels=True, drift_correction=None, **small)
    model.train()
    documents = [7, 8, 7, 9, 8, 7, -1, -1]  # the second micro-batch begins at the fifth
    queries, positives = texts(8, seed=1), texts(8, seed=2)
    for start in (0, 4):
        part = slice(start, start + 4)
        value = loss(columns(model, queries[part], positives[part]), torch.tensor(documents[part]))
        if start == 0:
            assert torch.allclose(value, plain_loss(*embedded(by_hand, queries[:4], positives[:4]), documents[:4], range(4)), rtol=1e-5)
    value.backward()
    vectors = embedded(by_hand, queries, positives)
    fixed = [torch.cat([column[:4].detach(), column[4:]]) for column in vectors]  # the bank's get no gradient
    expected = plain_loss(*fixed, documents, range(8))
    (2 * expected).backward()  # in-batch scale: over 4 rows, not 8
    assert torch.allclose(value, expected, rtol=1e-5)
    assert_close(gradients(model), gradients(by_hand))


def embedded(model: Any, queries: list[str], positives: list[str]) -> list[Tensor]:
    return [model(column)["sentence_embedding"] for column in columns(model, queries, positives)]


@pytest.mark.parametrize("cached", [False, True])
def test_labels_with_a_corrected_bank_equal_the_reference_by_hand(tiny_encoder, cached) -> None:
    """Three micro-batches, weights moving in between; equal passages of different documents are masked too."""
    model = tiny_encoder(dropout=0.0)
    by_hand = copy.deepcopy(model)
    kind, small = (CachedContAccumLoss, {"mini_batch_size": 2}) if cached else (ContAccumLoss, {})
    loss = kind(model, bank_size=10, mask_labels=True, **small)
    reference = ReferenceInfoNCE(bank_size=10, scale=20.0, similarity="cosine", drift_correction="mean+zero-sum")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, by_hand)]
    model.train(), by_hand.train()
    for step in range(3):
        queries, positives = texts(4, seed=10 + step), ["w1 w2", *texts(3, seed=20 + step)]
        labels = torch.tensor([0, 1, step, 1])
        value = loss(columns(model, queries, positives), labels)
        sides = columns(by_hand, queries, positives)
        keys = token_keys(sides[1])
        assert keys is not None
        vectors = [by_hand(side)["sentence_embedding"] for side in sides]
        expected = reference(*vectors, None, labels, keys[:, None])
        value.backward(), expected.backward()
        assert torch.allclose(value, expected, rtol=1e-4)
        assert_close(gradients(model), gradients(by_hand))
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        loss.criterion.after_update(), reference.after_update()


def test_an_earlier_crop_in_the_bank_is_masked(tiny_encoder) -> None:
    """A bank of nothing but crops of the document leaves its query alone."""
    model = tiny_encoder(dropout=0.0).train()
    masked, plain = (ContAccumLoss(model, bank_size=3, mask_labels=labels, drift_correction=None) for labels in (True, False))
    for loss in (masked, plain):
        for seed in range(3):
            loss(columns(model, texts(1, seed), texts(1, seed + 10)), torch.tensor([5]))
    last = columns(model, texts(1, 7), texts(1, 8))
    assert masked(last, torch.tensor([5])) == 0.0
    assert plain(last, torch.tensor([5])) > 0.0


@pytest.mark.parametrize("labels", [None, torch.tensor([0.5, 1.0]), torch.zeros(2, 2, dtype=torch.int64)])
def test_labels_that_are_no_keys_are_refused(tiny_encoder, labels) -> None:
    model = tiny_encoder()
    with pytest.raises(ValueError, match="needs a column `label` with a whole number for each row"):
        ContAccumLoss(model, mask_labels=True)(columns(model, ["w1", "w2"], ["w3", "w4"]), labels)


def test_labels_are_not_looked_at_unless_asked(tiny_encoder) -> None:
    model = tiny_encoder(dropout=0.0)
    batch = columns(model, texts(4, 0), texts(4, 1))
    assert ContAccumLoss(model)(batch, torch.zeros(4, dtype=torch.int64)) == ContAccumLoss(model)(batch)


def test_dropout_makes_two_views_of_a_text_and_its_duplicates_are_masked(tiny_encoder) -> None:
    model = tiny_encoder(dropout=0.3, tied=True).train()
    seen = []
    loss = ContAccumLoss(model, bank_size=4)
    loss.criterion.observers.append(lambda step: seen.append((step.rows.queries.clone(), step.columns.passages[:, 0].clone())))
    assert loss(columns(model, ["w1 w2"] * 3, ["w1 w2"] * 3)).abs() < 1e-5  # each has its own positive and no negative
    queries, positives = seen[0]
    assert (cos_sim(queries, positives).diag() < 0.9999).all(), "both sides had one dropout mask"
    assert loss(columns(model, ["w1 w2"], ["w1 w2"])).abs() < 1e-5  # nor in the bank
    loss = ContAccumLoss(model, bank_size=4)
    assert loss(columns(model, ["w1 w2", "w3"], ["w1 w2", "w3"])) > 0.1


def corpus(folder: Path, kind: str, documents: int = 40) -> str:
    chance = random.Random(0)
    lines = [" ".join(" ".join(chance.choices(WORDS, k=5)) + "." for _ in range(4)) for _ in range(documents)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    prepare(folder / "corpus.txt", folder / kind, unsupervised=kind)
    return str(folder / kind)


def config(data: str, model: str, output: Path, **changes: Any) -> TrainConfig:
    options = {"pooling": "mean", "similarity": "cosine", "lr": 3e-3, "epochs": 2, "n_total": 8, "n_local": 4, "bank": 12, "tied": True}
    return TrainConfig(data, str(output), model, **options | {"max_seq_length": 32, "save_every": 0, "diagnose_every": 0} | changes)


@pytest.mark.parametrize(("kind", "tied"), [("crops", True), ("crops", False), ("neighbours", True), ("dropout", True)])
def test_training_draws_pairs_for_every_epoch_and_masks_documents(kind, tied, model_folder, tmp_path, monkeypatch) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    build = running.build_loss

    def watched(*args: Any, **options: Any) -> ContAccumLoss:
        loss = build(*args, **options)
        loss.criterion.observers.append(lambda step: seen.append((step.rows.query_keys.clone(), step.columns.passage_keys[:, 0].clone())))
        return loss

    monkeypatch.setattr(running, "build_loss", watched)
    summary = train(config(corpus(tmp_path, kind), model_folder, tmp_path / "run", tied=tied))
    assert summary["updates"] == 10
    documents, passages = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert documents[:40].sort().values.equal(documents[40:].sort().values), "every document once an epoch"
    assert len(documents.unique()) == 40
    same = len(set(passages[:40].tolist()) & set(passages[40:].tolist()))
    assert same == 40 if kind == "dropout" else same < 20
    lines = read_log(tmp_path / "run" / "log.jsonl")
    assert sum(line["loss"] for line in lines[6:]) < sum(line["loss"] for line in lines[2:6]) + 1


def test_a_killed_run_draws_what_it_would_have_drawn(model_folder, tmp_path) -> None:
    """As if it had been killed after its first checkpoint, in the second epoch."""
    arguments = config(
        corpus(tmp_path, "crops"), model_folder, tmp_path / "run", epochs=3, save_every=7, keep_checkpoints=3, checkpoints_at_end=True
    )
    train(arguments)
    whole = (tmp_path / "run" / "log.jsonl").read_text()
    shutil.rmtree(tmp_path / "run" / "model")
    for update in (14, 15):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"checkpoint-{update}")
    (tmp_path / "run" / "summary.json").unlink()
    assert train(arguments, resume=True)["resumed_at_update"] == 7
    assert (tmp_path / "run" / "log.jsonl").read_text() == whole


@pytest.mark.parametrize("tied", [True, False])
def test_fine_tuning_starts_from_the_model_folder(tied, jsonl, model_folder, tmp_path) -> None:
    train(config(corpus(tmp_path, "crops"), model_folder, tmp_path / "pre", tied=tied))
    before = config(jsonl(40), str(tmp_path / "pre" / "model"), tmp_path / "run", tied=tied, lr=1e-12, warmup_updates=0)
    train(before)
    first, second = (SentenceTransformer(str(tmp_path / name / "model"), device="cpu") for name in ("pre", "run"))
    for encode in ("encode_query", "encode_document"):
        assert torch.allclose(*(torch.from_numpy(getattr(model, encode)(["w1 w2 w3"])) for model in (first, second)), atol=1e-4)
    assert torch.allclose(*(torch.from_numpy(getattr(second, e)(["w1 w2"])) for e in ("encode_query", "encode_document"))) == tied


def test_hard_negatives_of_drawn_pairs_are_refused(model_folder, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"hard_negatives=1: pairs drawn from .* have none"):
        train(config(corpus(tmp_path, "crops"), model_folder, tmp_path / "run", hard_negatives=1))
