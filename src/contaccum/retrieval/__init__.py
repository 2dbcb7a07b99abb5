"""From a model folder to numbers: encode, search, and evaluate, which does all three where it is given a model."""

from contaccum.retrieval.encode import encode
from contaccum.retrieval.evaluate import evaluate
from contaccum.retrieval.search import search

__all__ = ["encode", "evaluate", "search"]
