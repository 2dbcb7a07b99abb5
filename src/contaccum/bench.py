"""Time and memory of one optimizer update, by every way of making it, side by side on one model.

Ways differ in the loss alone, so one pair of towers and one optimizer serve them all. They take turns; each turn starts with a full bank
and a warm-up, and ends with the way's memory given back. Inputs are random token ids of fixed length.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import dot_score
from torch import Tensor, nn
from transformers import BertConfig

from contaccum.losses import CachedContAccumLoss, ContAccumLoss
from contaccum.towers import dual_encoder

# layers, width, heads: BERT-shaped encoders with random weights
SIZES = {"tiny": (1, 32, 2), "minilm-l3": (3, 384, 12), "minilm-l6": (6, 384, 12), "bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)}
VOCABULARY = 30_522
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
FILLING = 512  # tuples at a time into a bank before it is timed
CLIP = 2.0


@dataclass(frozen=True)
class Workload:
    """What is the same for every way."""

    n_total: int = 128
    n_local: int = 8
    bank: int = 1024
    query_tokens: int = 32
    passage_tokens: int = 256
    hard_negatives: int = 1
    precision: str = "fp32"


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
class Way:
    build: Callable[[SentenceTransformer, Workload], nn.Module]
    whole: bool = False  # one call of the loss per update
    banked: bool = False


def _ours(loss: type[ContAccumLoss] = ContAccumLoss, **options: Any) -> Callable[[SentenceTransformer, Workload], nn.Module]:
    def build(model: SentenceTransformer, work: Workload) -> nn.Module:
        given = {"bank_size": work.bank, "scale": 1.0, "similarity_fct": dot_score, **options}
        if loss is CachedContAccumLoss:
            given["mini_batch_size"] = work.n_local
        return loss(model, **given)

    return build


WAYS = {
    "gradaccum": Way(_ours(bank_size=0)),
    "contaccum": Way(_ours(), banked=True),
    "contaccum (mean)": Way(_ours(drift_correction="mean"), banked=True),
    "gradcache": Way(_ours(CachedContAccumLoss, bank_size=0), whole=True),
    "official contaccum": Way(lambda model, work: OfficialLoss(model, work.bank, work.n_local), banked=True),
    "MultipleNegativesRankingLoss": Way(lambda model, work: MultipleNegativesRankingLoss(model, 1.0, dot_score)),
    "CachedMultipleNegativesRankingLoss": Way(
        lambda model, work: CachedMultipleNegativesRankingLoss(model, 1.0, dot_score, mini_batch_size=work.n_local), whole=True
    ),
}


def measure(
    size: str,
    work: Workload,
    ways: Sequence[str] = tuple(WAYS),
    rounds: int = 3,
    updates: int = 3,
    device: str | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row per way: median seconds of an update, samples per second, peak memory, and its seconds over gradaccum's."""
    _check(size, work, ways, rounds, updates)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = random_encoder(size, max(work.query_tokens, work.passage_tokens)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.startswith("cuda"))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int | None] = dict.fromkeys(ways)
    for _ in range(rounds):
        for way in ways:
            peaks[way] = _turn(WAYS[way], model, optimizer, work, updates, seconds[way])
    base = statistics.median(seconds["gradaccum"]) if "gradaccum" in seconds else None
    return [_row(size, work, way, seconds[way], peaks[way], base) for way in ways]


def _row(size: str, work: Workload, way: str, seconds: list[float], peak: int | None, base: float | None) -> dict[str, Any]:
    middle = statistics.median(seconds)
    ratio = None if base is None else middle / base
    told = {"seconds": middle, "all_seconds": seconds, "samples_per_second": work.n_total / middle, "peak_bytes": peak}
    return {"way": way, "banked": WAYS[way].banked, "model": size, **asdict(work), **told, "time_over_gradaccum": ratio}


def _turn(
    way: Way, model: SentenceTransformer, optimizer: torch.optim.Optimizer, work: Workload, updates: int, seconds: list[float]
) -> int | None:
    """Time `updates` updates after a warm-up; the peak that the allocator reached in them."""
    loss = way.build(model, work).to(model.device)
    batches = [list(_micro_batches(model, way, work)) for _ in range(2)]
    if way.banked:
        _fill(loss, model, work)
    _update(model, loss, optimizer, batches[0], work)
    _wait(model.device, reset=True)
    for i in range(updates):
        started = time.perf_counter()
        _update(model, loss, optimizer, batches[i % 2], work)
        _wait(model.device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None
    optimizer.zero_grad(set_to_none=True)
    del loss, batches
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return peak


def _update(
    model: SentenceTransformer, loss: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[dict[str, Any]]], work: Workload
) -> None:
    for features in batches:
        with _autocast(model.device, work.precision):
            value = loss([dict(column) for column in features], None)
        (value / len(batches)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if isinstance(loss, ContAccumLoss):
        loss.criterion.after_update()


def _micro_batches(model: SentenceTransformer, way: Way, work: Workload) -> Iterator[list[dict[str, Any]]]:
    size = work.n_total if way.whole else work.n_local
    for _ in range(work.n_total // size):
        passages = [_features(model, "document", size, work.passage_tokens) for _ in range(1 + work.hard_negatives)]
        yield [_features(model, "query", size, work.query_tokens), *passages]


def _features(model: SentenceTransformer, task: str, count: int, tokens: int) -> dict[str, Any]:
    ids = torch.randint(1000, VOCABULARY, (count, tokens), device=model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "modality": "text", "task": task}


def _fill(loss: nn.Module, model: SentenceTransformer, work: Workload) -> None:
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
            loss.criterion(queries.requires_grad_(), passages[:, 0], negatives, keys[:, 0], keys[:, 1:])


def _autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _wait(device: torch.device, reset: bool = False) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()


def random_encoder(size: str, tokens: int) -> SentenceTransformer:
    """Two towers of random weights, and a tokenizer that is never used."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    layers, width, heads = SIZES[size]
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=max(512, tokens), **shape)
    with tempfile.TemporaryDirectory() as folder:
        blank = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=blank, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
        return dual_encoder(config, tokenizer=Path(folder), max_seq_length=tokens)


def _check(size: str, work: Workload, ways: Sequence[str], rounds: int, updates: int) -> None:
    if size not in SIZES:
        raise ValueError(f"model {size!r} is unknown; choose one of {', '.join(SIZES)}")
    if unknown := [way for way in ways if way not in WAYS]:
        raise ValueError(f"way {unknown[0]!r} is unknown; choose among {', '.join(WAYS)}")
    if work.precision not in PRECISIONS:
        raise ValueError(f"precision {work.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    if work.n_local < 1 or work.n_total % work.n_local:
        raise ValueError(f"n_total={work.n_total} is not a multiple of n_local={work.n_local}")
    if min(rounds, updates) < 1:
        raise ValueError(f"rounds={rounds} and updates={updates} must be 1 or more")
