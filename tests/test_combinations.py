"""What people put around and into a loss, in sentence-transformers' own trainer: it equals the naive reference run by hand, and resumes."""

from __future__ import annotations

import copy
import random
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, Matryoshka2dLoss, MatryoshkaLoss
from sentence_transformers.sparse_encoder import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.losses import SpladeLoss
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from sentence_transformers.util import dot_score
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM

from conftest import assert_close, needs_adapters, rows, tiny_config
from contaccum import CachedContAccumLoss, ContAccumLoss, dual_encoder
from contaccum.adapters.text_keys import token_keys
from reference import ReferenceInfoNCE
from test_comparison import FOUR, SYMMETRIC
from test_trainer import assert_bit_equal, trained

ROUTES = {"query": "query", "positive": "document", "negative": "document"}
BANK = 10
LR = 0.05


def triplets(count: int = 32) -> Dataset:
    return Dataset.from_list([{"query": r["query"], "positive": r["positive"], "negative": r["negatives"][0]} for r in rows(count, 1)])


class Recorder:
    """The micro-batches that came to a loss, in order, and what it said."""

    def __init__(self, loss: nn.Module) -> None:
        self.batches: list[tuple[list[dict[str, Any]], Any, Any]] = []  # columns, the state of Python's random numbers, labels
        self.values: list[float] = []
        loss.register_forward_pre_hook(self._before)
        loss.register_forward_hook(lambda _, arguments, value: self.values.append(value.item()))

    def _before(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        columns = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in column.items()} for column in arguments[0]]
        self.batches.append((columns, random.getstate(), arguments[1] if len(arguments) > 1 else None))


def by_hand(
    model: SentenceTransformer,
    recorder: Recorder,
    reference: ReferenceInfoNCE,
    guide: SentenceTransformer | None = None,
    matryoshka: MatryoshkaLoss | None = None,
    cached: bool = False,
) -> list[float]:
    """The recorded training once more: two micro-batches an update, plain SGD, the naive loss."""
    values: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for number, (columns, state, labels) in enumerate(recorder.batches):
        keys = [token_keys(column) for column in columns]
        keys = keys if labels is None else [labels, *keys[1:]]
        arguments: dict[str, Any] = {"query_keys": keys[0], "passage_keys": torch.stack(keys[1:], 1)}
        if guide is not None:
            vectors = [guide(dict(column))["sentence_embedding"] for column in columns]
            arguments["guide"] = vectors[0], torch.stack(vectors[1:], 1)
        embedded = [model(dict(column))["sentence_embedding"] for column in columns]
        if matryoshka is None:
            value = reference(*stacked(embedded), **arguments)
        else:
            value = at_widths(reference, embedded, arguments, matryoshka, state, cached)
        (value / 2).backward()
        values.append(float(value))
        if number % 2:
            optimizer.step(), optimizer.zero_grad(), reference.after_update()
    return values


def at_widths(
    reference: ReferenceInfoNCE, embedded: list[Tensor], arguments: dict[str, Any], loss: MatryoshkaLoss, state: Any, cached: bool
) -> Tensor:
    chosen = list(range(len(loss.matryoshka_dims)))
    if loss.n_dims_per_step > 0:
        random.setstate(state)
        chosen = random.sample(chosen, loss.n_dims_per_step)
        chosen = chosen if cached else sorted(chosen)
    whole = stacked([normalize(column.detach(), dim=-1) for column in embedded])
    total = torch.zeros(())
    for i in chosen:
        cut = stacked([normalize(column[:, : loss.matryoshka_dims[i]], dim=-1) for column in embedded])
        value = reference(*cut, **arguments, whole=list(whole), first=i == chosen[0], last=i == chosen[-1])
        total = total + loss.matryoshka_weights[i] * value
    return total


