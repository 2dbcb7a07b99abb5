"""`judge`: a model and a test set in, a run file and an evaluation out. Encode, search exactly, evaluate."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contaccum.data.readers.beir import is_beir
from contaccum.retrieval.encode import encode
from contaccum.retrieval.evaluate import TOP, evaluate
from contaccum.retrieval.metrics import DEFAULT
from contaccum.retrieval.search import search


def judge(
    model: Any,
    collection: str | Path,
    output: str | Path,
    *,
    queries: str | Path | None = None,
    qrels: str | Path | None = None,
    split: str | None = None,
    match: str = "string",
    metrics: Sequence[str] = DEFAULT,
    top: Sequence[int] = TOP,
    k: int = 100,
    dtype: str = "float16",
    device: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Encode, search exactly and evaluate in one step. Vectors are not kept.

    A BEIR folder is a whole test set. Other collections need queries, with answers or with judgements (`qrels`).

    Args:
        model: trained model, folder or name (in Python also the object)
        collection: BEIR folder, passages .tsv or .jsonl (also .gz, .xz)
        output: folder for test.trec and evaluation.json, such as the run folder of the model
        queries: test queries; left out: those of the BEIR folder
        qrels: judgements, a qrels .tsv or a BEIR folder; left out: those of the BEIR folder, or answers decide
        split: of queries and judgements in a folder; left out: test
        match: answers are string or regex (CuratedTREC)
        metrics: by judgements: NDCG, Recall, MRR, MAP, P at a rank (default NDCG@10,Recall@100,MRR@10,MAP@100)
        top: ranks of Top@k by answers (default 1,5,20,100)
        k: passages ranked for each query
        dtype: of the vectors: float16 or float32
        device: cpu, cuda, cuda:1, ...; left out: a GPU if there is one
    """
    if queries is None and is_beir(Path(collection)):
        queries, qrels = collection, qrels or collection
    if queries is None:
        raise ValueError(f"{collection} is no BEIR folder, which would have queries of its own; give --queries")
    split = split or ("test" if Path(queries).is_dir() else None)
    vectors, found = Path(output) / "vectors", Path(output) / "test.trec"
    where: dict[str, Any] = {"device": device, "progress": progress}
    try:
        encode(model, collection, vectors / "passages", dtype=dtype, **where)
        encode(model, queries, vectors / "queries", queries=True, split=split, dtype=dtype, **where)
        search(vectors / "passages", vectors / "queries", found, k=k, verify=False, **where)  # files that were written just now
    finally:
        shutil.rmtree(vectors, ignore_errors=True)
    by: dict[str, Any] = {"queries": queries, "match": match, "top": top} if qrels is None else {"qrels": qrels, "metrics": metrics}
    return evaluate(found, collection=collection, split=split, output=Path(output) / "evaluation.json", **by)
