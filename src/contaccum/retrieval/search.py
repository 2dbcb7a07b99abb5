"""`search`: encoded queries and encoded passages in, a run file out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contaccum.common.errors import DataError
from contaccum.common.outputs import check_file, sole_path
from contaccum.data.readers.collections import read_collection_of
from contaccum.data.readers.files import shown
from contaccum.data.readers.queries import Query, read_queries
from contaccum.retrieval.runs import TAG, Hit, Run, read_run, write_dpr_results, write_run
from contaccum.retrieval.shards import AGAIN, Vectors

QUERIES_AT_ONCE = 16_384  # held with their results; more of them read the collection again

Finder = Callable[[NDArray[Any]], tuple[NDArray[np.float32], NDArray[np.int64]]]  # queries -> scores, rows; -1 where none was found


def search(
    vectors: str | Path,
    queries: str | Path,
    output: str | Path,
    *,
    k: int = 100,
    device: str | None = None,
    index: str | None = None,
    index_parameters: str = "",
    json_output: str | Path | None = None,
    collection: str | Path | None = None,
    query_texts: str | Path | None = None,
    split: str | None = None,
    match: str = "string",
    verify: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Find each query's best passages: exactly, unless an index is given. The vectors need not fit in memory.

    Args:
        vectors: encoded passages
        queries: encoded queries, of the same model
        output: TREC run file to write
        k: passages for each query
        device: cpu, cuda, ...; left out: a GPU if there is one
        index: search approximately in a faiss index, as IVF4096,PQ64 or HNSW32, which is kept in VECTORS
        index_parameters: settings of the search in it, as nprobe=64 or efSearch=128
        json_output: also write DPR's retriever output, with texts (.json)
        collection: passages for --json-output; left out: what was encoded
        query_texts: queries and answers for --json-output; left out: what was encoded
        split: split of --query-texts
        match: answers are string or regex (CuratedTREC)
        verify: compare the vectors with their checksums
    """
    import torch
    from tqdm import tqdm

    from contaccum.retrieval.exact import check_finite

    started = time.monotonic()
    _check(k, index, index_parameters, json_output)
    passages, asked = Vectors(vectors, verify), Vectors(queries, verify)
    check_same_model(passages, asked)
    _check_outputs(passages, asked, output, json_output)
    texts = None if json_output is None else _texts_of(passages, asked, collection, query_texts, split, match)
    total, hidden = len(passages) * -(-len(asked) // QUERIES_AT_ONCE), None if progress else True
    tag = f"{TAG}{passages.manifest.get('max_seq_length')}"
    with (
        tqdm(total=total, desc="searching", unit=" vectors", disable=hidden, dynamic_ncols=True) as bar,
        sole_path(output) as part,
    ):
        find = _finder(passages, k, device, index, index_parameters, bar.update)
        with open(part, "w", encoding="utf-8") as file:
            for start, block in asked.blocks(QUERIES_AT_ONCE):
                check_finite(torch.from_numpy(block), start, "query")
                ids = asked.ids_at(np.arange(start, start + len(block)))
                write_run(file, _as_run(passages, ids, *find(block)), tag)
        seconds = time.monotonic() - started
        if json_output is not None and texts is not None:
            write_dpr_results(json_output, read_run(part), *texts, match)  # both appear, or none
    return {
        "queries": len(asked),
        "passages": len(passages),
        "k": min(k, len(passages)),
        "exact": index is None,
        "seconds": seconds,
        "output": str(output),
    }


def _texts_of(
    passages: Vectors, asked: Vectors, collection: str | Path | None, query_texts: str | Path | None, split: str | None, match: str
) -> tuple[list[Query], str | Path]:
    """Queries and collection for the JSON output; what cannot be read is reported before the search."""
    from contaccum.data.answers import check_match

    check_match(match)
    collection = collection or _source(passages, "--collection")
    next(read_collection_of(collection))
    return read_queries(query_texts or _source(asked, "--query-texts"), split or asked.manifest.get("split")), collection


def _source(vectors: Vectors, option: str) -> str:
    """What was encoded."""
    source = vectors.manifest.get("source")
    if not isinstance(source, str):
        raise DataError(f"{vectors.folder} does not say what was encoded; give {option}")
    return source


def _check_outputs(passages: Vectors, asked: Vectors, output: str | Path, json_output: str | Path | None) -> None:
    folders = [passages.folder.resolve(), asked.folder.resolve()]
    for file, taken, option in ((output, [], "--output"), (json_output, [output], "--json-output")):
        check_file(file, taken, option)
        if file is not None and Path(file).resolve().parent in folders:
            raise ValueError(f"{file} lies among encoded vectors, whose files it might replace; use another {option}")


def check_same_model(passages: Vectors, queries: Vectors) -> None:
    """Vectors of different models cannot be compared."""
    for name in ("model_checksum", "dim", "normalized"):
        one, other = passages.manifest.get(name), queries.manifest.get(name)
        if one != other:
            raise DataError(f"{passages.folder} and {queries.folder} differ in {name} ({one} and {other}); encode both with one model")
    if (passages.manifest.get("task"), queries.manifest.get("task")) == ("query", "document"):
        raise DataError(f"{passages.folder} holds queries and {queries.folder} passages; give passages first, then queries")


def _finder(vectors: Vectors, k: int, device: str | None, index: str | None, parameters: str, advance: Callable[[int], object]) -> Finder:
    """What finds a block of queries' passages."""
    if index is not None:
        from contaccum.retrieval.index import index_search, open_index

        built = open_index(vectors, index, advance)
        return lambda block: index_search(built, block, k, parameters)
    from contaccum.retrieval.exact import exact_search

    return lambda block: exact_search(block, vectors, k, device, advance)


def _as_run(passages: Vectors, queries: NDArray[Any], scores: NDArray[np.float32], rows: NDArray[np.int64]) -> Run:
    """Per query its hits by falling score, equal ones by id."""
    run: Run = {}
    ids = passages.ids_at(np.maximum(rows, 0))
    for query, *found in zip(queries, scores, rows, ids, strict=True):
        hits = [Hit(key.decode(), float(score)) for score, row, key in zip(*found, strict=True) if row >= 0]
        if len({hit.id for hit in hits}) < len(hits):
            raise DataError(f"{passages.folder} holds a passage of query {shown(query.decode())} twice; {AGAIN}")
        run[query.decode()] = sorted(hits, key=lambda hit: (-hit.score, hit.id))
    return run


def _check(k: int, index: str | None, parameters: str, json_output: str | Path | None) -> None:
    if k < 1:
        raise ValueError(f"k={k} returns nothing; use 1 or more")
    if parameters and index is None:
        raise ValueError(f"index parameters {parameters!r} need an index of faiss; give one with --index")
    if json_output is not None and Path(json_output).suffix != ".json":
        raise ValueError(f"{json_output} must end in .json: that is how contaccum evaluate knows it")
