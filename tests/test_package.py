"""The package as installed: lean imports, and documents whose code runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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


def documented_loop() -> str:
    """The example in docs/criterion.md as it stands."""
    (loop,) = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "docs" / "criterion.md").read_text(), flags=re.DOTALL)
    return loop


def whole_script(model: Path) -> str:
    """The first one in docs/sentence-transformers.md, with a model that is here and words that it knows."""
    script, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sentence-transformers.md").read_text(), flags=re.DOTALL)
    assert "sentence-transformers/all-MiniLM-L6-v2" in script
    for result, here in (("sentence-transformers/all-MiniLM-L6-v2", str(model)), ("{a}", "w{a}"), ("{b}", "w{b}"), ("{a + b}", "w{a + b}")):
        script = script.replace(result, here)
    return script


@pytest.fixture
def small_model(model_folder: str, tmp_path: Path) -> Path:
    from contaccum import dual_encoder

    dual_encoder(model_folder, tied=True, pooling="mean", max_seq_length=16).save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def test_the_documented_script_trains(small_model: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", whole_script(small_model)], check=True, capture_output=True, cwd=tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (small_model, tmp_path / "runs" / "sums" / "model"))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def check_learnt(printed: str) -> None:
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist, built from a copy: nothing is left in the checkout."""
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools >= 77")
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for folder in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, copy)
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=copy)
    return {"wheel": next(out.glob("*.whl")), "sdist": next(out.glob("*.tar.gz"))}


def test_wheel_and_sdist_hold_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assets = {"contaccum/py.typed", "contaccum/report/page.css", "contaccum/report/page.js"}
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata, entry = (wheel.read(f"{info}/{name}").decode() for name in ("METADATA", "entry_points.txt"))
    assert {name for name in names if not name.startswith(info)} == sources | assets
    assert "contaccum = contaccum.cli:main" in entry
    assert {"Requires-Dist: torch>=2.6", "License-Expression: Apache-2.0", "Requires-Python: >=3.10"} <= set(metadata.splitlines())
    assert "# contaccum" in metadata  # the README
    with tarfile.open(built["sdist"]) as sdist:
        stored = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in sources | assets} | {"LICENSE", "README.md", "pyproject.toml"} <= stored
    assert not any(name.startswith(("tests", "benchmarks")) for name in stored)


def test_the_documented_loop_runs_and_learns_without_the_checkout(built: dict[str, Path], tmp_path: Path) -> None:
    loop = documented_loop()
    assert len(loop.strip().splitlines()) <= 20
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel.extractall(tmp_path / "unpacked")
    start = f"import sys; sys.path.insert(0, {str(tmp_path / 'unpacked')!r})\n"
    end = "\nimport contaccum; from importlib.resources import files\n"
    end += "print(contaccum.__file__, len(files('contaccum.report').joinpath('page.css').read_text()))"
    done = subprocess.run([sys.executable, "-I", "-c", start + loop + end], check=True, capture_output=True, text=True, cwd=tmp_path)
    check_learnt(done.stdout)
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "unpacked"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_in_an_empty_environment(kind: str, built: dict[str, Path], small_model: Path, tmp_path: Path) -> None:
    """With what pip finds now, as CI does; torch is held to what `make` installs."""
    venv.create(tmp_path / "empty", with_pip=True)
    programs = tmp_path / "empty" / "bin"
    install = [programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{built[kind]}[train]"]
    subprocess.run([*map(str, install)], check=True, cwd=tmp_path)
    done = subprocess.run(
        [str(programs / "python"), "-I", "-c", documented_loop()], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    check_learnt(done.stdout)
    code = f"{whole_script(small_model)}\nimport contaccum\nprint(contaccum.__file__)"
    done = subprocess.run([str(programs / "python"), "-I", "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1].startswith(str(tmp_path / "empty"))
    assert (tmp_path / "runs" / "sums" / "model" / "model.safetensors").exists()
    done = subprocess.run([str(programs / "contaccum"), "--version"], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "contaccum 0.1.0\n"
