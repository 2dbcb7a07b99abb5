"""`compare` and `quickstart`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from contaccum.cli.functions import command

if TYPE_CHECKING:
    from contaccum.comparison import Comparison


@command("contaccum.comparison.compare", "compare")
def show_comparison(found: Comparison, **_: Any) -> None:
    """Example: contaccum compare faq.csv --model sentence-transformers/all-MiniLM-L6-v2 --output runs/faq

    Example: contaccum compare pairs.parquet --model bert-base-uncased --memory 11GB --seeds 1,2,3 --output runs/pairs
    """
    from contaccum.report.terminal import show

    show(found.summary.rows)
    print(found.headline)
    for detail in found.details:
        print(f"- {detail}")
    if found.command:
        print(f"\nTo train {found.winner} on all rows:\n{found.command}")
    print(f"\nPage: {found.page}")
    if found.failed:
        print(f"error: failed: {', '.join(found.failed)}", file=sys.stderr)
        raise SystemExit(1)
