"""Approximate search by an index of faiss's factory (`IVF4096,PQ64`, `HNSW32`, ...), built from the shards, saved and reloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from contaccum.common.errors import DataError
from contaccum.common.outputs import sole_path
from contaccum.retrieval.batches import ahead
from contaccum.retrieval.exact import check_finite
from contaccum.retrieval.shards import Vectors

BLOCK_ROWS = 65_536
TRAINING_ROWS = 400_000  # IVF4096 asks for at least 39 vectors a cell


def open_index(vectors: Vectors, factory: str, advance: Callable[[int], object] = lambda vectors: None) -> Any:
    """The index of these vectors: read from their folder, or built and written there under the checksum of what it holds."""
    faiss, file = _faiss(), vectors.folder / f"{factory.replace(',', '_')}-{vectors.checksum[:16]}.faiss"
    if file.exists():
        try:
            return faiss.read_index(str(file))
        except RuntimeError as error:
            raise DataError(f"{file} cannot be read ({_reason(error)}); remove it, and it is built again") from error
    with sole_path(file) as part:
        index = _build(vectors, factory, advance)
        faiss.write_index(index, str(part))
    return index


def index_search(index: Any, queries: NDArray[Any], k: int, parameters: str = "") -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(scores, rows), each (queries, k), best first; rows are -1 where the index found fewer. `parameters` as faiss's `nprobe=64`."""
    if parameters:
        try:
            _faiss().ParameterSpace().set_index_parameters(index, parameters)
        except RuntimeError as error:
            raise ValueError(f"index parameters {parameters!r} do not fit this index: {_reason(error)}") from error
    scores, rows = index.search(np.ascontiguousarray(queries, np.float32), min(k, index.ntotal))
    return scores, rows


def _build(vectors: Vectors, factory: str, advance: Callable[[int], object]) -> Any:
    faiss = _faiss()
    try:
        index = faiss.index_factory(vectors.dim, factory, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(_sample(vectors, TRAINING_ROWS))
        for start, block in ahead(vectors.blocks(BLOCK_ROWS)):
            check_finite(torch.from_numpy(block), start)
            index.add(block.astype(np.float32))
            advance(len(block))
    except RuntimeError as error:
        raise ValueError(f"faiss cannot build {factory!r} from {len(vectors):,} vectors of {vectors.dim}: {_reason(error)}") from error
    return index


def _sample(vectors: Vectors, rows: int) -> NDArray[np.float32]:
    """About `rows` vectors, evenly spaced over the collection: the same each time."""
    step = max(1, -(-len(vectors) // rows))
    parts = [
        np.asarray(array[-int(start) % step :: step], np.float32) for array, start in zip(vectors.arrays(), vectors.starts, strict=False)
    ]
    return np.concatenate(parts)


def _reason(error: Exception) -> str:
    """faiss's messages say where they come from in C++; the end says why."""
    return " ".join(str(error).split()).rsplit("failed: ", 1)[-1][:200]


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise ValueError("faiss is not installed; pip install 'contaccum[search]'") from error
    return faiss
