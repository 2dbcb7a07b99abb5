"""A training set and a collection to mine negatives in, for tests of mining."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, DatasetDict

from contaccum.data.training_set import as_table

CAPITALS = [
    "Paris Paris is the capital of France",
    "Lyon Lyon is a city of France, not the capital",
    "France The capital of France was Versailles once",
    "Rome Rome is the capital of Italy",
    "Cheese France makes cheese",
    "Tennis a racket sport",
]


def training_set(*rows: tuple[str, str, list[str]], negatives: list[list[str]] | None = None) -> Dataset:
    """Rows of (query, positive, answers)."""
    query, positive, answers = (list(column) for column in zip(*rows, strict=True))
    columns = {"query": query, "positive": positive, "answers": answers}
    return as_table(columns if negatives is None else columns | {"negatives": negatives})


def passages(*given_texts: str) -> Dataset:
    return Dataset.from_dict({"text": list(given_texts)})


def prepared_files(tmp_path: Path) -> Path:
    """A saved training set with splits, and the collection beside it in DPR's layout."""
    rows = [("capital of France", CAPITALS[0], ["Paris"]), ("capital of Italy", CAPITALS[3], ["Rome"])]
    tables = {"train": training_set(*rows), "dev": training_set(rows[1], negatives=[["old"]]), "test": training_set(rows[0])}
    DatasetDict(tables).save_to_disk(str(tmp_path / "prepared"))
    split = [text.split(" ", 1) for text in CAPITALS]
    lines = ["id\ttext\ttitle", *(f'{i}\t"{text}"\t{title}' for i, (title, text) in enumerate(split))]
    (tmp_path / "passages.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path
