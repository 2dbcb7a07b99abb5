"""The package as installed: lean imports, and documents whose code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'blocked: {{name}}')
sys.meta_path.insert(0, Block())
import torch
before = set(sys.modules)
{code}
print(sorted({{name.partition('.')[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)))
"""
OPTIONAL = {"sentence_transformers", "transformers", "datasets", "accelerate", "faiss", "matplotlib", "typer", "rich", "yaml", "pandas"}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_core_imports_torch_and_nothing_else() -> None:
    core = "from contaccum.core import bank, criterion, drift, finite, infonce, log_sum_table"
    code = f"import contaccum\n{core}\ncontaccum.DualBankInfoNCE(bank_size=4)"
    assert run(BLOCKED.format(blocked=OPTIONAL, code=code)).strip() == "['contaccum']"


def test_commands_show_their_help_without_torch() -> None:
    assert run("import sys\nfrom contaccum.cli import app\nprint(len(app.registered_commands) > 5, 'torch' in sys.modules)").split() == [
        "True",
        "False",
    ]


def test_the_documented_loop_runs_and_learns() -> None:
    """The example in docs/criterion.md is run as it stands."""
    (loop,) = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "docs" / "criterion.md").read_text(), flags=re.DOTALL)
    assert len(loop.strip().splitlines()) <= 20
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", run(loop))]
    assert losses[-1] < 0.5 * losses[0]
