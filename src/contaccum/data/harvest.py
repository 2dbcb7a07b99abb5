"""Real text that every machine has: docstring -> source of the functions in the installed Python packages.

Files are parsed with `ast`, never imported or run. A pair is the first sentence of a function's docstring and the function's source
without its docstring. Pairs are split by function, not by package: an environment is dominated by a few large packages, and leaving
whole ones out would make the test set a lottery over which.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contaccum.common.errors import DataError
from contaccum.common.outputs import write_jsonl, write_text

MIN_WORDS, MAX_WORDS = 3, 40  # of a query
MIN_LINES = 2  # of a function's body
MAX_CHARACTERS = 1500  # of a passage
MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True)
class Pair:
    query: str
    passage: str
    place: str  # package/module.py:function


def site_packages() -> list[Path]:
    return sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def harvest(folders: list[Path] | None = None, limit: int | None = None) -> list[Pair]:
    """Pairs in an order that depends on the files' names alone; no query and no passage appears twice.

    With `limit`, files are read only until there are so many.
    """
    seen: set[bytes] = set()
    pairs: list[Pair] = []
    for name, file in _files(site_packages() if folders is None else folders):
        for pair in _pairs_of(file, name):
            keys = {_digest(pair.query.lower()), _digest(pair.passage)}
            if not keys & seen:
                seen |= keys
                pairs.append(pair)
        if limit is not None and len(pairs) >= limit:
            return pairs[:limit]
    if not pairs:
        raise DataError("no Python function with a docstring was found in the installed packages; install some or bring your own data")
    return pairs


def write_beir(pairs: list[Pair], folder: Path, test: int, dev: int = 0, start: int = 0) -> None:
    """A BEIR folder: all passages as the collection; queries of the splits test, dev, start and, what is left, train, chosen by hash."""
    if len(pairs) < 2 * (test + dev):
        raise DataError(f"{len(pairs)} pairs are too few for {test} test and {dev} dev queries; ask for fewer")
    order = sorted(range(len(pairs)), key=lambda i: _digest(pairs[i].query + "\0" + pairs[i].passage))
    first = test + dev
    splits = {"test": order[:test], "dev": order[test:first], "start": order[first : first + start], "train": order[first + start :]}
    splits = {split: members if split in ("test", "dev") else sorted(members) for split, members in splits.items()}
    write_jsonl(folder / "corpus.jsonl", ({"_id": f"d{i}", "title": "", "text": pair.passage} for i, pair in enumerate(pairs)))
    write_jsonl(folder / "queries.jsonl", ({"_id": f"q{i}", "text": pair.query} for i, pair in enumerate(pairs)))
    for split, members in splits.items():
        if members:
            lines = "".join(f"q{i}\td{i}\t1\n" for i in members)
            write_text(folder / "qrels" / f"{split}.tsv", "query-id\tcorpus-id\tscore\n" + lines)


def _files(folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """(name, file), ordered by a hash of the name: a part of them is a sample of all packages."""
    found = {str(file.relative_to(folder)): file for folder in folders for file in folder.rglob("*.py")}
    yield from sorted(found.items(), key=lambda item: _digest(item[0]))


def _pairs_of(file: Path, name: str) -> Iterator[Pair]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            return
        source = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # others' invalid escape sequences
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # templates and other languages' files are found among packages; they are not ours to judge
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (query := _first_sentence(ast.get_docstring(node))):
            passage = _source_without_docstring(node, lines)
            if passage is not None:
                yield Pair(query, passage, f"{name}:{node.name}")


def _first_sentence(docstring: str | None) -> str | None:
    paragraph = (docstring or "").strip().split("\n\n")[0]
    sentence = re.split(r"(?<=[.!?])\s", " ".join(paragraph.split()))[0]
    words = sentence.split()
    return sentence if MIN_WORDS <= len(words) <= MAX_WORDS and sentence[0].isalpha() else None


def _source_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str | None:
    docstring, body = node.body[0], node.body[1:]
    if not body or docstring.end_lineno is None or node.end_lineno is None or node.end_lineno - docstring.end_lineno < MIN_LINES:
        return None
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in kept)[:MAX_CHARACTERS]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
