"""`evaluate`: metrics of a model, which is encode, search and metrics in one, or of a run file that is there already."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contaccum.common.errors import DataError
from contaccum.common.outputs import remove_empty
from contaccum.data.readers.beir import is_beir, qrels_file, read_qrels
from contaccum.data.readers.collections import read_collection_of
from contaccum.data.readers.files import shown
from contaccum.retrieval.encode import encode
from contaccum.retrieval.metrics import DEFAULT
from contaccum.retrieval.run_metrics import TOP, check_judging, evaluate_run
from contaccum.retrieval.runs import read_run
from contaccum.retrieval.search import search
from contaccum.retrieval.shards import MANIFEST


def evaluate(
    model: Any = None,
    data: str | Path | None = None,
    *,
    run: str | Path | None = None,
    queries: str | Path | None = None,
    qrels: str | Path | None = None,
    collection: str | Path | None = None,
    split: str | None = None,
    match: str = "string",
    metrics: Sequence[str] = DEFAULT,
    top: Sequence[int] = TOP,
    k: int = 100,
    compare: str | Path | None = None,
    dtype: str = "float16",
    device: str | None = None,
    output: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Metrics of a model on a test set: encode, search exactly and score. Or, with --run, of a run file.

    Args:
        model: folder or name of a SentenceTransformer (in Python also the object)
        data: test set: a BEIR folder, a prepared folder, or a collection (passages .tsv or .jsonl) with --queries
        run: in place of model and data: TREC run file, or DPR's retriever output (.json)
        queries: test queries; left out: those of the BEIR folder, or in a .json run
        qrels: judgements, a qrels .tsv or a BEIR folder; left out: those of the BEIR folder, or answers decide
        collection: with --run: passages in which answers are looked up
        split: of queries and judgements in a folder; left out: test
        match: answers are string or regex (CuratedTREC)
        metrics: by judgements: NDCG, Recall, MRR, MAP, P at a rank (default NDCG@10,Recall@100,MRR@10,MAP@100)
        top: ranks of Top@k by answers (default 1,5,20,100)
        k: passages ranked for each query
        compare: another run file to compare with: difference, 95% interval, paired t-test, effect size
        dtype: of the vectors: float16 or float32
        device: cpu, cuda, cuda:1, ...; left out: a GPU where there is one
        output: of a model, the folder for test.trec and evaluation.json, such as its run folder; of a run, a JSON file

    Returns {"queries", "metrics": name -> mean, "per_query": name -> query -> value, "sources"}, and "comparison" with `compare`. Vectors
    are not kept.
    """
    by: dict[str, Any] = {"match": match, "metrics": metrics, "top": top, "compare": compare}
    if run is not None:
        if model is not None or data is not None:
            raise ValueError(f"{run} is a run, which is judged alone; leave out the model {model}, or --run")
        return evaluate_run(run, qrels=qrels, queries=queries, collection=collection, split=split, output=output, **by)
    if model is None or data is None:
        raise ValueError("give a model and a test set, or a run file with --run" + (f" {model}" if _is_file(model) else ""))
    if collection is not None:
        raise ValueError(f"with a model, DATA is the collection; give {collection} in its place and leave out --collection")
    test_set = _test_set(Path(data))
    if queries is None and is_beir(test_set):
        queries, qrels = test_set, qrels or test_set
    if queries is None:
        raise ValueError(f"{data} is no BEIR folder, which would have queries of its own; give --queries")
    split = split or ("test" if Path(queries).is_dir() else None)
    by |= {"queries": queries} if qrels is None else {"qrels": qrels}
    if qrels is not None:
        check_judgements(qrels_file(Path(qrels), split), test_set)  # whatever is wrong is reported before hours of encoding
    if compare is not None:
        read_run(compare)
    check_judging(metrics, top, match)
    with TemporaryDirectory(prefix="contaccum-") as scratch:
        folder = Path(scratch) if output is None else Path(output)
        _rank(model, test_set, queries, split, folder, k, dtype, {"device": device, "progress": progress})
        judged = None if output is None else folder / "evaluation.json"
        return evaluate_run(folder / "test.trec", collection=test_set, split=split, output=judged, **by)


def check_judgements(file: Path, collection: Path) -> None:
    """DataError where relevant passages are not in the collection: nothing could find them."""
    missing = {doc for grades in read_qrels(file).values() for doc, grade in grades.items() if grade > 0}
    if not missing:
        raise DataError(f"{file} judges no passage as relevant, so there is nothing to find; give other judgements")
    asked = len(missing)
    for key, _, _ in read_collection_of(collection):
        missing.discard(key)
    if missing:
        raise DataError(
            f"{collection} lacks {len(missing):,} of {asked:,} relevant passages, as {shown(min(missing))}; do they belong together?"
        )


def _is_file(model: Any) -> bool:
    return isinstance(model, (str, Path)) and Path(model).is_file()


def _test_set(data: Path) -> Path:
    """Of a prepared folder, the BEIR folder that `prepare --hold-out` and `compare` put into it."""
    return data / "beir" if is_beir(data / "beir") else data


def _rank(model: Any, collection: Path, queries: str | Path, split: str | None, folder: Path, k: int, dtype: str, where: Any) -> None:
    """folder/test.trec; the vectors go."""
    vectors = folder / "vectors"
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    for left in vectors.iterdir() if vectors.exists() else ():
        if not (left / MANIFEST).exists():  # of a process that was killed while it removed them
            shutil.rmtree(left)
    try:
        encode(model, queries, vectors / "queries", queries=True, split=split, dtype=dtype, **where)
        encode(model, collection, vectors / "passages", dtype=dtype, **where)
        found = folder / "test.trec"
        search(vectors / "passages", vectors / "queries", found, k=k, verify=False, **where)  # files that were written just now
    finally:
        shutil.rmtree(vectors, ignore_errors=True)
        remove_empty(made)
