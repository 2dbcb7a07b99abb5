"""`prepare` and `mine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from contaccum.cli.base import app
from contaccum.cli.functions import command


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
    hold_out: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="share of the training rows to keep for a test split, as 0.1; OUTPUT/beir is then a folder to judge by"),
    ] = None,
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
    from contaccum.data.prepare import prepare as run_prepare
    from contaccum.data.prepare import require_free
    from contaccum.data.readers.csv_jsonl_parquet import Columns

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
        hold_out=hold_out,
    )
    print(json.dumps(summary.as_dict(), ensure_ascii=False) if json_ else summary.table())


@command("contaccum.data.mine", "mine")
def show_mined(summary: dict[str, Any], output: str, **_: Any) -> None:
    """Example: contaccum mine sets/nq --collection psgs_w100.tsv.gz --output sets/nq-bm25

    Example: contaccum mine sets/nq-bm25 --collection psgs_w100.tsv.gz --method dense --model runs/first/model --output sets/nq-dense
    """
    print(
        f"{summary['rows']:,} rows, {summary['negatives_per_row']:.1f} negatives each, {summary['rows_without_negatives']:,} without, "
        f"{summary['passages']:,} passages, {summary['seconds']:.0f} s -> {output}"
    )
