"""Search in Milvus: the shards go into a collection of a Milvus Lite file, or of a cluster by its URI, and are searched there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contaccum.retrieval.shards import Vectors

INDICES = ("FLAT", "HNSW")
BUILD = {"FLAT": {}, "HNSW": {"M": 32, "efConstruction": 200}}
ROWS_AT_ONCE, QUERIES_AT_ONCE = 1000, 100  # a request of Milvus holds 64 MB
MAX_ID_BYTES, MAX_K = 65_535, 16_384  # limits of Milvus


class MilvusCollection:
    """The vectors in Milvus, under the key `id`; loaded once, found again by their checksum.

    With "FLAT" its results are those of exact search, but equal scores stand in any order.
    """

    def __init__(self, vectors: Vectors, uri: str, index: str = "FLAT", advance: Callable[[int], None] = lambda vectors: None) -> None:
        if index not in INDICES:
            raise ValueError(f"index={index!r} is unknown to the milvus engine; choose one of {', '.join(INDICES)}")
        self.name, self.index = f"contaccum_{vectors.checksum[:16]}_{index.lower()}", index
        self.client = _client(uri)
        if self._count() != len(vectors):
            self._fill(vectors, advance)
        self.client.load_collection(self.name)

    def search(self, queries: NDArray[Any], k: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """(scores, ids as bytes), each (queries, k), best first; an id is empty where fewer were found."""
        if k > MAX_K:
            raise ValueError(f"k={k} is more than Milvus returns; use at most {MAX_K}")
        found = [
            hits for begin in range(0, len(queries), QUERIES_AT_ONCE) for hits in self._ask(queries[begin : begin + QUERIES_AT_ONCE], k)
        ]
        width = max((len(hits) for hits in found), default=0)
        scores, ids = np.full((len(found), width), -np.inf, np.float32), np.full((len(found), width), b"", dtype=object)
        for row, hits in enumerate(found):
            scores[row, : len(hits)] = [hit["distance"] for hit in hits]
            ids[row, : len(hits)] = [str(hit["id"]).encode() for hit in hits]
        return scores, ids

    def close(self) -> None:
        self.client.close()

    def _ask(self, queries: NDArray[Any], k: int) -> Any:
        parameters = {"metric_type": "IP", "params": {"ef": max(2 * k, 128)} if self.index == "HNSW" else {}}
        asked = queries.astype(np.float32).tolist()
        return self.client.search(self.name, data=asked, limit=k, anns_field="vector", search_params=parameters)

    def _count(self) -> int | None:
        """Vectors in the collection; None where there is no collection."""
        if not self.client.has_collection(self.name):
            return None
        return int(self.client.get_collection_stats(self.name)["row_count"])

    def _fill(self, vectors: Vectors, advance: Callable[[int], None]) -> None:
        """From nothing: what an interrupted load left is dropped."""
        from pymilvus import DataType

        if self.client.has_collection(self.name):
            self.client.drop_collection(self.name)
        schema = self.client.create_schema(auto_id=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=MAX_ID_BYTES)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=vectors.dim)
        indices = self.client.prepare_index_params()
        indices.add_index("vector", index_type=self.index, metric_type="IP", params=BUILD[self.index])
        self.client.create_collection(self.name, schema=schema, index_params=indices)
        for start, block in vectors.blocks(ROWS_AT_ONCE):
            ids = vectors.ids_at(np.arange(start, start + len(block)))
            rows = [{"id": key.decode(), "vector": vector} for key, vector in zip(ids, block.astype(np.float32), strict=True)]
            self.client.insert(self.name, rows)
            advance(len(block))
        self.client.flush(self.name)


def _client(uri: str) -> Any:
    try:
        from pymilvus import MilvusClient
    except ModuleNotFoundError as error:
        raise ValueError("pymilvus is not installed; pip install 'contaccum[milvus]'") from error
    from pymilvus.exceptions import MilvusException

    try:
        return MilvusClient(uri)
    except MilvusException as error:
        raise ValueError(f"no Milvus answers at {uri} ({error.message}); give a file name for Milvus Lite or a cluster's URI") from error
