"""NDCG, Recall, MRR, MAP and precision from relevance judgements, per query.

The values are trec_eval's own, by pytrec-eval (maintained as pytrec-eval-terrier), which runs its C code. ranx reimplements the measures
in numba, which compiles at the first call and holds numpy back; ir-measures is a layer over pytrec-eval, but computes MRR@k elsewhere,
with another order of equal scores. As in trec_eval, a run is ordered by score, and equal scores by falling passage id; a judged query
without results counts as 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contaccum.common.errors import DataError
from contaccum.data.readers.files import shown
from contaccum.retrieval.runs import Run

DEFAULT = ("NDCG@10", "Recall@100", "MRR@10", "MAP@100")
# Our name -> (as it is shown, trec_eval's name with a cut-off, and without one; None: there is none).
MEASURES = {
    "ndcg": ("NDCG", "ndcg_cut", "ndcg"),
    "recall": ("Recall", "recall", None),
    "mrr": ("MRR", None, "recip_rank"),
    "map": ("MAP", "map_cut", "map"),
    "p": ("P", "P", None),
}

PerQuery = dict[str, dict[str, float]]  # metric -> query -> value


class Measure(NamedTuple):
    shown: str  # "MRR@10"
    asked: str  # of trec_eval: "recip_rank", "ndcg_cut.10"
    at: int | None  # cut-off that trec_eval does not know: MRR's

    def value(self, found: Mapping[str, float]) -> float:
        value = float(found[self.asked.replace(".", "_")])
        # The first relevant passage stands at rank 1 / value.
        return value if self.at is None or value * (self.at + 0.5) > 1 else 0.0


def judged_metrics(run: Run, qrels: Mapping[str, Mapping[str, int]], names: Sequence[str] = DEFAULT) -> PerQuery:
    """metric -> query -> value for every judged query; means over them are what papers report."""
    measures = [_parse(name) for name in names]
    if not qrels:
        raise ValueError("no query is judged; give qrels with at least one judgement")
    if not any(query in run for query in qrels):
        raise DataError(f"the run has none of the judged queries, such as {shown(next(iter(qrels)))}; do they belong together?")
    judge = _pytrec_eval().RelevanceEvaluator({query: dict(grades) for query, grades in qrels.items()}, {m.asked for m in measures})
    found = judge.evaluate({query: {hit.id: hit.score for hit in run[query]} for query in qrels if run.get(query)})
    return {m.shown: {query: m.value(found[query]) if query in found else 0.0 for query in qrels} for m in measures}


def check_metrics(names: Sequence[str]) -> None:
    """ValueError for one that is unknown."""
    for name in names:
        _parse(name)


def _parse(name: str) -> Measure:
    match = re.fullmatch(r"([a-z]+)(?:@([1-9]\d{0,8}))?", name.strip().lower())
    shown, cut, whole = MEASURES.get(match[1], ("", None, None)) if match else ("", None, None)
    at = match[2] if match else None
    if at is None and whole is not None:
        return Measure(shown, whole, None)
    if at is not None and cut is not None:
        return Measure(f"{shown}@{at}", f"{cut}.{at}", None)
    if at is not None and whole is not None:
        return Measure(f"{shown}@{at}", whole, int(at))
    raise ValueError(f"metric {name!r} is unknown; use {', '.join(f'{shown}@10' for shown, _, _ in MEASURES.values())}")


def _pytrec_eval() -> Any:
    try:
        import pytrec_eval
    except ModuleNotFoundError as error:
        raise ValueError("pytrec_eval is not installed; pip install 'contaccum[search]'") from error
    return pytrec_eval
