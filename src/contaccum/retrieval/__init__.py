"""From a model folder to numbers: encode, search, evaluate, or all three as `judge`."""

from contaccum.retrieval.encode import encode
from contaccum.retrieval.evaluate import evaluate
from contaccum.retrieval.judge import judge
from contaccum.retrieval.search import search

__all__ = ["encode", "evaluate", "judge", "search"]
