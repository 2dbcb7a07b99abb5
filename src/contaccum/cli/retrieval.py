"""`encode`, `search` and `evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from contaccum.cli.base import app, whole_numbers


@app.command("encode")
def encode(
    model: Annotated[str, typer.Argument(help="trained model, folder or name")],
    texts: Annotated[
        Path, typer.Argument(help="collection: BEIR folder, passages .tsv or .jsonl (also .gz, .xz); with --queries, queries")
    ],
    output: Annotated[Path, typer.Option(help="folder of shards to write, or to go on with")],
    queries: Annotated[
        bool, typer.Option("--queries", help="the texts are queries: BEIR or prepared folder, .json, .jsonl, .csv, .tsv")
    ] = False,
    split: Annotated[Optional[str], typer.Option(help="queries of this split (BEIR and prepared folders)")] = None,  # noqa: UP045
    dtype: Annotated[str, typer.Option(help="of the stored vectors: float16 or float32")] = "float16",
    shard_size: Annotated[int, typer.Option(help="vectors a file; processes share the work by files")] = 100_000,
    max_seq_length: Annotated[Optional[int], typer.Option(help="tokens per text (default: the model's)")] = None,  # noqa: UP045
    tokens_per_batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="tokens that the model reads at once (default: 4096 on a CPU, 65536 on a GPU)"),
    ] = None,
    precision: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="of the computation: fp32, bf16 or fp16 (default: fp32 on a CPU, fp16 on a GPU)"),
    ] = None,
    device: Annotated[Optional[str], typer.Option(help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)")] = None,  # noqa: UP045
    token_cache: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="folder that keeps token ids, for encoding the same texts with the next checkpoint"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Turn texts into vectors on disk. Interrupted, the same command goes on. Several: torchrun --nproc-per-node 2 -m contaccum encode ...

    Example: contaccum encode runs/first/model psgs_w100.tsv.gz --output vectors/passages

    Example: contaccum encode runs/first/model sets/nq --queries --split test --output vectors/nq-test
    """
    from contaccum.retrieval import encode as run_encode

    summary = run_encode(
        model,
        texts,
        output,
        queries=queries,
        split=split,
        dtype=dtype,
        shard_size=shard_size,
        max_seq_length=max_seq_length,
        tokens_per_batch=tokens_per_batch,
        precision=precision,
        device=device,
        token_cache=token_cache,
    )
    if json_:
        print(json.dumps(summary))
    elif summary["complete"]:
        print(
            f"{summary['texts']:,} texts, {summary['encoded']:,} encoded by this process at {summary['texts_per_second']:,.0f} a second, "
            f"{summary['shards']} shards of {summary['dim']} dimensions -> {output}"
        )


