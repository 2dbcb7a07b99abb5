"""The house keeps its order: dependencies between rooms, private names, sizes of files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src" / "contaccum").rglob("*.py"))
LONGEST = 350  # lines


def test_dependencies_between_rooms_point_downwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "src")))
def test_a_file_holds_one_thing_and_says_which(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    assert ast.get_docstring(ast.parse(text)) or file.name == "__main__.py"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> set[str]:
    """Private functions, classes, constants and attributes of `self` that a module makes."""
    made = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in made if is_private(name)}


def test_no_private_name_is_used_outside_its_module() -> None:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in [*FILES, *(ROOT / "benchmarks").glob("*.py")]}
    makers: dict[str, set[Path]] = defaultdict(set)
    for file, tree in trees.items():
        for name in private_names(tree):
            makers[name].add(file)
    wrong = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("contaccum"):
                wrong += [f"{file.name}:{node.lineno} imports {alias.name}" for alias in node.names if is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and makers[node.attr] - {file} == makers[node.attr] != set():
                of_a_base_class = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                wrong += [] if of_a_base_class else [f"{file.name}:{node.lineno} reaches for {node.attr}"]
    assert not wrong


def test_the_search_for_private_names_finds_them() -> None:
    assert private_names(ast.parse("class A:\n  def _f(self):\n    self._x = 1\n_y = 2")) == {"_f", "_x", "_y"}
