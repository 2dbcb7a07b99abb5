"""Dev queries searched during training: sentence-transformers' InformationRetrievalEvaluator over our data, and a log of what it found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from contaccum.common.errors import DataError
from contaccum.data.readers.beir import is_beir, qrels_file, read_qrels, read_texts
from contaccum.data.readers.collections import encoded_texts
from contaccum.data.readers.files import find, shown
from contaccum.data.training_set import load_training_set
from contaccum.training.logfile import append_lines, keep_updates

METRICS = ("MRR", "NDCG", "Recall", "Accuracy")
RANKS = (1, 10, 20, 100)
TextsById = dict[str, Any]  # texts by id; Any for the evaluator, which takes pictures too
Passages = Callable[[], Iterator[tuple[str, Any]]]  # (id, text), read each time
Parts = tuple[TextsById, Passages, dict[str, set[str]]]  # queries, passages, query -> relevant passages
SHOWN = ("MRR@10", "NDCG@10", "Recall@100", "Accuracy@1", "Accuracy@20", "Accuracy@100")


def check_metric(name: str) -> None:
    """ValueError where the evaluator does not know it."""
    metric, _, rank = name.partition("@")
    if metric not in METRICS or rank not in map(str, RANKS):
        raise ValueError(f"dev_metric={name!r} is unknown; use one of {', '.join(METRICS)} at {', '.join(map(str, RANKS))}, as MRR@10")


def metric_key(metric: str, similarity: str) -> str:
    """The trainer's name of a metric."""
    return f"eval_dev_{similarity}_{metric.lower()}"


def dev_evaluator(path: str | Path, split: str, passages: int | None, seed: int) -> InformationRetrievalEvaluator:
    """Of a BEIR folder, the split's queries over the whole collection; of a prepared set or JSONL, its rows' queries over their own
    passages, hard negatives included. With `passages`, over the relevant ones and at most so many others, drawn by `seed`.
    """
    folder = Path(path)
    queries, texts, relevant = _of_beir(folder, split) if is_beir(folder) else _of_rows(folder, split)
    chosen = None if passages is None else _some((key for key, _ in texts()), set().union(*relevant.values()), passages, seed)
    collection: TextsById = {key: text for key, text in texts() if chosen is None or key in chosen}
    if (passage := next((key for keys in relevant.values() for key in keys if key not in collection), None)) is not None:
        raise DataError(f"{folder}, split {split!r}: names the document {shown(passage)}, which corpus.jsonl does not hold")
    ranks = list(RANKS)
    at: dict[str, Any] = dict.fromkeys(("mrr_at_k", "ndcg_at_k", "accuracy_at_k", "precision_recall_at_k"), ranks)
    return InformationRetrievalEvaluator(queries, collection, relevant, name="dev", map_at_k=[100], write_csv=False, batch_size=128, **at)


def _of_beir(folder: Path, split: str) -> Parts:
    qrels = read_qrels(qrels_file(folder, split))
    relevant = {query: {doc for doc, grade in grades.items() if grade > 0} for query, grades in qrels.items()}
    texts = read_texts(find(folder, "queries.jsonl"))
    relevant = {query: documents for query, documents in relevant.items() if documents}
    if not relevant:
        raise DataError(f"{folder} judges nothing as relevant in its split {split!r}; give another --dev or --dev-split")
    if (query := next((query for query in relevant if query not in texts), None)) is not None:
        raise DataError(f"{folder}, split {split!r}: names the query {shown(query)}, which queries.jsonl does not hold")
    return {query: texts[query] for query in relevant}, lambda: encoded_texts(folder), relevant


def _of_rows(path: Path, split: str) -> Parts:
    rows = load_training_set(path, split)
    if not len(rows):
        raise DataError(f"{path} has no rows in its split {split!r}; give another --dev or --dev-split")
    collection: TextsById = {}
    number: dict[str, str] = {}
    for row in rows:
        for text in [row["positive"], *row["negatives"]]:
            collection[number.setdefault(text, str(len(number)))] = text
    queries: TextsById = {}
    relevant: dict[str, set[str]] = {}
    for row in rows:  # a query with several positives has several rows
        queries[row["query"]] = row["query"]
        relevant.setdefault(row["query"], set()).add(number[row["positive"]])
    return queries, lambda: iter(collection.items()), relevant


def _some(keys: Iterable[str], wanted: set[str], others: int, seed: int) -> set[str]:
    """Those wanted and some others; of a large collection only the ids are held."""
    rest = [key for key in dict.fromkeys(keys) if key not in wanted]
    return wanted | set(random.Random(seed).sample(rest, min(others, len(rest))))


class DevLog(TrainerCallback):
    """A line of metrics in `dev.jsonl` for each search."""

    def __init__(self, file: Path, similarity: str, chosen: str, writes: bool = True) -> None:
        self.file, self.similarity, self.writes = file, similarity, writes
        self.shown = list(dict.fromkeys((chosen, *SHOWN)))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.writes:
            keep_updates(self.file, state.global_step)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        found = {name: (metrics or {})[metric_key(name, self.similarity)] for name in self.shown}
        if self.writes:
            append_lines(self.file, [{"update": state.global_step, **{name: float(value) for name, value in found.items()}}])
