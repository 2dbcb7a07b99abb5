"""`encode`, `search` and `evaluate`."""

from __future__ import annotations

from typing import Any

from contaccum.cli.functions import command


@command("contaccum.retrieval.encode", "encode")
def show_encoded(summary: dict[str, Any], output: str, **_: Any) -> None:
    """Interrupted, the same command goes on. Several processes: torchrun --nproc-per-node 2 -m contaccum encode ...

    Example: contaccum encode runs/first/model psgs_w100.tsv.gz --output vectors/passages

    Example: contaccum encode runs/first/model sets/nq --queries --split test --output vectors/nq-test
    """
    if summary["complete"]:
        print(
            f"{summary['texts']:,} texts, {summary['encoded']:,} encoded by this process at {summary['texts_per_second']:,.0f} a second, "
            f"{summary['shards']} shards of {summary['dim']} dimensions -> {output}"
        )


@command("contaccum.retrieval.search", "search")
def show_found(summary: dict[str, Any], output: str, **_: Any) -> None:
    """Example: contaccum search vectors/passages vectors/nq-test --k 100 --output runs/first/nq-test.trec --json-output nq-test.json

    Example: contaccum search vectors/passages vectors/nq-test --index IVF4096,PQ64 --index-parameters nprobe=64 --output approximate.trec
    """
    kind = "exact" if summary["exact"] else "approximate"
    print(
        f"{summary['queries']:,} queries, the best {summary['k']:,} of {summary['passages']:,} passages ({kind}), "
        f"{summary['seconds']:.1f} s -> {output}"
    )


@command("contaccum.retrieval.evaluate", "evaluate")
def show_metrics(result: dict[str, Any], model: str | None = None, run: str | None = None, compare: str | None = None, **_: Any) -> None:
    """Example: contaccum evaluate runs/first/model scifact --output runs/first

    Example: contaccum evaluate --run first.trec --queries sets/nq --split test --collection psgs_w100.tsv.gz --top 20,100
    """
    print(f"{run or model}: {result['queries']:,} queries, in percent")
    for name, value in result["metrics"].items():
        difference = result.get("comparison", {}).get(name)
        change = [] if difference is None else [f"{100 * difference[part]:+.1f}" for part in ("difference", "low", "high")]
        versus = f"   {change[0]} [{change[1]}, {change[2]}]  p = {difference['p_value']:.2g}" if difference else ""
        print(f"{name:<12}{100 * value:8.1f}{versus}")
    if compare is not None:
        print(f"difference to {compare} with its 95% interval, paired t-test")
