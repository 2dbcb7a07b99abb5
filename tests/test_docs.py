"""Documents: links lead somewhere, Python parses, and the commands in them have the options they are given."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformerTrainingArguments

from conftest import rows
from contaccum import ContAccumLoss, ContAccumTrainer
from contaccum.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
COMMANDS = {command.name: command for command in typer.main.get_command(app).commands.values()}  # type: ignore[attr-defined]


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are made from their words."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in link:
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{link} leads nowhere"
            assert not heading or heading in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_documents_parses(page: Path) -> None:
    for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(code)


def python_of(page: str) -> list[str]:
    return [code for language, code in FENCE.findall((ROOT / "docs" / page).read_text(encoding="utf-8")) if language == "python"]


def test_python_of_the_criterion_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block as it stands, with what came before it and the vectors that it speaks of."""
    loop, call, widths = python_of("criterion.md")
    names: dict[str, Any] = {"normalize": torch.nn.functional.normalize}
    exec(loop, names)
    assert "update 199 loss" in capsys.readouterr().out
    names |= {name: torch.randn(4, 768, requires_grad=True) for name in ("queries", "positives")}
    exec(call, names)
    names["loss"].backward()
    exec(widths, names)
    names["loss"].backward()
    assert names["queries"].grad.abs().sum() > 0
    assert len(names["criterion"].bank) == 8  # each call's micro-batch, the one at two widths once


def test_python_of_the_losses_runs(tiny_encoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script that comes first is run as a program, in test_package.py."""
    _, data_sets, filters, count = python_of("sentence-transformers.md")
    model = tiny_encoder(tied=True)
    guide = tiny_encoder(tied=True, seed=1)
    nli, qa = (Dataset.from_list([{"question": row["query"], "answer": row["positive"]} for row in rows(8, seed=i)]) for i in (0, 9))
    args = SentenceTransformerTrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_steps=3, report_to="none", use_cpu=True)
    names: dict[str, Any] = {"model": model, "nli": nli, "qa": qa, "args": args, "DatasetDict": DatasetDict}
    names |= {"ContAccumLoss": ContAccumLoss, "ContAccumTrainer": ContAccumTrainer, "SentenceTransformer": lambda name: guide}
    exec(data_sets, names)
    names["trainer"].train()
    assert {"nli", "qa"} <= set(names["loss"].criterion.bank_names)
    exec(filters, names)
    names["loss"] = ContAccumLoss(model, margin=-0.1)
    exec(count, names)
    capsys.readouterr()
    ContAccumTrainer(model=model, args=args, train_dataset=qa, loss=names["loss"]).train()
    assert re.search(r"^\d+ of \d+$", capsys.readouterr().out, flags=re.MULTILINE)


def test_python_of_the_speed_options_runs(tiny_encoder) -> None:
    (code,) = python_of("performance.md")
    exec(code, {"model": tiny_encoder(tied=True)})


def commands_of(page: Path) -> list[list[str]]:
    blocks = [code for language, code in FENCE.findall(page.read_text(encoding="utf-8")) if language in ("", "bash", "console")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = re.compile(rf"\s*contaccum ({'|'.join(COMMANDS)})\b")
    return [shlex.split(line.strip(), comments=True)[1:] for line in lines if commands.match(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_documents_have_these_options(page: Path) -> None:
    for name, *words in commands_of(page):
        known = {option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known | {"--help"}, f"contaccum {name} has no {sorted(given - known)}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_options_whole_in_a_window_of_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app([name, "--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "…" not in shown
    for parameter in COMMANDS[name].params:
        option = parameter.opts[0]
        assert not option.startswith("--") or re.search(rf"--(\[no-\])?{option[2:]}\b", shown)


def test_diffs_in_the_architecture_apply_to_these_files() -> None:
    diffs = [code for language, code in FENCE.findall((ROOT / "docs/architecture.md").read_text(encoding="utf-8")) if language == "diff"]
    assert len(diffs) == 5
    for diff in diffs:
        there: list[str] = []
        for line in diff.splitlines():
            if named := re.fullmatch(r" # (\S+\.py)", line):
                file = ROOT / "src/contaccum" / named[1]
                there = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            elif line[0] != "+" and line.strip() != "...":
                assert line[1:] in there, f"{named} {line}"


def test_there_are_commands_in_the_documents() -> None:
    assert sum(len(commands_of(page)) for page in PAGES) > 20
