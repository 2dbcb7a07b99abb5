"""Models from a folder or the hub, and whether what was loaded can be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import nn
from transformers import PreTrainedModel

from contaccum.common.errors import DataError
from contaccum.common.inputs import readable

SIZES = {"num_hidden_layers": 10_000, "hidden_size": 1_000_000, "num_attention_heads": 10_000, "vocab_size": 100_000_000}  # at most
SAMPLE, WORDS = 128, 64  # texts that are looked at, tokens of each
UNKNOWN = 0.9  # of the words: with more, it is the tokenizer of another language
FEW, ROUNDING = 8, 1e-5  # texts whose vectors are compared; of their largest value
POSITIONS = ("position_embeddings", "wpe", "embed_positions")  # how transformers calls a table of learnt positions
WHOLE = "give a model folder or a hub name whose files are whole"


@contextmanager
def same_missing_weights() -> Iterator[None]:
    """Weights that a model lacks, as a pooler that nothing uses, are drawn; here they are the same each time, and so is its checksum."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def needed_weights(source: object, remedy: str = WHOLE) -> Iterator[None]:
    """DataError where transformers finds files without weights that the vectors depend on: it would draw them, and only log it. What
    nothing uses, as BERT's own pooler, may be missing."""
    missing, load = list[str](), PreTrainedModel.__dict__["from_pretrained"]

    def noting(kind: Any, *args: Any, **options: Any) -> Any:
        model, found = load.__func__(kind, *args, **{**options, "output_loading_info": True})
        missing.extend(name for name in sorted(found["missing_keys"]) if "pooler." not in name)
        return model

    setattr(PreTrainedModel, "from_pretrained", classmethod(noting))  # noqa: B010  # which a type checker takes for a mistake
    try:
        yield
    finally:
        setattr(PreTrainedModel, "from_pretrained", load)  # noqa: B010
    if missing:
        raise DataError(f"{source} lacks {len(missing)} of its weights, as {missing[0]}, which would be random; {remedy}")


def load_model(name: str | Path, kind: type[Any] = SentenceTransformer, **options: Any) -> Any:
    """`kind(name)` in single precision, whatever it is stored in: half of it is many times slower on a CPU, and autocast is for the GPU."""
    remedy = WHOLE if kind is SentenceTransformer else f"give a {kind.__name__}"  # most likely it is of another kind
    with readable(f"{name} cannot be loaded as a {kind.__name__}", WHOLE), needed_weights(name, remedy), same_missing_weights():
        model = kind(str(name), model_kwargs={"dtype": torch.float32}, **options)
    check_finite(model, name)
    for module in model.modules():
        if isinstance(module, Transformer):
            check_sizes(module.config, name)
            check_tokenizer(module, name)
    if isinstance(model, SentenceTransformer):
        with readable(f"{name} can be loaded, but cannot encode a text", WHOLE):
            model.encode_query(["a"], show_progress_bar=False)
            model.encode_document(["a"], show_progress_bar=False)
    return model


def check_sizes(config: Any, source: object) -> None:
    """DataError for sizes that no model has: transformers builds one without layers, or goes on building."""
    for name, most in SIZES.items():
        size = getattr(config, name, None)
        if isinstance(size, int) and not 0 < size <= most:
            raise DataError(f"{source} has {name}={size}, which must be between 1 and {most:,}; {WHOLE}")


def check_finite(model: nn.Module, source: object) -> None:
    """DataError where a weight is NaN or infinite: all vectors would be."""
    if name := odd_weight(model):
        raise DataError(f"{source} holds weights that are not finite, as {name}; give a model that was saved whole")


def odd_weight(model: nn.Module) -> str | None:
    """The name of a weight that is NaN or infinite. Buffers may be: a mask is."""
    for name, value in model.named_parameters():
        if value.is_floating_point() and not value.is_meta and not bool(torch.isfinite(value).all()):
            return name
    return None


def check_tokenizer(module: Transformer, source: object) -> None:
    """DataError where the tokenizer knows no word, as of a folder without one, or more words than the model has vectors for."""
    tokenizer: Any = module.tokenizer
    if not hasattr(tokenizer, "get_vocab"):
        return
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise DataError(f"{source} has no tokenizer: every word would be the same; give the folder or name of one (train: --tokenizer)")
    with readable(f"the tokenizer of {source} could not be saved", WHOLE):  # half of a surrogate pair among its settings
        json.dumps(getattr(tokenizer, "init_kwargs", {}), default=str, ensure_ascii=False).encode()
    embeddings = module.model.get_input_embeddings() if hasattr(module.model, "get_input_embeddings") else None
    rows = getattr(embeddings, "num_embeddings", None)
    if rows is not None and tokenizer.vocab_size > rows:
        raise DataError(f"{source} has vectors for {rows:,} words, but its tokenizer knows {tokenizer.vocab_size:,}; give one that fits")


def check_words(model: nn.Module, texts: Sequence[str]) -> None:
    """DataError where a tower's tokenizer knows next to no word of these texts: all would be the same."""
    texts = texts[:SAMPLE]
    for module in model.modules():
        if isinstance(module, Transformer) and hasattr(module.tokenizer, "unk_token_id"):
            with readable("the model's tokenizer cannot read the first texts", WHOLE):
                found = module.tokenizer(list(texts), add_special_tokens=False, truncation=True, max_length=WORDS)["input_ids"]
            words = list(chain.from_iterable(found))
            if words.count(module.tokenizer.unk_token_id) >= UNKNOWN * len(words):
                raise DataError(f"the tokenizer knows next to no word of the first {len(texts)} texts; is it, or the data, the right one?")


def check_vectors(model: SentenceTransformer, queries: Sequence[str], passages: Sequence[str]) -> None:
    """DataError where a tower gives all of these texts the same vector, as one whose weights are 0: it could not learn."""
    for texts, encode in ((queries, model.encode_query), (passages, model.encode_document)):
        if same_vector(lambda some, encode=encode: encode(some, batch_size=1, show_progress_bar=False), texts):  # type: ignore[misc]
            raise DataError(
                "the model gives the first texts the same vector, all of them; give one whose weights are whole and can tell texts apart"
            )


def same_vector(encode: Callable[[list[str]], Any], texts: Sequence[str]) -> bool:
    """Whether the first few that differ have one vector, up to rounding."""
    different = list(dict.fromkeys(texts))[:FEW]
    if len(different) < 2:
        return False
    vectors = torch.as_tensor(encode(different)).float()
    return bool((vectors - vectors[0]).abs().max() <= ROUNDING * vectors.abs().max())


def check_length(module: Transformer, tokens: int) -> None:
    """ValueError where texts of so many tokens are longer than the model has positions for, or hold nothing but its special tokens."""
    positions = positions_of(module)
    if positions is not None and tokens > positions:
        raise ValueError(f"max_seq_length={tokens} is more than the model's {positions} positions; use {positions} or less")
    count = getattr(module.tokenizer, "num_special_tokens_to_add", None)
    if count is not None and tokens <= (special := count()):
        raise ValueError(f"max_seq_length={tokens} leaves no room for words beside {special} special tokens; use {special + 1} or more")


def positions_of(module: Transformer) -> int | None:
    """Tokens that the model can read at once; None where there is no such limit."""
    config = module.config
    limits = [size] if isinstance(size := getattr(config, "max_position_embeddings", None), int) else []
    for name, table in module.model.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in POSITIONS:
            limits.append(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    return min(limits, default=None)
