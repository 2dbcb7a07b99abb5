"""Two runs over the same queries: difference, paired test, effect size and confidence interval of one metric."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

CONFIDENCE = 0.95


def paired_comparison(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, Any]:
    """How much higher `first` is than `second`, over the queries' values, which are paired by query.

    `p_value`: two-sided paired t-test. `low`, `high`: the 95 % confidence interval of the mean difference by the same t distribution.
    `effect_size`: Cohen's d of the differences, mean over standard deviation. `wins`, `losses`: queries where one is higher. Without
    any spread among the differences the interval is the mean itself, and p is 1 where that is 0, else 0, the effect undefined (None).
    """
    if set(first) != set(second):
        odd = sorted(set(first) ^ set(second))[0]
        raise ValueError(f"the runs are judged on different queries (one lacks {odd!r}); evaluate both on the same")
    if len(first) < 2:
        raise ValueError(f"{len(first)} query cannot be compared; a paired test needs two or more")
    from scipy import stats

    differences = [first[query] - second[query] for query in first]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    found = {"queries": len(first), "difference": mean, "wins": sum(d > 0 for d in differences), "losses": sum(d < 0 for d in differences)}
    if deviation <= 1e-12 * abs(mean) or deviation == 0:
        return {**found, "low": mean, "high": mean, "p_value": 0.0 if mean else 1.0, "effect_size": None if mean else 0.0}
    test = stats.ttest_1samp(differences, 0)
    low, high = map(float, test.confidence_interval(CONFIDENCE))
    return {**found, "low": low, "high": high, "p_value": float(test.pvalue), "effect_size": mean / deviation}
