"""The table in docs/sentence-transformers.md says what each loss does: every cell is tried out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.nn
from datasets import DatasetDict
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import uses_gradient_cache
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import euclidean_sim
from torch import nn

from contaccum import CachedContAccumLoss, ContAccumLoss
from test_losses import features
from test_trainer import dataset, trained

PAGE = Path(__file__).parents[1] / "docs" / "sentence-transformers.md"
GIST = "GISTEmbedLoss"
KINDS: dict[str, Callable[..., nn.Module]] = {
    "MultipleNegativesRankingLoss": losses.MultipleNegativesRankingLoss,
    "its Cached twin": losses.CachedMultipleNegativesRankingLoss,
    GIST: losses.GISTEmbedLoss,
    "ContAccumLoss": partial(ContAccumLoss, bank_size=8),
    "CachedContAccumLoss": partial(CachedContAccumLoss, bank_size=8),
}
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
Checked = Callable[[str, Callable[..., SentenceTransformer], Path], bool]


def build(kind: str, encoder: Callable[..., SentenceTransformer], **options: Any) -> nn.Module:
    guide = {"guide": encoder(tied=True, seed=3, dropout=0.0)} if kind == GIST else {}
    return KINDS[kind](encoder(tied=True, dropout=0.0).train(), **{**guide, **options})


def trains(loss: nn.Module, model: SentenceTransformer | None = None, negatives: int = 1) -> bool:
    """Two micro-batches, forward and backward."""
    model = model or loss.model
    for seed in range(2):
        loss(features(model, 4, negatives, seed), torch.zeros(4)).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(found) and all(gradient.isfinite().all() for gradient in found)


def takes(negatives: int = 1, **options: Any) -> Checked:
    return lambda kind, encoder, _: trains(build(kind, encoder, **options), negatives=negatives)


def remembers(kind: str, encoder: Callable[..., SentenceTransformer], _: Path) -> bool:
    loss = build(kind, encoder)
    again = [loss(features(loss.model, 4, seed=seed), torch.zeros(4)).item() for seed in (0, 1)][1]
    alone = build(kind, encoder)
    return again != pytest.approx(alone(features(alone.model, 4, seed=1), torch.zeros(4)).item())


def masks_equal_texts(kind: str, encoder: Callable[..., SentenceTransformer], _: Path) -> bool:
    loss = build(kind, encoder)
    columns = features(loss.model, 4)
    same = {k: v[:1].expand(4, -1).clone() if isinstance(v, torch.Tensor) else v for k, v in columns[1].items()}
    return loss([columns[0], same], torch.zeros(4)).item() < 1e-4


def masks_labels(kind: str, encoder: Callable[..., SentenceTransformer], _: Path) -> bool:
    loss = build(kind, encoder, mask_labels=True)
    return loss(features(loss.model, 4), torch.zeros(4, dtype=torch.int64)).item() < 1e-4


def gathers(kind: str, encoder: Callable[..., SentenceTransformer], _: Path) -> bool:
    """Queries and both passages in each of two micro-batches, in a group of one process; GIST leaves its queries where they are. That two
    processes equal one is in `test_distributed.py`."""
    gathered: list[torch.Tensor] = []
    original = torch.distributed.nn.all_gather
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed.nn, "all_gather", lambda column: gathered.append(column) or original(column))
            trained = trains(build(kind, encoder, gather_across_devices=True))
    finally:
        torch.distributed.destroy_process_group()
    return trained and len(gathered) >= 6 - 2 * (kind == GIST)


def takes_a_guide(kind: str, encoder: Callable[..., SentenceTransformer], _: Path) -> bool:
    return trains(build(kind, encoder, guide=encoder(tied=True, seed=3)))


def wrapped(wrapper: Callable[..., nn.Module]) -> Checked:
    def check(kind: str, encoder: Callable[..., SentenceTransformer], folder: Path) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            loss = build(kind, encoder)
            around = wrapper(loss.model, loss)
        trained(loss.model, folder, loss=around, data=dataset(8), router_mapping={})
        return True

    return check


def scale_may_be_assigned(kind: str, encoder: Callable[..., SentenceTransformer], _: Path) -> bool:
    loss = build(kind, encoder)
    assert isinstance(loss.scale, float)
    before = loss(features(loss.model, 4), torch.zeros(4)).item()
    loss.scale = 3.0
    return loss(features(loss.model, 4), torch.zeros(4)).item() != pytest.approx(before)


def serves_two_data_sets(kind: str, encoder: Callable[..., SentenceTransformer], folder: Path) -> bool:
    loss = build(kind, encoder)
    trained(loss.model, folder, loss=loss, data=DatasetDict({"a": dataset(16), "b": dataset(16)}), router_mapping={})
    return True


CHECKS: dict[str, Checked] = {
    "negatives of earlier micro-batches": remembers,
    "GradCache: activations of a mini-batch only": lambda kind, encoder, _: uses_gradient_cache(build(kind, encoder)),
    "one hard negative": takes(1),
    "several hard negatives": takes(3),
    "equal texts are never each other's negatives": masks_equal_texts,
    "positives of one label are never each other's negatives": masks_labels,
    "`directions`": takes(directions=FOUR),
    "`partition_mode`": takes(directions=FOUR[::2], partition_mode="per_direction"),
    "`hardness_mode`, `hardness_strength`": takes(hardness_mode="all_negatives", hardness_strength=2.0),
    "a guide model leaves out false negatives": takes_a_guide,
    "`margin` and `margin_strategy`": takes(margin=0.05, margin_strategy="relative"),
    "`gather_across_devices`": gathers,
    "`mini_batch_num_tokens`": takes(mini_batch_num_tokens=20),
    "a `similarity_fct` of your own": takes(similarity_fct=euclidean_sim),
    "`loss.scale = ...` during training": scale_may_be_assigned,
    "one loss for several data sets": serves_two_data_sets,
    "`MatryoshkaLoss` around it": wrapped(partial(losses.MatryoshkaLoss, matryoshka_dims=[16, 8])),
    "`AdaptiveLayerLoss` around it": wrapped(losses.AdaptiveLayerLoss),
    "`Matryoshka2dLoss` around it": wrapped(partial(losses.Matryoshka2dLoss, matryoshka_dims=[16, 8])),
}

LAYERS = "takes its loss of several layers|is not compatible with"
REFUSALS = {  # where it is not that the loss has no such argument
    "several hard negatives": "Expected 2 or 3 embeddings, got 5",
    "a `similarity_fct` of your own": "unexpected keyword argument 'similarity_fct'|similarity_fct=euclidean_sim has no closed form here",
    "`loss.scale = ...` during training": "no attribute 'scale'",
    "`AdaptiveLayerLoss` around it": LAYERS,
    "`Matryoshka2dLoss` around it": LAYERS,
}


def table() -> dict[str, list[str]]:
    _, _, section = PAGE.read_text().partition("## Feature by feature")
    section, _, _ = section.partition("\n## ")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    assert [name.strip("`") for name in lines[0][1:]] == list(KINDS)
    return {line[0]: line[1:] for line in lines[2:]}


def test_the_table_has_the_features_that_are_checked() -> None:
    assert list(table()) == list(CHECKS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", CHECKS)
def test_a_cell_says_what_is_so(tiny_encoder, tmp_path, kind: str, feature: str) -> None:
    try:
        works = CHECKS[feature](kind, tiny_encoder, tmp_path)
    except Exception as refusal:
        if not re.search(REFUSALS.get(feature, "unexpected keyword argument"), str(refusal)):
            raise
        works = False
    assert table()[feature][list(KINDS).index(kind)] == ("yes" if works else "no")
