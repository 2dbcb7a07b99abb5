"""BEIR folders: `corpus.jsonl`, `queries.jsonl`, `qrels/SPLIT.tsv`, each plain, .gz or .xz."""

from __future__ import annotations

from pathlib import Path

from contaccum.data.files import find, open_text, read_jsonl, text_field
from contaccum.errors import DataError


def is_beir(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("corpus.jsonl*"))


def read_texts(path: Path) -> dict[str, str]:
    """id -> text of a corpus or queries file; a title stands before its text, as BEIR joins them."""
    texts: dict[str, str] = {}
    for line, record in read_jsonl(path):
        key = text_field(record, "_id", path, line)
        if key in texts:
            raise DataError(f"{path}, line {line}: the id {key!r} stands there a second time")
        title = record.get("title") or ""
        texts[key] = f"{title} {text_field(record, 'text', path, line)}".strip()
    if not texts:
        raise DataError(f"{path} is empty")
    return texts


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """query id -> document id -> judgement."""
    qrels: dict[str, dict[str, int]] = {}
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.startswith("query-id"):
                continue
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 3 or not fields[2].lstrip("-").isdigit():
                raise DataError(f"{path}, line {number}: query-id, corpus-id and a whole number are needed, tab-separated")
            qrels.setdefault(fields[0], {})[fields[1]] = int(fields[2])
    if not qrels:
        raise DataError(f"{path} is empty")
    return qrels


def read_pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    """(query, relevant passage) for every positive judgement of a split, in the file's order."""
    qrels_path = find(folder / "qrels", f"{split}.tsv")
    queries, corpus = read_texts(find(folder, "queries.jsonl")), read_texts(find(folder, "corpus.jsonl"))
    pairs = []
    for query_id, judged in read_qrels(qrels_path).items():
        for document_id, score in judged.items():
            if query_id not in queries:
                raise DataError(f"{qrels_path} names the query {query_id!r}, which queries.jsonl does not hold")
            if document_id not in corpus:
                raise DataError(f"{qrels_path} names the document {document_id!r}, which corpus.jsonl does not hold")
            if score > 0:
                pairs.append((queries[query_id], corpus[document_id]))
    return pairs
