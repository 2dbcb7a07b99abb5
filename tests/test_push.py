"""A model's card holds the figures of its run, and what is pushed loads as any SentenceTransformer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("pytrec_eval", reason="needs contaccum[search]")

from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from contaccum.cli import app
from contaccum.report.card import push
from report_runs import make_data, make_run, rank_and_judge


@pytest.fixture
def run(tmp_path: Path, tiny_encoder: Any) -> Path:
    folder = make_run(tmp_path / "run", method="contaccum")
    model = tiny_encoder(tied=True, similarity="cosine")
    model.prompts = {"query": "find: ", "document": ""}
    model.save_pretrained(str(folder / "model"))
    rank_and_judge(folder, make_data(tmp_path / "data"), 0.7)
    return folder


def test_the_card_has_the_figures_and_is_the_same_again(run: Path) -> None:
    metrics = json.loads((run / "evaluation.json").read_text())["metrics"]
    push(run, "me/encoder", dry_run=True)
    first = (run / "model" / "README.md").read_text()
    push(run, "me/encoder", dry_run=True)
    assert (run / "model" / "README.md").read_text() == first
    found = {result.metric_type: result.metric_value for result in ModelCard(first).data.eval_results}
    assert found == pytest.approx(metrics)
    for metric, value in metrics.items():
        assert f"| {metric} | {100 * value:.1f} |" in first
    assert first.count("## Results of this run") == 1
    assert "SentenceTransformer" in first  # what sentence-transformers wrote stays


def test_the_card_shows_the_curves(run: Path) -> None:
    push(run, "me/encoder", dry_run=True)
    pictures = re.findall(r"!\[Training loss\]\((\S+)\)", (run / "model" / "README.md").read_text())
    assert pictures == ["curves/loss.png"]
    assert (run / "model" / pictures[0]).read_bytes().startswith(b"\x89PNG")


def test_a_model_trained_on_all_rows_has_the_figures_of_its_comparison(run: Path) -> None:
    (run / "evaluation.json").unlink()
    push(run, "me/encoder", dry_run=True)
    assert "It was not evaluated." in (run / "model" / "README.md").read_text()
    change(run, split="train+dev+test")
    make_comparison(run.parent, "gradaccum", "contaccum")
    assert push(run, "me/encoder", dry_run=True)["note"] is None
    card = (run / "model" / "README.md").read_text()
    assert "trained without the test rows, reached:" in card
    assert "| MRR@10 | 50.0 |" in card
    assert not ModelCard(card).data.eval_results, "the hub is told of no figure that is not this model's"


def change(run: Path, **fields: Any) -> None:
    file = run / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | fields))


def make_comparison(folder: Path, *methods: str, **config: Any) -> None:
    """Of these methods, as `compare` leaves it; it was moved since."""
    rows = []
    for number, method in enumerate(methods, 1):
        place = make_run(folder / "cells" / method / "run", method=method, model=str(folder / "bert-base-uncased"), **config)
        rows.append({"name": method, "metrics": {"MRR@10": 0.25 * number}, "runs": [{"folder": f"elsewhere/cells/{method}/{place.name}"}]})
    rows.append({"name": "BM25", "metrics": {"MRR@10": 0.9}, "runs": [{"folder": "elsewhere/cells/BM25-seed0/run"}]})
    (folder / "results.json").write_text(json.dumps({"results": rows}))


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"lr": 1e-3}, "lr is 0.001 here and 2e-05 there"),
        ({"split": "train"}, "it was trained without the split dev"),
        ({"split": "train+dev"}, "it was trained without the split test"),
        ({"limit": 100}, "it was trained on 100 rows, not on all"),
        ({"data": "other"}, "data is other here and data there"),
        ({"model": "roberta-base"}, "model is roberta-base here and"),
        ({"query_prompt": "find: "}, "query_prompt is find:  here and none there"),
        ({"max_seq_length": 64}, "max_seq_length is 64 here and 256 there"),
        ({"bank": 7}, "bank is 7 here and auto there"),
        ({"seed": 7, "dev": "dev", "save_every": 0, "log_every": 1, "warmup_updates": 3, "n_local": 8}, None),
    ],
)
def test_figures_of_other_settings_are_left_out(fields: dict[str, Any], note: str | None, run: Path) -> None:
    (run / "evaluation.json").unlink()
    change(run, **{"split": "train+dev+test", **fields})
    make_comparison(run.parent, "contaccum")
    found = push(run, "me/encoder", dry_run=True)["note"]
    card = (run / "model" / "README.md").read_text()
    assert ("| MRR@10 | 25.0 |" in card) is (note is None)
    assert ("It was not evaluated." in card) is (note is not None)
    assert (found is None) is (note is None)
    assert note is None or note in found


def test_banks_that_were_chosen_by_the_rows_are_the_same_setting(run: Path) -> None:
    (run / "evaluation.json").unlink()
    change(run, split="train+dev+test", bank=300)
    make_comparison(run.parent, "contaccum", bank=200)
    assert "bank is 300 here and 200 there" in push(run, "me/encoder", dry_run=True)["note"]
    for place in (run, run.parent / "cells" / "contaccum" / "run"):
        told = json.loads((place / "run.json").read_text())
        (place / "run.json").write_text(json.dumps(told | {"auto": ["bank"]}))
    assert push(run, "me/encoder", dry_run=True)["note"] is None


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("me/small", "[me/small](https://huggingface.co/me/small)"),
        ("/home/anna/secret/small", "`small`"),
    ],
)
def test_the_card_names_the_model_and_what_it_was_trained_from(model: str, shown: str, run: Path) -> None:
    change(run, model=model)
    for name in ("me/encoder", "we/encoder"):
        push(run, name, dry_run=True)
        card = (run / "model" / "README.md").read_text()
        assert f'model = SentenceTransformer("{name}")' in card
        assert f"- **Base model:** {shown}\n" in card
        assert "sentence_transformers_model_id" not in card
        assert "anna" not in card


def test_what_is_uploaded_loads_with_prompts_and_similarity(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    class Api:
        def create_repo(self, name: str, **options: Any) -> None:
            sent["repo"] = (name, options)

        def upload_folder(self, **options: Any) -> None:
            sent["folder"] = options

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    result = CliRunner().invoke(app, ["push", str(run), "me/encoder", "--private"])
    assert result.exit_code == 0, result.output
    assert sent["repo"] == ("me/encoder", {"private": True, "exist_ok": True})
    assert sent["folder"]["repo_id"] == "me/encoder"
    loaded = SentenceTransformer(str(sent["folder"]["folder_path"]))
    assert loaded.similarity_fn_name == "cosine"
    assert loaded.prompts["query"] == "find: "


def test_where_nothing_can_be_uploaded_nothing_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, name: str, **options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=r"cannot be put on the hub as me/encoder \(no route to host\); check the name, the connection"):
        push(run, "me/encoder")
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no finished model"):
        push(make_run(tmp_path / "run", finished=False), "me/encoder", dry_run=True)
