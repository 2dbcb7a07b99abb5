"""The command line: parse, build, call one function. Bad input gives one line and exit code 2."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.config import TrainConfig, load_config
from contaccum.errors import CheckpointError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Train dense retrievers under a memory budget."""


def main() -> None:
    """Entry point of the `contaccum` command."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # one bar at a time: ours
    try:
        app()
    except (ValueError, CheckpointError) as error:
        fail(str(error), 2)
    except Exception as error:
        message = " ".join(str(error).split())
        if "out of memory" in message.lower():
            fail(f"{message}; use a smaller --n-local, a smaller --max-seq-length or --gradient-checkpointing", 1)
        if any(word in message for word in ("Connection closed by peer", "Connection reset by peer", "NCCL", "gloo")):
            fail(f"another process of this run is gone ({message}); the run can go on with --resume", 1)
        raise


def fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def options_of(config: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of a dataclass; those not used arrive as None."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        kinds = {"str": str, "int": int, "float": float, "bool": bool}
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        generated = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    Optional[kinds[str(field.type).replace(" | None", "")]],  # noqa: UP045  (typer reads Optional)
                    typer.Option(help=field.metadata["help"] + _default(field.default), show_default=False),
                ],
            )
            for field in fields(config)
        ]
        command.__signature__ = inspect.Signature([*own, *generated])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *generated]}
        return command

    return decorate


def _default(value: Any) -> str:
    return "" if value in (None, "") else f" (default {value})"


@app.command("quickstart")
def quickstart(
    output: Annotated[Path, typer.Option(help="folder to write; a number is added where it exists")] = Path("runs/quickstart"),
    pairs: Annotated[int, typer.Option(help="docstring -> function pairs")] = 8000,
    epochs: Annotated[float, typer.Option(help="passes over them")] = 3.0,
    seed: Annotated[int, typer.Option(help="seed of weights, order and dropout")] = 42,
    json_: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Train and compare four methods on docstrings and functions of the installed packages: no network, no GPU, five minutes.

    Example: contaccum quickstart
    """
    from contaccum.quickstart import Settings, free_folder
    from contaccum.quickstart import quickstart as run_quickstart
    from contaccum.report.terminal import show

    folder = free_folder(output)
    settings = Settings(pairs=pairs, test=min(1000, pairs // 4), epochs=epochs, seed=seed)
    results = run_quickstart(folder, settings, say=lambda line: print(line, file=sys.stderr, flush=True))
    if json_:
        print(json.dumps([result.as_json() for result in results]))
    else:
        show(results)
        print(f"Page: {folder / 'report.html'}   Models: {folder / 'runs'}/*/model")


@app.command("train")
@options_of(TrainConfig)
def train(
    config: Annotated[Optional[Path], typer.Argument(help="YAML of fields; options override it")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --output")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
    **options: Any,
) -> None:
    """Train a retriever. Several processes: torchrun --nproc-per-node 2 -m contaccum train ...

    Example: contaccum train --data acl --model bert-base-uncased --n-total 128 --n-local 8 --bank 1024 --memory 11GB --output runs/first
    """
    from contaccum.train import train as run_training

    overrides = {name: value for name, value in options.items() if value is not None}
    if resume and config is None and "output" in overrides and (stored := Path(overrides["output"]) / "config.yaml").exists():
        config = stored
    summary = run_training(load_config(config, overrides), resume=resume)
    if os.environ.get("RANK", "0") != "0":
        return  # one process speaks for all
    if json_:
        print(json.dumps(summary))
    else:
        print(f"{summary['updates']:,} updates, {summary['samples_per_second']:.0f} samples/s, loss {summary['final_loss']:.4f}")


@app.command("prepare")
def prepare(
    output: Annotated[Path, typer.Option(help="folder to write; must not exist or be empty")],
    source: Annotated[Optional[str], typer.Argument(help="file, folder or name of a data set on the hub")] = None,  # noqa: UP045
    format: Annotated[str, typer.Option(help="auto, dpr, beir, msmarco or pairs")] = "auto",
    train: Annotated[Optional[Path], typer.Option(help="file of this split (dpr, pairs)")] = None,  # noqa: UP045
    dev: Annotated[Optional[Path], typer.Option(help="file of this split (dpr, pairs)")] = None,  # noqa: UP045
    test: Annotated[Optional[Path], typer.Option(help="file of this split (dpr, pairs)")] = None,  # noqa: UP045
    query_column: Annotated[str, typer.Option(help="column of the query (pairs)")] = "query",
    positive_column: Annotated[str, typer.Option(help="column of the relevant passage (pairs)")] = "positive",
    negative_column: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="column of hard negatives, repeatable (pairs; default: negative, negatives, negative_1, ...)"),
    ] = None,
    subset: Annotated[Optional[str], typer.Option(help="configuration of a data set on the hub (pairs)")] = None,  # noqa: UP045
    max_negatives: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="keep at most so many negatives a row (default: all; msmarco: 5)"),
    ] = None,
    require_negatives: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="drop records without a negative (dpr; default: yes, unless the whole file has none)"),
    ] = None,
    system: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="whose hard negatives, repeatable (msmarco; default: bm25)"),
    ] = None,
    margin: Annotated[float, typer.Option(help="a negative must score so far below the positive (msmarco)")] = 3.0,
    download: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="first fetch nq, trivia, webq, trec or msmarco into SOURCE (default: downloads/NAME)"),
    ] = None,
    passages: Annotated[bool, typer.Option("--passages", help="with --download: DPR's 21 million Wikipedia passages too")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Bring any data set into the one form that `mine` and `train` read, splits kept.

    Example: contaccum prepare my.csv --query-column question --positive-column answer --output sets/my

    Example: contaccum prepare --download nq --output sets/nq
    """
    from contaccum.data.download import download as fetch_files
    from contaccum.data.download import files_of
    from contaccum.data.pairs import Columns
    from contaccum.data.prepare import prepare as run_prepare
    from contaccum.data.prepare import require_free

    require_free(output)
    if download:
        source = source or f"downloads/{download}"
        fetch_files(files_of(download, passages), Path(source))
    summary = run_prepare(
        source,
        output,
        format,
        files={split: file for split, file in (("train", train), ("dev", dev), ("test", test)) if file},
        columns=Columns(query_column, positive_column, tuple(negative_column or ())),
        subset=subset,
        require_negatives=require_negatives,
        max_negatives=max_negatives,
        systems=tuple(system or ("bm25",)),
        margin=margin,
    )
    print(json.dumps(summary.as_dict(), ensure_ascii=False) if json_ else summary.table())


@app.command("mine")
def mine(
    data: Annotated[Path, typer.Argument(help="training set: a prepared folder, a BEIR folder or a .jsonl")],
    output: Annotated[Path, typer.Option(help="folder to write; must not exist or be empty")],
    collection: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="passages .tsv or .jsonl (also .gz, .xz) or a BEIR folder (default: DATA's own passages)"),
    ] = None,
    method: Annotated[str, typer.Option(help="bm25, dense (by --model) or given (check the negatives that DATA has)")] = "bm25",
    per_query: Annotated[int, typer.Option(help="negatives a row, at most")] = 10,
    depth: Annotated[int, typer.Option(help="best passages to choose them from")] = 100,
    match: Annotated[str, typer.Option(help="answers are string or regex (CuratedTREC)")] = "string",
    stopwords: Annotated[str, typer.Option(help="language whose stop words are not indexed, or none (bm25)")] = "en",
    split: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="split to mine, repeatable; others are carried over (default: train)"),
    ] = None,
    model: Annotated[Optional[str], typer.Option(help="trained model, folder or name (dense)")] = None,  # noqa: UP045
    range_min: Annotated[Optional[int], typer.Option(help="skip so many of the nearest (dense)")] = None,  # noqa: UP045
    absolute_margin: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="cosine at least so far below the positive's (dense)"),
    ] = None,
    relative_margin: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="the same as a share of the positive's, e.g. 0.05 (dense)"),
    ] = None,
    max_score: Annotated[Optional[float], typer.Option(help="cosine at most (dense)")] = None,  # noqa: UP045
    denoise: Annotated[Optional[str], typer.Option(help="cross-encoder, folder or name, that drops false negatives")] = None,  # noqa: UP045
    margin: Annotated[float, typer.Option(help="it must score a negative so far below the positive")] = 3.0,
    json_: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Find hard negatives: passages that look right, are no positive and contain no answer.

    Example: contaccum mine sets/nq --collection psgs_w100.tsv.gz --output sets/nq-bm25

    Example: contaccum mine sets/nq-bm25 --collection psgs_w100.tsv.gz --method dense --model runs/first/model --output sets/nq-dense
    """
    try:
        from contaccum.data.mine import mine as run_mine

        filters = {"range_min": range_min, "absolute_margin": absolute_margin, "relative_margin": relative_margin, "max_score": max_score}
        summary = run_mine(
            data,
            collection,
            output,
            method=method,
            splits=tuple(split or ("train",)),
            per_query=per_query,
            depth=depth,
            match=match,
            stopwords=None if stopwords == "none" else stopwords,
            model=model,
            filters={name: value for name, value in filters.items() if value is not None},
            cross_encoder=denoise,
            margin=margin,
        )
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'contaccum[mine]'") from error
    if json_:
        print(json.dumps(summary))
    else:
        none = summary["rows_without_negatives"]
        print(
            f"{summary['rows']:,} rows, {summary['negatives_per_row']:.1f} negatives each, {none:,} without, "
            f"{summary['passages']:,} passages, {summary['seconds']:.0f} s -> {output}"
        )


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

    if not top.replace(",", "").replace(" ", "").isdigit():
        raise ValueError(f"--top {top!r} must be whole numbers with commas between, as 20,100")
    result = run_evaluate(
        run,
        qrels=qrels,
        queries=queries,
        collection=collection,
        split=split,
        match=match,
        metrics=metrics.split(","),
        top=[int(number) for number in top.split(",")],
        compare=compare,
        output=output,
    )
    if json_:
        print(json.dumps(result))
        return
    print(f"{run}: {result['queries']:,} queries")
    for name, value in result["metrics"].items():
        told = result.get("comparison", {}).get(name)
        versus = (
            "" if told is None else f"   {told['difference']:+.4f} [{told['low']:+.4f}, {told['high']:+.4f}]  p = {told['p_value']:.2g}"
        )
        print(f"{name:<12}{value:8.4f}{versus}")
    if compare is not None:
        print(f"difference to {compare} with its 95% interval, paired t-test")
