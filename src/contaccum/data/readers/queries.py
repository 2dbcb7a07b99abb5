"""Queries, with their answers where they are known, from any of the formats: one list, none twice."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from contaccum.common.errors import DataError
from contaccum.data.readers.beir import is_beir, qrels_file, read_entries, read_qrels
from contaccum.data.readers.dpr import MAX_FIELD_CHARACTERS, normalize_question
from contaccum.data.readers.files import (
    ID_FIELDS,
    bare_suffix,
    checked_text,
    find,
    first_text,
    read_jsonl,
    read_lines,
    shown,
    text_field,
    text_list,
)
from contaccum.data.readers.ids import SeenIds
from contaccum.data.readers.json_array import read_array

QUERY_FIELDS = ("text", "query", "question")


class Query(NamedTuple):
    id: str
    text: str
    answers: list[str]  # empty where none are known


def read_queries(path: str | Path, split: str | None = None) -> list[Query]:
    """The queries of a file or folder, in its order, none twice.

    A BEIR folder (`split` keeps the queries that its qrels judge), a training set that `contaccum prepare` wrote (`split` is needed),
    DPR's retriever JSON or retriever output, DPR's .csv or .tsv of question and list of answers, or a .jsonl of `_id` or `id`, `text`,
    `query` or `question`, and perhaps `answers`. Where a format has no ids, a query's id is its place, from 0.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give a BEIR folder, a prepared folder, or a .json, .jsonl, .csv or .tsv of queries")
    if path.is_dir():
        queries = _beir_queries(path, split) if is_beir(path) else _prepared_queries(path, split)
    else:
        readers = {".json": _dpr_queries, ".jsonl": _jsonl_queries, ".csv": _qa_queries, ".tsv": _qa_queries}
        if bare_suffix(path) not in readers:
            raise DataError(f"{path} is of no known kind; give queries as .json, .jsonl, .csv or .tsv (also .gz, .xz)")
        queries = readers[bare_suffix(path)](path)
    return _without_repeats(queries, path)


def _without_repeats(queries: Iterator[Query], path: Path) -> list[Query]:
    kept, seen = [], SeenIds()
    for query in queries:
        if not seen.add(query.id):
            raise DataError(f"{path}: the id {shown(query.id)} appears a second time")
        kept.append(query)
    if not kept:
        raise DataError(f"{path} holds no queries")
    return kept


def _beir_queries(folder: Path, split: str | None) -> Iterator[Query]:
    judged = None if split is None else read_qrels(qrels_file(folder, split))
    texts = find(folder, "queries.jsonl")
    known = [Query(key, text, []) for key, _, text in read_entries(texts) if judged is None or key in judged]
    if judged is not None and not known:
        raise DataError(f"{texts} holds none of the queries that split {split!r} judges, as {shown(next(iter(judged)))}")
    yield from known


def _prepared_queries(folder: Path, split: str | None) -> Iterator[Query]:
    """Each query once, though a training set has a row per (query, relevant passage)."""
    from contaccum.data.training_set import load_training_set

    if split is None:
        raise DataError(f"{folder} is a prepared data set; name its split with --split")
    table, seen = load_training_set(folder, split), set()
    for row, (query, answers) in enumerate(zip(table["query"], table["answers"], strict=True)):
        if query not in seen:
            seen.add(query)
            yield Query(str(row), query, list(answers))


def _dpr_queries(path: Path) -> Iterator[Query]:
    for number, (place, record) in enumerate(read_array(path)):
        question = normalize_question(text_field(record, "question", place))
        yield Query(first_text(record, ID_FIELDS, place) if "id" in record else str(number), question, text_list(record, "answers", place))


def _jsonl_queries(path: Path) -> Iterator[Query]:
    for line, record in read_jsonl(path):
        place = f"{path}, line {line}"
        yield Query(first_text(record, ID_FIELDS, place), first_text(record, QUERY_FIELDS, place), text_list(record, "answers", place))


def _qa_queries(path: Path) -> Iterator[Query]:
    """DPR's question files: the question, a tab, its answers as a Python list."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD_CHARACTERS))
    reader, number = csv.reader((line for _, line in read_lines(path)), delimiter="\t"), 0
    try:
        for fields in reader:
            if fields:
                yield Query(str(number), *_question(fields, f"{path}, line {reader.line_num}"))
                number += 1
    except csv.Error as error:
        raise DataError(f"{path}, after line {reader.line_num}: {error}; is a quotation mark left open?") from error


def _question(fields: list[str], place: str) -> tuple[str, list[str]]:
    """Question and answers. The list is read as literals alone: nothing in it is run."""
    needed = f"{place}: a question, a tab and a list of answers are needed, not {shown(fields)}"
    try:
        question, answers = fields[0], ast.literal_eval(fields[1])
    except (IndexError, SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:  # MemoryError: brackets too deep
        raise DataError(needed) from error
    if not isinstance(answers, (list, tuple)) or not all(isinstance(answer, (str, int, float)) for answer in answers):
        raise DataError(needed)
    return normalize_question(question), [checked_text(str(answer), "answers", place) for answer in answers]
