"""The first five minutes in small: harvest, train all methods, search, table, plots and page."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from contaccum.common.errors import DataError
from contaccum.comparison.compare import BEFORE, METRICS, WORDS
from contaccum.comparison.quickstart import COMPARED, Settings, free_folder, quickstart
from contaccum.data.harvest import Pair, harvest, write_beir
from contaccum.data.readers.beir import read_pairs, read_qrels, read_texts
from contaccum.towers.random_encoder import write_encoder

MODULE = '''
def add(a, b):
    """Return the sum of two numbers. More is said here.

    And here."""
    total = a + b
    return total

class Thing:
    async def fetch(self, key):
        """Fetch one value by its key."""
        value = await self.store.get(key)
        return value

def undocumented(a):
    return a

def short(a):
    """Too short a body to keep."""
    return a

raise RuntimeError("harvesting must not run this")
'''


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    for package in ("one", "two"):  # the second only repeats the first
        (folder / package).mkdir(parents=True)
        (folder / package / "module.py").write_text(MODULE)
    (folder / "one" / "broken.py").write_text("def (:\n")
    (folder / "one" / "latin.py").write_bytes(b"# caf\xe9\n")
    return folder


def test_harvest_pairs_docstrings_with_their_functions(packages: Path) -> None:
    pairs = {pair.query: pair for pair in harvest([packages])}
    assert set(pairs) == {"Return the sum of two numbers.", "Fetch one value by its key."}
    assert pairs["Return the sum of two numbers."].passage == "def add(a, b):\n    total = a + b\n    return total"
    fetched = pairs["Fetch one value by its key."]
    assert fetched.passage.splitlines() == ["async def fetch(self, key):", "    value = await self.store.get(key)", "    return value"]
    assert fetched.place.endswith("module.py:fetch")
    for pair in pairs.values():
        ast.parse(pair.passage)


def test_harvest_of_this_environment_is_large_and_the_same_twice() -> None:
    first = harvest(limit=1500)
    assert len(first) == 1500
    assert len({pair.query.lower() for pair in first}) == len({pair.passage for pair in first}) == 1500
    assert harvest(limit=300) == first[:300]


def test_nothing_to_harvest_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Python function with a docstring"):
        harvest([tmp_path])


def test_split_is_by_function_and_whole(tmp_path: Path) -> None:
    pairs = [Pair(f"query number {i}", f"passage {i}", "x") for i in range(50)]
    write_beir(pairs, tmp_path / "data", test=10, dev=5)
    splits = {split: set(read_qrels(tmp_path / "data" / "qrels" / f"{split}.tsv")) for split in ("train", "dev", "test")}
    assert [len(splits[s]) for s in ("train", "dev", "test")] == [35, 5, 10]
    assert len(set.union(*splits.values())) == 50
    assert len(read_texts(tmp_path / "data" / "corpus.jsonl")) == 50
    assert all(p.split()[-1] == q.split()[-1] for q, p in read_pairs(tmp_path / "data", "train"))
    with pytest.raises(DataError, match="50 pairs are too few for 30 test"):
        write_beir(pairs, tmp_path / "other", test=30)


def test_quickstart_end_to_end(tmp_path: Path) -> None:
    settings = Settings(pairs=1000, test=100, dev=40, epochs=1, n_total=32, vocabulary=800, width=32, layers=1)
    found = quickstart(tmp_path / "quick", settings, say=lambda line: None)
    rows = found.summary.rows
    assert [row.name for row in rows] == [*COMPARED, BEFORE, WORDS]
    assert [row.negatives_per_query for row in rows if row.trained] == [7, 31, 135, 33]  # 128 of the paper's; a sixteenth of 430 pairs
    for row in rows:
        assert tuple(row.metrics) == METRICS
        assert row.metrics["Recall@100"] > 100 / 1000  # better than chance: something was learnt
        assert row.metrics["Recall@1"] <= row.metrics["Recall@20"] <= row.metrics["Recall@100"]
    page = found.page.read_text()
    assert page.count("<svg") >= 4  # quality, time, memory, loss; more where there are diagnostics
    assert 'id="data"' in page  # the query browser
    for row in rows:
        assert f'<th scope="row">{row.name}</th>' in page
        assert f"{100 * row.metrics['MRR@10']:.1f}" in page
    assert not re.search(r"""\b(src|href|action)\s*=\s*["']?(?!["']?#)""", page.split("<script", 1)[0]), "the page must load nothing"
    stored = json.loads((found.output / "results.json").read_text())
    assert stored["results"][0]["metrics"] == rows[0].metrics
    assert free_folder(tmp_path / "quick").name == "quick-2"


def test_the_encoder_is_the_same_each_time(tmp_path: Path) -> None:
    texts = [text for pair in harvest(limit=400) for text in (pair.query, pair.passage)]
    for name in ("a", "b"):
        write_encoder(texts, tmp_path / name, vocabulary=2000, width=32, layers=1, max_seq_length=16, seed=0)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
