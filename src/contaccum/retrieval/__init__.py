"""From a model folder to numbers: encode, search, evaluate."""

from contaccum.retrieval.encode import encode
from contaccum.retrieval.evaluate import evaluate
from contaccum.retrieval.search import search

__all__ = ["encode", "evaluate", "search"]