def stacked(columns: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return columns[0], columns[1], torch.stack(columns[2:], 1)


COMBINATIONS: dict[str, dict[str, Any]] = {
    "four directions": {"directions": FOUR},
    "symmetric": SYMMETRIC,
    "in-batch hardness": {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    "hard negatives' hardness, symmetric": {"hardness_mode": "hard_negatives", "hardness_strength": 5.0, **SYMMETRIC},
    "margin": {"margin": -0.05},
    "relative margin, four directions": {"margin": 0.05, "margin_strategy": "relative", "directions": FOUR},
    "guide": {"guided": True, "margin": 0.02},
    "matryoshka": {"matryoshka": {"matryoshka_dims": [16, 8, 4], "matryoshka_weights": [1.0, 0.5, 0.25]}},
    "matryoshka, one width a step, never the whole": {"matryoshka": {"matryoshka_dims": [12, 8, 4], "n_dims_per_step": 1}},
    "matryoshka as in the paper": {"matryoshka": {"matryoshka_dims": [16, 4]}, "drift_correction": None},
    "matryoshka with a guide, four directions": {"matryoshka": {"matryoshka_dims": [16, 4]}, "directions": FOUR, "guided": True},
    "positives alone in the bank": {"cache_hard_negatives": False},
    "fewer queries than passages": {"query_bank_size": 6},
    "no queries in the bank, as in the paper": {"query_bank_size": 0, "drift_correction": None},
    "a bank later, queries until later": {"start_update": 1, "query_bank_stop_update": 3},
    "cleared after every update": {"clear_after_update": True},
    "the paper's gradients": {"gradient_scale": "paper", "drift_correction": None},
    "a bank in bfloat16": {"bank_dtype": torch.bfloat16, "drift_correction": None},
    "nothing masked": {"mask_duplicates": False},
    "labels masked": {"mask_labels": True},
    "GradCache by tokens": {"mini_batch_num_tokens": 12},
    "adapters": {"lora": True, "arguments": {"router_mapping": {}}},
    "prompts": {"arguments": {"prompts": {"query": "w1 w2 ", "positive": "w3 ", "negative": "w3 "}}},
    "no batch with a text twice": {"arguments": {"batch_sampler": "no_duplicates"}},
    "workers that tokenise ahead": {"arguments": {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 2}},
}


ALSO_CACHED = (
    "adapters",
    "prompts",
    "four directions",
    "guide",
    "matryoshka",
    "matryoshka, one width a step, never the whole",
    "labels masked",
)
ONLY_CACHED = ("GradCache by tokens",)
CASES = [*((name, False) for name in COMBINATIONS if name not in ONLY_CACHED), *((name, True) for name in (*ALSO_CACHED, *ONLY_CACHED))]


@pytest.mark.parametrize(("name", "cached"), CASES)
@pytest.mark.filterwarnings("ignore:The model's embedding dimension")
def test_a_training_equals_the_reference_by_hand_and_resumes(
    tiny_encoder, tokenizer_folder, tmp_path: Path, name: str, cached: bool
) -> None:
    options = dict(COMBINATIONS[name])
    guided, widths = options.pop("guided", False), options.pop("matryoshka", None)
    lora = options.pop("lora", False)
    if lora:
        needs_adapters()
    build = partial(with_adapters, tmp_path / "base", tokenizer_folder) if lora else partial(tiny_encoder, dropout=0.0)
    further = options.pop("arguments", {})
    guide = tiny_encoder(seed=7, tied=True, dropout=0.0) if guided else None

    def train(resume: str | None = None) -> tuple[SentenceTransformer, Recorder, Any]:
        model = build()
        kind = partial(CachedContAccumLoss, mini_batch_size=3) if cached else ContAccumLoss
        loss: Any = kind(model, 5.0, bank_size=BANK, guide=guide, **options)
        loss = loss if widths is None else MatryoshkaLoss(model, loss, **widths)
        recorder = Recorder(loss)
        arguments = {"optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "router_mapping": ROUTES}
        saved = {"save_strategy": "steps", "save_steps": 2, "resume": resume, "num_train_epochs": 2}
        data = triplets()
        data = data.add_column("label", [i % 5 for i in range(len(data))]) if options.get("mask_labels") else data
        trained(model, tmp_path, SentenceTransformerTrainer, loss, data, **{**arguments, **saved, **further})
        return model, recorder, loss

    model, recorder, loss = train()
    again = build()
    criterion = (loss if widths is None else loss.loss).criterion
    reference = ReferenceInfoNCE(
        BANK, 5.0, "cosine", drift_correction=criterion.drift_correction, **{"margin": 0.0 if guided else None, **without(options)}
    )
    values = by_hand(again.train(), recorder, reference, guide, loss if widths else None, cached)
    assert len(criterion.bank) == (0 if options.get("clear_after_update") else BANK)
    assert len(values) == len(recorder.values) == 16
    assert recorder.values == pytest.approx(values, rel=1e-4)
    assert_close(model.state_dict(), again.state_dict())
    resumed, _, _ = train(resume=str(tmp_path / "checkpoint-2"))
    assert_bit_equal(resumed.state_dict(), model.state_dict())


def with_adapters(base: Path, tokenizer_folder: str) -> SentenceTransformer:
    """One tower; its base lies in a folder, where a checkpoint looks for it."""
    from peft import LoraConfig, TaskType

    if not base.exists():
        torch.manual_seed(0)
        AutoModel.from_config(tiny_config(dropout=0.0)).save_pretrained(base)
        AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(base)
    model = dual_encoder(base, tied=True, pooling="mean", max_seq_length=32, device="cpu")
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=2, target_modules=["query", "value"], init_lora_weights=False))
    return model


def without(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the reference."""
    return {name: value for name, value in options.items() if name not in ("drift_correction", "mask_labels", "mini_batch_num_tokens")}


def test_a_token_budget_changes_how_often_models_run_and_nothing_else(tiny_encoder, tmp_path) -> None:
    states, calls = [], []
    for budget in (None, 12):
        model = tiny_encoder(dropout=0.0)
        counted: list[int] = []
        model.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        loss = CachedContAccumLoss(model, 5.0, mini_batch_size=4, mini_batch_num_tokens=budget, bank_size=BANK)
        trained(model, tmp_path / str(budget), loss=loss, data=triplets(), router_mapping=ROUTES, optim="sgd")
        states.append(model.state_dict()), calls.append(len(counted))
    assert calls[1] > calls[0]
    assert_close(*states)


def test_a_scale_assigned_in_the_middle_counts_from_there(tiny_encoder, tmp_path) -> None:
    """`loss.scale = ...`, as by a callback of one's own."""
    from transformers import TrainerCallback

    class Warmer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                loss.scale = reference_scale

    reference_scale = 11.0
    model = tiny_encoder(dropout=0.0)
    loss = ContAccumLoss(model, 5.0, bank_size=BANK, drift_correction=None)
    recorder = Recorder(loss)
    sgd = {"optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "router_mapping": ROUTES}
    trained(model, tmp_path, loss=loss, data=triplets(), callbacks=[Warmer()], **sgd)

    class Changed(ReferenceInfoNCE):
        def after_update(self, lr_fraction: float = 1.0) -> None:
            super().after_update(lr_fraction)
            self.scale = reference_scale if self.updates >= 2 else self.scale

    again = tiny_encoder(dropout=0.0).train()
    values = by_hand(again, recorder, Changed(BANK, 5.0, "cosine"))
    assert loss.scale == loss.get_config_dict()["scale"] == reference_scale
    assert loss.temperature == 1 / reference_scale
    assert recorder.values == pytest.approx(values, rel=1e-4)
    assert_close(model.state_dict(), again.state_dict())


@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
@pytest.mark.parametrize("wrapper", [AdaptiveLayerLoss, partial(Matryoshka2dLoss, matryoshka_dims=[16, 8])])
@pytest.mark.parametrize("trainer", [SentenceTransformerTrainer, None])
@pytest.mark.filterwarnings("ignore:AdaptiveLayerLoss is not compatible", "ignore:Matryoshka2dLoss is not compatible")
def test_layers_are_refused_before_anything_is_trained(tiny_encoder, tmp_path, kind: Any, wrapper: Any, trainer: Any) -> None:
    model = tiny_encoder(tied=True)
    before = copy.deepcopy(model.state_dict())
    loss = wrapper(model, kind(model, bank_size=8))
    options = {"router_mapping": {}} | ({"trainer_class": trainer} if trainer else {})
    with pytest.raises(ValueError, match="takes its loss of several layers, and the bank would hold vectors of all"):
        trained(model, tmp_path, loss=loss, data=triplets(), **options)
    assert_bit_equal(model.state_dict(), before)


def test_slices_inside_matryoshka_are_refused_before_anything_is_trained(tiny_encoder, tmp_path) -> None:
    model = tiny_encoder()
    loss = MatryoshkaLoss(model, ContAccumLoss(model, micro_batch_size=2), [16, 8])
    with pytest.raises(ValueError, match=re.escape("micro_batch_size=2 does not work inside MatryoshkaLoss")):
        trained(model, tmp_path, loss=loss, data=triplets(), router_mapping=ROUTES)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("wrapper", ["matryoshka", "matryoshka2d"])
@pytest.mark.filterwarnings("ignore:Matryoshka2dLoss is not compatible")
def test_without_a_bank_they_equal_those_around_sentence_transformers_losses(tiny_encoder, cached: bool, wrapper: str) -> None:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss

    from test_losses import features, gradients

    if cached and wrapper == "matryoshka2d":
        pytest.skip("sentence-transformers has no GradCache over layers")
    found = []
    for ours in (True, False):
        model = tiny_encoder(tied=True, dropout=0.0).train()
        if cached:
            theirs = partial(CachedMultipleNegativesRankingLoss, mini_batch_size=2)
            inner = partial(CachedContAccumLoss, mini_batch_size=2, bank_size=0) if ours else theirs
        else:
            inner = partial(ContAccumLoss, bank_size=0) if ours else MultipleNegativesRankingLoss
        around = MatryoshkaLoss if wrapper == "matryoshka" else partial(Matryoshka2dLoss, n_dims_per_step=-1, n_layers_per_step=-1)
        value = around(model, inner(model), matryoshka_dims=[16, 8])(features(model, 5, 1), torch.zeros(5))
        value.backward()
        found.append((value.detach(), gradients(model)))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
    assert_close(found[0][1], found[1][1])


def test_a_loss_that_gets_embeddings_alone_is_in_step_with_its_trainer(tokenizer_folder, tmp_path) -> None:
    """`SpladeLoss` embeds the texts itself: size of the bank, updates, checkpoints, a resumed run; and that equal texts are not known."""
    BertForMaskedLM(tiny_config()).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(tmp_path / "bert")
    states = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = SparseEncoder(modules=[MLMTransformer(str(tmp_path / "bert")), SpladePooling()], device="cpu")
        inner = ContAccumLoss(model, similarity_fct=dot_score)
        loss = SpladeLoss(model, inner, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3)
        arguments = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "save_strategy": "steps",
            "seed": 1,
        }
        quiet = {"save_steps": 2, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
        args = SparseEncoderTrainingArguments(**arguments, **quiet)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            SparseEncoderTrainer(model=model, args=args, train_dataset=triplets(), loss=loss).train(resume_from_checkpoint=resume)
        assert sum("gets no token ids here" in str(w.message) for w in caught) == 1
        states.append({k: v for k, v in inner.criterion.state_dict().items() if isinstance(v, Tensor)})
        assert inner.criterion.updates == len(triplets()) // 4
        assert inner.criterion.bank.size < 1024
    assert_bit_equal(*states)


@pytest.mark.parametrize("option", ["guide", "mask_labels"])
def test_options_that_need_texts_where_there_are_embeddings_alone(tiny_encoder, option: str) -> None:
    model = tiny_encoder(tied=True)
    loss = ContAccumLoss(model, bank_size=0, **{option: tiny_encoder(tied=True, seed=1) if option == "guide" else True})
    vectors = list(torch.randn(2, 3, 8))
    if option == "guide":
        with pytest.raises(ValueError, match="a guide needs texts, and the loss around this one gives it embeddings alone"):
            loss.compute_loss_from_embeddings(vectors)
    else:
        assert loss.compute_loss_from_embeddings(vectors, torch.tensor([5, 5, 5])) == 0  # no negatives are left
