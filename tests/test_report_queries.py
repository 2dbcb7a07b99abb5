"""The report's query browser: which queries it shows, with their rankings, texts and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs contaccum[report]")
pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from contaccum.common.errors import DataError
from contaccum.report.queries import choose, query_browser
from contaccum.retrieval.run_metrics import evaluate_run
from report_runs import QUERIES, make_data, make_run, rank_and_judge, summary_of, two_methods, write_lines

runs = pytest.fixture(two_methods)


def test_the_queries_that_differ_most_are_chosen_and_some_by_chance() -> None:
    first, second = {f"q{i}": i / 1000 for i in range(900)}, {f"q{i}": 0.0 for i in range(900)}
    judged, chosen = choose([first, second], by_difference=40, at_random=10)
    assert judged == 900
    assert [key for key, drawn in chosen.items() if not drawn] == [f"q{i}" for i in range(899, 859, -1)]
    assert sum(chosen.values()) == 10
    assert list(chosen.values())[:10] == [False] * 4 + [True] + [False] * 4 + [True]
    assert choose([first, second], 40, 10) == (judged, chosen)
    assert sum(choose([first], 40, 10)[1].values()) == 50  # one run differs from none


def test_the_browser_holds_rankings_texts_and_ranks(runs: list[Path]) -> None:
    browser = query_browser(summary_of(runs).rows, "MRR@10")
    assert browser.runs == ["gradaccum, seed 1", "gradaccum, seed 2", "contaccum, seed 1", "contaccum, seed 2"]
    assert browser.judged == len(browser.queries) == QUERIES
    assert "30 of 30 queries" in browser.description()
    ranked = {}
    for line in (runs[3] / "test.trec").read_text().splitlines():
        query, _, key, *_ = line.split()
        ranked.setdefault(query, []).append(key)
    values = json.loads((runs[3] / "evaluation.json").read_text())["per_query"]["MRR@10"]
    for entry in browser.queries:
        relevant, hits = f"d{entry['id'][1:]}", ranked[entry["id"]]
        assert entry["top"][3] == hits[:10]
        assert entry["values"][3] == values[entry["id"]]
        assert entry["wanted"] == [relevant]
        assert entry["relevant"] == [relevant]
        assert entry["first"][3] == entry["ranks"][3][0] == (hits.index(relevant) + 1 if relevant in hits else None)
        assert {key for keys in entry["top"] for key in keys} <= browser.texts.keys()
    assert all(len(text) <= 500 for _, text in browser.texts.values())
    assert max(len(text) for _, text in browser.texts.values()) == 500


def test_texts_stay_within_the_page(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contaccum.report.queries.BUDGET_BYTES", 12_000)
    browser = query_browser(summary_of(runs).rows, "MRR@10")
    assert 0 < len(browser.queries) < QUERIES
    assert len(json.dumps(browser.as_json(), ensure_ascii=False)) < 16_000
    assert f"{len(browser.queries)} of 30 queries" in browser.description()


def test_answers_decide_where_there_are_no_judgements(tmp_path: Path) -> None:
    passages = [{"id": f"p{i}", "text": f"The capital is {city}."} for i, city in enumerate(("Paris", "Rome", "Bonn"))]
    write_lines(tmp_path / "passages.jsonl", passages)
    queries = [
        {"id": "a", "question": "capital of Italy?", "answers": ["rome"]},
        {"id": "b", "question": "capital of Peru?", "answers": ["Lima"]},
    ]
    write_lines(tmp_path / "queries.jsonl", queries)
    run = make_run(tmp_path / "run")
    (run / "test.trec").write_text("".join(f"{q} Q0 p{i} {i + 1} {9 - i} t\n" for q in "ab" for i in range(3)))
    files = {"queries": tmp_path / "queries.jsonl", "collection": tmp_path / "passages.jsonl"}
    result = evaluate_run(run / "test.trec", **files, top=[1, 2], output=run / "evaluation.json")
    assert result["sources"] == {
        "run": str(run / "test.trec"),
        "qrels": None,
        **{k: str(v) for k, v in files.items()},
        "split": None,
        "match": "string",
    }
    browser = query_browser(summary_of([run]).rows, "Top@2")
    entries = {entry["id"]: entry for entry in browser.queries}
    assert (entries["a"]["relevant"], entries["a"]["first"], entries["a"]["answers"]) == (["p1"], [2], ["rome"])
    assert (entries["b"]["relevant"], entries["b"]["first"]) == ([], [None])
    assert browser.texts["p1"] == ("", "The capital is Rome.")


def test_the_retrievers_own_output_is_enough(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    record = {"id": "a", "question": "q?", "answers": ["Rome"], "ctxs": [{"id": "p1", "text": "It is Rome.", "score": "1"}]}
    (run / "found.json").write_text(json.dumps([record, record | {"id": "b"}]))
    evaluate_run(run / "found.json", top=[1], output=run / "evaluation.json")
    browser = query_browser(summary_of([run]).rows, "Top@1")
    assert [entry["first"] for entry in browser.queries] == [[1], [1]]
    assert browser.texts == {"p1": ("", "It is Rome.")}


def test_a_qrels_file_finds_the_texts_of_its_folder_or_those_given(tmp_path: Path) -> None:
    data, run = make_data(tmp_path / "data"), make_run(tmp_path / "run")
    rank_and_judge(run, data, 0.5)
    qrels = data / "qrels" / "test.tsv"
    evaluate_run(run / "test.trec", qrels=qrels, output=run / "evaluation.json")
    assert query_browser(summary_of([run]).rows, "MRR@10").judged == QUERIES
    alone = tmp_path / "judged.tsv"
    alone.write_text(qrels.read_text())
    evaluate_run(run / "test.trec", qrels=alone, output=run / "evaluation.json")
    with pytest.raises(DataError, match=r"where the texts of .* are is not known"):
        query_browser(summary_of([run]).rows, "MRR@10")
    texts = {"queries": data / "queries.jsonl", "collection": data / "corpus.jsonl"}  # queries without answers: only their texts are wanted
    evaluate_run(run / "test.trec", qrels=alone, **texts, output=run / "evaluation.json")
    assert query_browser(summary_of([run]).rows, "MRR@10").judged == QUERIES
