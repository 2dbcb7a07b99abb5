"""`prepare` and `mine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from contaccum.cli.functions import command

if TYPE_CHECKING:
    from contaccum.data.prepared import PrepareSummary


@command("contaccum.data.prepare", "prepare")
def show_prepared(summary: PrepareSummary, **_: Any) -> None:
    """Example: contaccum prepare my.csv --query-column question --positive-column answer --output sets/my

    Example: contaccum prepare --download nq --output sets/nq

    Example: contaccum prepare psgs_w100.tsv.gz --unsupervised crops --output sets/crops
    """
    print(summary.table())


@command("contaccum.data.mine", "mine")
def show_mined(summary: dict[str, Any], output: str, **_: Any) -> None:
    """Example: contaccum mine sets/nq --collection psgs_w100.tsv.gz --output sets/nq-bm25

    Example: contaccum mine sets/nq-bm25 --collection psgs_w100.tsv.gz --method dense --model runs/first/model --output sets/nq-dense
    """
    print(
        f"{summary['rows']:,} rows, {summary['negatives_per_row']:.1f} negatives each, {summary['rows_without_negatives']:,} without, "
        f"{summary['passages']:,} passages, {summary['seconds']:.0f} s -> {output}"
    )
