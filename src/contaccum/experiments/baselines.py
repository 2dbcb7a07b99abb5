"""What trained models are held against: the same encoder before training, and BM25."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contaccum.common.outputs import sole_path, whole_file
from contaccum.data.readers.collections import encoded_texts
from contaccum.data.readers.queries import read_queries

MODEL_OPTIONS = (
    *("tied", "pooling", "similarity", "max_seq_length", "tokenizer", "passage_model"),
    *("query_prompt", "passage_prompt", "include_prompt"),
)


def untrained_model(options: dict[str, Any], device: str | None = None) -> Any:
    """The model that training with these options starts from."""
    from contaccum.towers.dual_encoder import dual_encoder
    from contaccum.towers.loading import same_missing_weights

    with same_missing_weights():
        return dual_encoder(options["model"], **{name: options[name] for name in MODEL_OPTIONS if name in options}, device=device)


def search_by_words(collection: str, queries: str, split: str | None, k: int, output: Path) -> None:
    """A run file of BM25's ranking."""
    from contaccum.data.bm25 import best_passages
    from contaccum.retrieval.runs import Hit, write_run

    keys: list[str] = []

    def texts() -> Iterator[str]:
        for key, text in encoded_texts(collection):
            keys.append(key)
            yield text

    asked = list(read_queries(queries, split))
    found = best_passages(texts(), [query.text for query in asked], k)
    ranked = {
        query.id: [Hit(keys[place], float(k - rank)) for rank, place in enumerate(places)]
        for query, places in zip(asked, found, strict=True)
    }
    with sole_path(output) as part, whole_file(part) as file:
        write_run(file, ranked, "bm25")
