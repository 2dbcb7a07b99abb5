"""Images and sounds beside a text: inputs with equal placeholder ids are told apart by their other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor, nn

from contaccum import CachedContAccumLoss, ContAccumLoss
from contaccum.adapters.text_keys import token_keys

IDS = torch.tensor([[2, 9, 9, 3]] * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64])
def test_keys_cover_what_stands_beside_the_ids(dtype: torch.dtype) -> None:
    images = (255 * torch.rand(3, 3, 4, 4)).to(dtype)
    images[2] = images[0]
    keys = token_keys({"input_ids": IDS, "pixel_values": images})
    assert keys[0] == keys[2] != keys[1]
    assert not torch.isin(keys, token_keys({"input_ids": IDS})).any()
    alone = token_keys({"input_ids": IDS[:1], "pixel_values": images[:1], "modality": "message"})
    assert alone[0] == keys[0], "a key depends on its own input alone"
    reversed_rows = token_keys({"input_ids": IDS, "pixel_values": images.flip(3)})
    assert not torch.isin(keys, reversed_rows).any(), "the places of pixels count"


def test_keys_of_a_text_are_of_its_tokens_alone() -> None:
    """Saved banks hold them: nothing else that comes with a text changes them, nor what a model has written beside it."""
    rows = torch.arange(3)
    about = {"token_type_ids": IDS, "position_ids": IDS, "special_tokens_mask": IDS > 2, "length": rows, "prompt_length": rows[:1]}
    about |= {"sentence_lengths": rows, "token_counts": rows, "query_expansion_positions": IDS > 2, "max_length_q": rows[0]}
    made = {"sentence_embedding_backbone": torch.rand(3, 4), "token_weights_sum": torch.rand(3), "other": torch.rand(3, 4).requires_grad_()}
    known = [8117789661671879203] * 3
    assert token_keys({"input_ids": IDS}).tolist() == token_keys({"input_ids": IDS, **about, **made}).tolist() == known


def test_texts_with_other_images_differ_in_their_text_too() -> None:
    images = torch.rand(1, 3, 4, 4).expand(2, -1, -1, -1)
    keys = token_keys({"input_ids": torch.tensor([[2, 9, 3], [2, 8, 3]]), "pixel_values": images})
    assert keys[0] != keys[1]


def test_patches_of_unknown_owners_make_no_two_inputs_equal() -> None:
    batch = {"input_ids": IDS, "pixel_values": torch.rand(7, 5), "image_grid_thw": torch.ones(3, 3, dtype=torch.int64)}
    keys = token_keys(batch)
    assert len(keys.unique()) == 3
    assert torch.equal(token_keys(batch), keys), "the same again, as a second pass needs it"
    assert not torch.isin(token_keys({**batch, "pixel_values": torch.rand(7, 5)}), keys).any()


class PlaceholdersAndPixels(nn.Module):
    """A model whose inputs differ in their pixels alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Linear(12, 8)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "sentence_embedding": self.tower(features["pixel_values"].flatten(1))}


def columns(seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.full((4, 3), 9), "pixel_values": torch.randn(4, 3, 2, 2, generator=generator)} for _ in range(2)]


def loss_and_gradient(loss: nn.Module, model: nn.Sequential) -> tuple[Tensor, Tensor]:
    value = loss(columns(0), None)
    value.backward()
    gradient = model[0].tower.weight.grad.clone()
    model.zero_grad()
    return value.detach(), gradient


@pytest.mark.parametrize("kind", [ContAccumLoss, CachedContAccumLoss])
def test_equal_placeholders_stay_negatives_of_each_other(kind: type[ContAccumLoss]) -> None:
    """Were their keys equal, every negative would be masked and the loss 0."""
    model = nn.Sequential(PlaceholdersAndPixels())
    expected, expected_gradient = loss_and_gradient(MultipleNegativesRankingLoss(model), model)
    loss = kind(model, bank_size=8, drift_correction=None)
    value, gradient = loss_and_gradient(loss, model)
    assert expected > 0.1
    assert torch.allclose(value, expected, rtol=1e-5)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    banked = loss(columns(1), None)
    assert banked > kind(model, bank_size=0)(columns(1), None), "those in the bank are negatives too"


@pytest.mark.parametrize("others", [1, 2])
def test_equal_texts_are_known_after_another_loss_has_seen_them(tiny_encoder: Callable[..., SentenceTransformer], others: int) -> None:
    """A model writes its vectors, with dropout, into the features that the next loss of a sum gets."""
    model = tiny_encoder(tied=True)
    features = [model.preprocess(["w1", "w2", "w3"]), model.preprocess(["w4 w5"] * 3)]
    loss = ContAccumLoss(model, bank_size=8)
    for _ in range(others):
        assert MultipleNegativesRankingLoss(model)(features, None) > 0.1
    assert loss(features).abs() < 1e-6, "each passage is every query's positive: no negatives are left"


def test_keys_of_a_static_embedding_are_those_of_the_texts(tokenizer_folder: str) -> None:
    model = SentenceTransformer(modules=[StaticEmbedding(Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json"), embedding_dim=8)])
    keys = token_keys(model.preprocess(["w1 w2", "w3", "w1 w2", "w2 w1"]))
    assert keys[0] == keys[2]
    assert len(keys.unique()) == 3
    assert token_keys(model.preprocess(["w5", "w3"]))[1] == keys[1]
    features = [model.preprocess(["w1", "w2", "w3"]), model.preprocess(["w4 w5"] * 3)]
    assert ContAccumLoss(model, bank_size=8)(features).abs() < 1e-6