@app.command("search")
def search(
    vectors: Annotated[Path, typer.Argument(help="encoded passages")],
    queries: Annotated[Path, typer.Argument(help="encoded queries")],
    output: Annotated[Path, typer.Option(help="TREC run file to write")],
    k: Annotated[int, typer.Option(help="passages a query")] = 100,
    backend: Annotated[str, typer.Option(help="of exact search: torch or faiss; results are the same")] = "torch",
    device: Annotated[Optional[str], typer.Option(help="of torch: cpu, cuda, ... (default: a GPU where there is one)")] = None,  # noqa: UP045
    index: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="approximate: faiss's index factory, as IVF4096,PQ64 or HNSW32; engine milvus: FLAT or HNSW"),
    ] = None,
    index_file: Annotated[Optional[Path], typer.Option(help="where the index is kept (default: in VECTORS)")] = None,  # noqa: UP045
    index_parameters: Annotated[str, typer.Option(help="of the search in it, as nprobe=64 or efSearch=128")] = "",
    engine: Annotated[str, typer.Option(help="local or milvus")] = "local",
    uri: Annotated[str, typer.Option(help="of Milvus: a file (Milvus Lite) or a cluster's address")] = "vectors.db",
    json_output: Annotated[Optional[Path], typer.Option(help="also write DPR's retriever output, with texts (.json)")] = None,  # noqa: UP045
    collection: Annotated[Optional[Path], typer.Option(help="its passages (default: what was encoded)")] = None,  # noqa: UP045
    query_texts: Annotated[Optional[Path], typer.Option(help="its queries and answers (default: what was encoded)")] = None,  # noqa: UP045
    split: Annotated[Optional[str], typer.Option(help="split of --query-texts")] = None,  # noqa: UP045
    match: Annotated[str, typer.Option(help="answers are string or regex (CuratedTREC)")] = "string",
    verify: Annotated[bool, typer.Option(help="compare the vectors with their checksums")] = True,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Find each query's best passages, exactly, streaming over vectors that need not fit in memory.

    Example: contaccum search vectors/passages vectors/nq-test --k 100 --output runs/first/nq-test.trec --json-output nq-test.json

    Example: contaccum search vectors/passages vectors/nq-test --index IVF4096,PQ64 --index-parameters nprobe=64 --output approximate.trec
    """
    from contaccum.retrieval import search as run_search

    summary = run_search(
        vectors,
        queries,
        output,
        k=k,
        backend=backend,
        device=device,
        index=index,
        index_file=index_file,
        index_parameters=index_parameters,
        engine=engine,
        uri=uri,
        json_output=json_output,
        collection=collection,
        query_texts=query_texts,
        split=split,
        match=match,
        verify=verify,
    )
    if json_:
        print(json.dumps(summary))
    else:
        kind = "exact" if summary["exact"] else "approximate"
        print(
            f"{summary['queries']:,} queries, the best {summary['k']:,} of {summary['passages']:,} passages ({kind}), "
            f"{summary['seconds']:.1f} s -> {output}"
        )


@app.command("evaluate")
def evaluate(
    run: Annotated[Path, typer.Argument(help="TREC run file, or DPR's retriever output (.json)")],
    qrels: Annotated[Optional[Path], typer.Option(help="judgements: a qrels .tsv or a BEIR folder")] = None,  # noqa: UP045
    queries: Annotated[Optional[Path], typer.Option(help="queries with answers, as for encode (default: those in a .json run)")] = None,  # noqa: UP045
    collection: Annotated[Optional[Path], typer.Option(help="passages in which answers are looked up")] = None,  # noqa: UP045
    split: Annotated[Optional[str], typer.Option(help="split of --qrels or --queries, where a folder (qrels: test)")] = None,  # noqa: UP045
    match: Annotated[str, typer.Option(help="answers are string or regex (CuratedTREC)")] = "string",
    metrics: Annotated[str, typer.Option(help="by qrels: NDCG, Recall, MRR, MAP, P at a rank")] = "NDCG@10,Recall@100,MRR@10,MAP@100",
    top: Annotated[str, typer.Option(help="ranks of Top@k by answers")] = "1,5,20,100",
    compare: Annotated[Optional[Path], typer.Option(help="another run: difference, paired t-test, effect, 95% interval")] = None,  # noqa: UP045
    output: Annotated[Optional[Path], typer.Option(help="JSON file to write, with a value per query")] = None,  # noqa: UP045
    json_: Annotated[bool, typer.Option("--json", help="print everything as JSON, a value per query too")] = False,
) -> None:
    """Judge a run by relevance judgements (NDCG, Recall, MRR, MAP) or by answers (Top@k as DPR computes it).

    Example: contaccum evaluate first.trec --queries sets/nq --split test --collection psgs_w100.tsv.gz --top 20,100

    Example: contaccum evaluate first.trec --qrels scifact --compare second.trec
    """
    from contaccum.retrieval import evaluate as run_evaluate

    result = run_evaluate(
        run,
        qrels=qrels,
        queries=queries,
        collection=collection,
        split=split,
        match=match,
        metrics=metrics.split(","),
        top=whole_numbers("--top", top, "20,100"),
        compare=compare,
        output=output,
    )
    if json_:
        print(json.dumps(result))
        return
    print(f"{run}: {result['queries']:,} queries, in percent")
    for name, value in result["metrics"].items():
        told = result.get("comparison", {}).get(name)
        change = [] if told is None else [f"{100 * told[part]:+.1f}" for part in ("difference", "low", "high")]
        versus = "" if told is None else f"   {change[0]} [{change[1]}, {change[2]}]  p = {told['p_value']:.2g}"
        print(f"{name:<12}{100 * value:8.1f}{versus}")
    if compare is not None:
        print(f"difference to {compare} with its 95% interval, paired t-test")
