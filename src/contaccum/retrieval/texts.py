"""Passages and queries as the retrieval commands read them: one stream of (id, title, text), one list of queries with their answers."""

from __future__ import annotations

import ast
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.data.beir import find_qrels, is_beir, read_collection, read_entries, read_qrels
from contaccum.data.dpr import normalize_question, read_passages
from contaccum.data.files import (
    READ_ERRORS,
    bare_suffix,
    checked_text,
    find,
    listed,
    open_binary,
    passage_text,
    read_jsonl,
    read_lines,
    shown,
)
from contaccum.data.ids import SeenIds
from contaccum.data.json_array import read_array
from contaccum.errors import DataError

ID_FIELDS, QUERY_FIELDS = ("_id", "id"), ("text", "query", "question")


class Query(NamedTuple):
    id: str
    text: str
    answers: list[str]  # empty where none are known


def read_collection_of(path: str | Path) -> Iterator[tuple[str, str, str]]:
    """(id, title, text) of a BEIR folder's corpus, DPR's passages .tsv or a .jsonl (`_id` or `id`, `text`, perhaps `title`), streamed."""
    path = Path(path)
    if is_beir(path):
        return read_collection(path)
    readers: dict[str, Callable[[Path], Iterator[tuple[str, str, str]]]] = {".tsv": read_passages, ".jsonl": _jsonl_passages}
    if not path.is_file() or bare_suffix(path) not in readers:
        prepared = " (of a prepared set: its folder beir, which prepare --hold-out writes)" if path.is_dir() else ""
        raise DataError(f"{path} is no collection; give a BEIR folder{prepared}, a passages .tsv or a .jsonl (also .gz, .xz)")
    return readers[bare_suffix(path)](path)


def encoded_texts(path: str | Path) -> Iterator[tuple[str, str]]:
    """(id, text) of every passage of a collection, its title before its text."""
    return ((key, passage_text(title, text)) for key, title, text in read_collection_of(path))


def count_lines(path: str | Path) -> int:
    """Lines of a collection's file: about its number of passages, for a progress bar."""
    path = find(Path(path), "corpus.jsonl") if is_beir(Path(path)) else Path(path)
    with open_binary(path) as file:
        try:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
        except READ_ERRORS as error:
            raise DataError(f"{path} cannot be read: {error}") from error


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
            raise DataError(f"{path}: the id {shown(query.id)} stands there a second time")
        kept.append(query)
    if not kept:
        raise DataError(f"{path} holds no queries")
    return kept


def _jsonl_passages(path: Path) -> Iterator[tuple[str, str, str]]:
    seen, line = SeenIds(), 0
    for line, record in read_jsonl(path):
        key = _first(record, ID_FIELDS, path, line)
        if not seen.add(key):
            raise DataError(f"{path}, line {line}: the id {shown(key)} stands there a second time")
        title = "" if record.get("title") is None else _first(record, ("title",), path, line)
        yield key, title, _first(record, ("text",), path, line)
    if not line:
        raise DataError(f"{path} is empty")


def _beir_queries(folder: Path, split: str | None) -> Iterator[Query]:
    judged = None if split is None else read_qrels(qrels_file(folder, split))
    for key, _, text in read_entries(find(folder, "queries.jsonl")):
        if judged is None or key in judged:
            yield Query(key, text, [])


def qrels_file(path: Path, split: str | None) -> Path:
    """A qrels file: `path` itself, or the one of a BEIR folder's split ("test" where None)."""
    if not path.is_dir():
        return path
    files = find_qrels(path)
    if (split or "test") not in files:
        raise DataError(f"{path} has no split {split or 'test'!r}; it has {', '.join(files)}")
    return files[split or "test"]


def _prepared_queries(folder: Path, split: str | None) -> Iterator[Query]:
    """Each query once, though a training set has a row per (query, relevant passage)."""
    from contaccum.data.training import load_training_set

    if split is None:
        raise DataError(f"{folder} is a prepared data set; name its split with --split")
    table, seen = load_training_set(folder, split), set()
    for row, (query, answers) in enumerate(zip(table["query"], table["answers"], strict=True)):
        if query not in seen:
            seen.add(query)
            yield Query(str(row), query, list(answers))


def _dpr_queries(path: Path) -> Iterator[Query]:
    for number, (line, record) in enumerate(read_array(path)):
        yield Query(
            str(record.get("id", number)), normalize_question(_first(record, ("question",), path, line)), _answers(record, path, line)
        )


def _jsonl_queries(path: Path) -> Iterator[Query]:
    for line, record in read_jsonl(path):
        yield Query(_first(record, ID_FIELDS, path, line), _first(record, QUERY_FIELDS, path, line), _answers(record, path, line))


def _qa_queries(path: Path) -> Iterator[Query]:
    """DPR's question files: the question, a tab, its answers as a Python list."""
    reader = csv.reader((line for _, line in read_lines(path)), delimiter="\t")
    for number, fields in enumerate(fields for fields in reader if fields):
        try:
            question, answers = fields[0], ast.literal_eval(fields[1])
            yield Query(str(number), normalize_question(question), [str(answer) for answer in answers])
        except (IndexError, SyntaxError, TypeError, ValueError) as error:
            raise DataError(
                f"{path}, line {reader.line_num}: a question, a tab and a list of answers are needed, not {shown(fields)}"
            ) from error


def _first(record: dict[str, Any], names: tuple[str, ...], path: Path, line: int) -> str:
    """The first of these fields that a record has."""
    for name in names:
        value = record.get(name)
        if isinstance(value, str) or (name in ID_FIELDS and isinstance(value, int) and not isinstance(value, bool)):
            return checked_text(str(value), name, f"{path}, line {line}")
    raise DataError(f"{path}, line {line}: no text under {' or '.join(map(repr, names))}; fields there: {listed(record)}")


def _answers(record: dict[str, Any], path: Path, line: int) -> list[str]:
    answers = record.get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{path}, line {line}: 'answers' must be a list of texts, not {shown(answers)}")
    return list(answers)
