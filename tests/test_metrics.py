"""Metrics: equal to trec_eval's; comparisons equal scipy's paired t-test; Top@k by answers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from scipy import stats

pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.cli import app
from contaccum.common.errors import DataError
from contaccum.common.outputs import whole_file
from contaccum.retrieval.compare import paired_comparison
from contaccum.retrieval.metrics import judged_metrics
from contaccum.retrieval.run_metrics import evaluate_run
from contaccum.retrieval.runs import Hit, Run, write_run

Qrels = dict[str, dict[str, int]]


def graded(seed: int = 0, queries: int = 60, documents: int = 400) -> tuple[Run, Qrels]:
    """Like Cranfield: few judged documents a query, grades 0 to 4 and some -1, a run with unjudged documents and tied scores."""
    rng, run, qrels = random.Random(seed), {}, {}
    for query in range(queries):
        judged = rng.sample(range(documents), rng.randint(1, 25))
        qrels[f"q{query}"] = {f"d{document}": rng.choice([-1, 0, 0, 1, 1, 2, 3, 4]) for document in judged}
        found = set(rng.sample(range(documents), rng.randint(5, 200))) | set(rng.sample(judged, len(judged) // 2))
        scored = sorted(((round(rng.gauss(0, 1), 1), f"d{document}") for document in found), reverse=True)
        run[f"q{query}"] = [Hit(key, score) for score, key in scored]
    del run["q3"]  # judged, but without results: counts as 0
    run["unjudged"] = [Hit("d1", 1.0)]
    return run, qrels


def trec_eval(run: Run, qrels: Qrels, cutoff: int | None = None) -> dict[str, dict[str, float]]:
    """pytrec_eval itself; with a cut-off, of the first hits in its order: by falling score, equal ones by falling id."""
    import pytrec_eval

    cut = {query: sorted(hits, key=lambda hit: (hit.score, hit.id), reverse=True)[:cutoff] for query, hits in run.items()}
    names = {"ndcg_cut.1,5,10,100", "recall.5,10,100", "map_cut.10,100", "recip_rank", "map", "ndcg", "P.5,10"}
    judge = pytrec_eval.RelevanceEvaluator(qrels, names)
    found = judge.evaluate({query: {hit.id: hit.score for hit in hits} for query, hits in cut.items() if query in qrels})
    return {query: found.get(query) or {} for query in qrels}


PAIRS = {
    "NDCG@1": "ndcg_cut_1",
    "NDCG@5": "ndcg_cut_5",
    "NDCG@10": "ndcg_cut_10",
    "NDCG@100": "ndcg_cut_100",
    "NDCG": "ndcg",
    "Recall@5": "recall_5",
    "Recall@10": "recall_10",
    "Recall@100": "recall_100",
    "MAP@10": "map_cut_10",
    "MAP@100": "map_cut_100",
    "MAP": "map",
    "MRR": "recip_rank",
    "P@10": "P_10",
}


@pytest.mark.parametrize("seed", range(3))
def test_every_value_equals_pytrec_evals(seed: int) -> None:
    run, qrels = graded(seed)
    found, wanted = judged_metrics(run, qrels, list(PAIRS)), trec_eval(run, qrels)
    for ours, theirs in PAIRS.items():
        assert set(found[ours]) == set(qrels)
        for query in qrels:
            assert found[ours][query] == pytest.approx(wanted[query].get(theirs, 0.0), abs=1e-6), (ours, query)
        assert 0 < sum(found[ours].values()) < len(qrels)


@pytest.mark.parametrize("cutoff", [1, 5, 10])
def test_mrr_at_k_is_the_reciprocal_rank_within_the_first_k(cutoff: int) -> None:
    run, qrels = graded(4)
    found, wanted = judged_metrics(run, qrels, [f"mrr@{cutoff}"])[f"MRR@{cutoff}"], trec_eval(run, qrels, cutoff)
    assert all(found[query] == pytest.approx(wanted[query].get("recip_rank", 0.0), abs=1e-6) for query in qrels)


def test_ndcg_of_a_small_case_by_hand() -> None:
    run = {"q": [Hit("a", 3.0), Hit("b", 2.0), Hit("c", 1.0)]}
    found = judged_metrics(run, {"q": {"a": 1, "c": 3}}, ["NDCG@10"])["NDCG@10"]["q"]
    assert found == pytest.approx((1 + 3 / math.log2(4)) / (3 + 1 / math.log2(3)))


def test_a_run_of_other_queries_is_refused() -> None:
    with pytest.raises(DataError, match="the run has none of the judged queries, such as 'q'; do they belong together"):
        judged_metrics({"other": [Hit("a", 1.0)]}, {"q": {"a": 1}})


def test_an_evaluation_does_not_replace_what_it_reads(tmp_path) -> None:
    (tmp_path / "run.trec").write_text("q Q0 a 1 1.0 t\n")
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")
    for name in ("run.trec", "qrels.tsv"):
        with pytest.raises(ValueError, match="is also read or written here and would be replaced; use another --output"):
            evaluate_run(tmp_path / "run.trec", qrels=tmp_path / "qrels.tsv", output=tmp_path / name)
    assert evaluate_run(tmp_path / "run.trec", qrels=tmp_path / "qrels.tsv", output=tmp_path / "out.json")["metrics"]["NDCG@10"] == 1.0


@pytest.mark.parametrize("name", ["NDCG@0", "NDCG@99999999999999999999", "recall", "quality@10", "NDCG@x", ""])
def test_unknown_metrics_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is unknown; use NDCG@10"):
        judged_metrics(*graded(), [name])


def test_comparison_equals_the_paired_t_test() -> None:
    rng = random.Random(0)
    first = {str(i): rng.random() for i in range(50)}
    second = {key: value + rng.gauss(-0.05, 0.2) for key, value in first.items()}
    outcome = paired_comparison(first, dict(reversed(second.items())))
    test = stats.ttest_rel([first[key] for key in first], [second[key] for key in first])
    assert outcome["p_value"] == pytest.approx(test.pvalue, rel=1e-9)
    assert (outcome["low"], outcome["high"]) == pytest.approx(tuple(test.confidence_interval(0.95)), rel=1e-9)
    assert outcome["effect_size"] == pytest.approx(test.statistic / math.sqrt(50))
    assert outcome["wins"] + outcome["losses"] == 50
    assert outcome["difference"] > 0


def test_comparison_is_antisymmetric_and_knows_equal_runs() -> None:
    first, second = {"a": 0.1, "b": 0.9, "c": 0.5}, {"a": 0.3, "b": 0.2, "c": 0.5}
    there, back = paired_comparison(first, second), paired_comparison(second, first)
    assert there["difference"] == pytest.approx(-back["difference"])
    assert there["p_value"] == pytest.approx(back["p_value"])
    same = paired_comparison(first, first)
    assert (same["p_value"], same["effect_size"], same["low"], same["high"]) == (1.0, 0.0, 0.0, 0.0)


def test_comparison_needs_the_same_queries() -> None:
    with pytest.raises(ValueError, match="different queries"):
        paired_comparison({"a": 1.0, "b": 0.0}, {"a": 1.0, "c": 0.0})


def write(path: Path, run: Run) -> Path:
    with whole_file(path) as file:
        write_run(file, run)
    return path


def answers_case(folder: Path) -> tuple[Path, Path, Path]:
    (folder / "passages.tsv").write_text("id\ttext\ttitle\n1\tIt is Paris.\tx\n2\tRome\tParis\n3\tBerlin 1999\tx\n")
    lines = [{"_id": "a", "text": "q?", "answers": ["paris"]}, {"_id": "b", "text": "q?", "answers": ["199."]}]
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = {"a": [Hit("2", 2.0), Hit("1", 1.0)], "b": [Hit("3", 2.0), Hit("2", 1.0)]}
    return write(folder / "run.trec", run), folder / "queries.jsonl", folder / "passages.tsv"


def test_top_k_by_answers_reads_texts_without_titles(tmp_path: Path) -> None:
    run, queries, passages = answers_case(tmp_path)
    result = evaluate_run(run, queries=queries, collection=passages, top=[1, 2], output=tmp_path / "m.json")
    assert result["per_query"] == {"Top@1": {"a": 0.0, "b": 0.0}, "Top@2": {"a": 1.0, "b": 0.0}}  # the title "Paris" does not count
    assert result["metrics"] == {"Top@1": 0.0, "Top@2": 0.5}
    assert json.loads((tmp_path / "m.json").read_text()) == result
    assert evaluate_run(run, queries=queries, collection=passages, top=[1], match="regex")["per_query"]["Top@1"]["b"] == 1.0


def test_a_query_without_results_counts_as_missed(tmp_path: Path) -> None:
    _, queries, passages = answers_case(tmp_path)
    run = write(tmp_path / "short.trec", {"a": [Hit("1", 1.0)]})
    assert evaluate_run(run, queries=queries, collection=passages, top=[5])["metrics"]["Top@5"] == 0.5


def test_qrels_of_a_folder_and_a_comparison(tmp_path: Path) -> None:
    run, qrels = graded()
    (tmp_path / "qrels").mkdir()
    lines = [f"{query}\t{key}\t{grade}" for query, grades in qrels.items() for key, grade in grades.items()]
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
    first, second = write(tmp_path / "first.trec", run), write(tmp_path / "second.trec", {q: hits[::-1] for q, hits in run.items()})
    result = evaluate_run(first, qrels=tmp_path, metrics=["NDCG@10"], compare=second)
    assert result["metrics"]["NDCG@10"] == pytest.approx(sum(judged_metrics(run, qrels)["NDCG@10"].values()) / len(qrels))
    assert result["comparison"]["NDCG@10"]["queries"] == len(qrels)


def test_people_read_percent_and_machines_fractions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in reports and reproductions: of 8 queries the first run finds 5, the other 4 of the same."""
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td\t1\n" for i in range(8)))
    first, second = (
        write(tmp_path / f"{found}.trec", {f"q{i}": [Hit("d" if i < found else "x", 1.0)] for i in range(8)}) for found in (5, 4)
    )
    words = ["evaluate", "--run", str(first), "--qrels", str(tmp_path / "qrels.tsv"), "--metrics", "P@1", "--compare", str(second)]
    app(words, standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == [
        f"{first}: 8 queries, in percent",
        "P@1             62.5   +12.5 [-17.1, +42.1]  p = 0.35",
        f"difference to {second} with its 95% interval, paired t-test",
    ]
    app([*words, "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["metrics"] == {"P@1": 0.625}


def test_what_cannot_be_judged_says_what_is_missing(tmp_path: Path) -> None:
    run, queries, _ = answers_case(tmp_path)
    with pytest.raises(ValueError, match="give --qrels, or --queries"):
        evaluate_run(run)
    with pytest.raises(ValueError, match="give --collection"):
        evaluate_run(run, queries=queries)
    (tmp_path / "other.tsv").write_text("id\ttext\ttitle\n1\tIt is Paris.\tx\n")
    with pytest.raises(DataError, match="does not hold the passage"):
        evaluate_run(run, queries=queries, collection=tmp_path / "other.tsv")


def test_runs_of_encodings_that_differ_in_length_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{i}\td\t1\n" for i in range(2)))
    files = []
    for name, tag in (("a", "contaccum-tokens-64"), ("b", "contaccum-tokens-128"), ("c", "another")):
        files.append(tmp_path / f"{name}.trec")
        files[-1].write_text("".join(f"q{i} Q0 d 1 1.0 {tag}\n" for i in range(2)))
    for other, outcome in ((files[1], True), (files[2], False), (files[0], False)):
        evaluate_run(files[0], qrels=tmp_path / "qrels.tsv", compare=other)
        assert ("read 64 tokens of a passage" in capsys.readouterr().err) == outcome
