"""What `bench` measures: an update's workload, its variants, and the towers and texts that they are made with."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from torch import Tensor, nn
from transformers import BertConfig

from contaccum.adapters.gradcache import CachedContAccumLoss
from contaccum.adapters.losses import ContAccumLoss
from contaccum.experiments.grid import SIZES
from contaccum.towers.dual_encoder import dual_encoder
from contaccum.towers.random_encoder import write_word_tokenizer

# layers, width, heads: BERT-shaped encoders with random weights
VOCABULARY = 30_522
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
FILLING = 512  # tuples at a time into a bank before it is timed
LENGTHS = ("fixed", "varied")
SHORTEST = 4  # varied lengths are drawn between a quarter of the longest and the longest


@dataclass(frozen=True)
class Workload:
    """An update's samples, and how the towers run."""

    n_total: int = 128
    n_local: int = 8
    bank: int = 1024
    query_tokens: int = 32
    passage_tokens: int = 256
    hard_negatives: int = 1
    precision: str = "fp32"
    lengths: str = "fixed"  # of queries and passages: all of query_tokens and passage_tokens, or varied up to them
    compile: bool = False
    unpad: bool = False
    checkpointing: bool = False
    graphs: bool = False


class OfficialLoss(nn.Module):
    """As the paper's own code computes it: vectors kept in deques, concatenated, the whole matrix in fp32, gradients by autograd."""

    def __init__(self, model: SentenceTransformer, bank_size: int, n: int) -> None:
        super().__init__()
        self.model = model
        self.queries: deque[Tensor] = deque(maxlen=max(1, bank_size // n))
        self.passages: deque[Tensor] = deque(maxlen=max(1, bank_size // n))

    def forward(self, features: list[dict[str, Any]], labels: Any = None) -> Tensor:
        queries, *passages = [self.model(column)["sentence_embedding"].float() for column in features]
        return self.from_vectors(queries, torch.stack(passages, 1).flatten(0, 1), len(passages))

    def from_vectors(self, queries: Tensor, passages: Tensor, per_query: int) -> Tensor:
        rows = torch.cat([queries, *self.queries])
        columns = torch.cat([passages, *self.passages])
        loss = nn.functional.cross_entropy(rows @ columns.T, torch.arange(len(rows), device=rows.device) * per_query)
        self.queries.appendleft(queries.detach())
        self.passages.appendleft(passages.detach())
        return loss


@dataclass(frozen=True)
class Variant:
    build: Callable[[SentenceTransformer, Workload], nn.Module]
    whole: bool = False  # one call of the loss per update
    banked: bool = False
    cached: bool = False  # a second forward pass


def _ours(loss: type[ContAccumLoss] = ContAccumLoss, **options: Any) -> Callable[[SentenceTransformer, Workload], nn.Module]:
    def build(model: SentenceTransformer, work: Workload) -> nn.Module:
        arguments = {"bank_size": work.bank, "scale": 1.0, "similarity_fct": dot_score, **options}
        if loss is CachedContAccumLoss:
            arguments["mini_batch_size"] = work.n_local
        return loss(model, **arguments)

    return build


VARIANTS = {
    "gradaccum": Variant(_ours(bank_size=0)),
    "contaccum": Variant(_ours(drift_correction=None), banked=True),  # the paper's bank
    "contaccum (default)": Variant(_ours(drift_correction="mean+zero-sum"), banked=True),
    "gradcache": Variant(_ours(CachedContAccumLoss, bank_size=0), whole=True, cached=True),
    "official contaccum": Variant(lambda model, work: OfficialLoss(model, work.bank, work.n_local), banked=True),
    "MultipleNegativesRankingLoss": Variant(lambda model, work: MultipleNegativesRankingLoss(model, 1.0, dot_score)),
    "CachedMultipleNegativesRankingLoss": Variant(
        lambda model, work: CachedMultipleNegativesRankingLoss(model, 1.0, dot_score, mini_batch_size=work.n_local), whole=True, cached=True
    ),
    # as many tokens as n_local passages have: more queries at once, and more of short texts
    "CachedMultipleNegativesRankingLoss by tokens": Variant(
        lambda model, work: CachedMultipleNegativesRankingLoss(
            model, 1.0, dot_score, mini_batch_num_tokens=work.n_local * work.passage_tokens
        ),
        whole=True,
        cached=True,
    ),
}


def random_lengths(work: Workload, seed: int) -> Tensor:
    """Tokens of every text of an update, the same for every variant: (n_total, 2 + h)."""
    longest = torch.tensor([work.query_tokens] + [work.passage_tokens] * (1 + work.hard_negatives)).expand(work.n_total, -1)
    if work.lengths == "fixed":
        return longest
    shortest = longest // SHORTEST
    drawn = torch.rand(longest.shape, generator=torch.Generator().manual_seed(seed))
    return shortest + (drawn * (longest - shortest + 1)).long()


def random_features(model: SentenceTransformer, task: str, lengths: Tensor) -> dict[str, Any]:
    """Random texts of these lengths, padded to the longest."""
    ids = torch.randint(1000, VOCABULARY, (len(lengths), int(lengths.max())), device=model.device)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long().to(model.device)
    return {"input_ids": ids * mask, "attention_mask": mask, "modality": "text", "task": task}


def fill_bank(loss: nn.Module, model: SentenceTransformer, work: Workload) -> None:
    """A bank of random vectors, as full as it gets."""
    width = int(model.get_embedding_dimension() or 0)
    step = work.n_local if isinstance(loss, OfficialLoss) else FILLING
    for _ in range(0, work.bank, step):
        queries, passages = (torch.randn(step, *shape, device=model.device) for shape in ((width,), (1 + work.hard_negatives, width)))
        if isinstance(loss, OfficialLoss):
            loss.queries.appendleft(queries)
            loss.passages.appendleft(passages.flatten(0, 1))
        elif isinstance(loss, ContAccumLoss):
            keys = torch.randint(2**62, (step, 2 + work.hard_negatives), device=model.device)
            negatives = passages[:, 1:] if work.hard_negatives else None
            loss.criterion.forward(queries.requires_grad_(), passages[:, 0], negatives, keys[:, 0], keys[:, 1:])  # past hooks, which time


def tower_config(size: str, tokens: int = 512) -> BertConfig:
    layers, width, heads = SIZES[size]
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return BertConfig(vocab_size=VOCABULARY, max_position_embeddings=max(512, tokens), **shape)


def random_encoder(size: str, tokens: int) -> SentenceTransformer:
    """Two towers of random weights, and a tokenizer that is never used."""
    with tempfile.TemporaryDirectory() as folder:
        write_word_tokenizer(["a"], Path(folder))
        return dual_encoder(tower_config(size, tokens), tokenizer=Path(folder), max_seq_length=tokens)
