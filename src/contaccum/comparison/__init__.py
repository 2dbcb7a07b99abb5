"""From a table to a verdict: the same data, budget and judgement for several methods, and one page that says which to use."""

from contaccum.comparison.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
