"""Tiny real models and texts; no hub."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only wait for each other

import gc
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = [f"w{i}" for i in range(60)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


def needs_adapters() -> None:
    """Skips where transformers cannot read what is saved of them."""
    import transformers
    from packaging.version import Version

    from contaccum.towers.lora import READS_ADAPTERS

    if Version(transformers.__version__) < Version(READS_ADAPTERS):
        pytest.skip(f"adapters need transformers {READS_ADAPTERS}")


@pytest.fixture(autouse=True)
def memory_of_earlier_tests(request: pytest.FixtureRequest) -> None:
    """Given back on a GPU: tests there limit and measure memory, and what trainers and recorded layers hold refers to itself."""
    if request.node.get_closest_marker("gpu"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A word-level tokenizer over `WORDS`, with BERT's special tokens."""
    from contaccum.towers.random_encoder import write_word_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_word_tokenizer(WORDS, folder, max_seq_length=64)
    return str(folder)


def tiny_config(family: str = "bert", dropout: float = 0.1):
    from transformers import BertConfig, ModernBertConfig, MPNetConfig, Qwen3Config

    shape = {"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    if family == "bert":
        return BertConfig(**shape, max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    if family == "modernbert":
        return ModernBertConfig(**shape, max_position_embeddings=64, pad_token_id=0, cls_token_id=2, sep_token_id=3, mlp_dropout=dropout)
    if family == "mpnet":
        return MPNetConfig(**shape, max_position_embeddings=66, pad_token_id=0, hidden_dropout_prob=dropout)
    assert family == "qwen"
    return Qwen3Config(**shape, num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0)


@pytest.fixture
def tiny_encoder(tokenizer_folder: str) -> Callable:
    """`tiny_encoder(family, tied=..., ...)` -> a small random SentenceTransformer on the CPU, the same each time."""
    import torch

    from contaccum import dual_encoder

    def build(family: str = "bert", dropout: float = 0.1, seed: int = 0, **options):
        torch.manual_seed(seed)
        options = {"pooling": "lasttoken" if family == "qwen" else "mean", "max_seq_length": 32, "tied": False, **options}
        return dual_encoder(tiny_config(family, dropout), tokenizer=tokenizer_folder, **options).to("cpu")

    return build


def texts(count: int, seed: int = 0, words: int = 6) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(2, words))) for _ in range(count)]


def rows(count: int, negatives: int = 0, seed: int = 0) -> list[dict]:
    """Learnable pairs: a passage repeats its query's words."""
    queries = texts(count, seed)
    others = texts(max(1, count * negatives), seed + 1)
    return [{"query": q, "positive": q + " " + q, "negatives": others[i * negatives : (i + 1) * negatives]} for i, q in enumerate(queries)]


def write_beir(folder: Path, queries: list[str], passages: list[str], **splits: range) -> Path:
    """Passage dI is the one that is relevant for query qI; `splits` name the queries of each."""
    (folder / "qrels").mkdir(parents=True)
    for name, prefix, found in (("queries", "q", queries), ("corpus", "d", passages)):
        lines = [json.dumps({"_id": f"{prefix}{i}", "title": "", "text": text}) + "\n" for i, text in enumerate(found)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for split, numbers in splits.items():
        judged = "".join(f"q{i}\td{i}\t1\n" for i in numbers)
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


def assert_close(a: dict, b: dict, rtol: float = 1e-4) -> None:
    """Equal up to `rtol` of the largest value of all: entries that are zero but for rounding (a key's bias) have no scale of their own."""
    assert a.keys() == b.keys()
    largest = max(float(value.abs().max()) for value in b.values() if value.numel())
    worst = {name: float((a[name].double() - b[name].double()).abs().max()) for name in b if b[name].numel()}
    assert {name: error for name, error in worst.items() if not error <= rtol * largest} == {}


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """`jsonl(count, negatives)` -> a training file."""

    def write(count: int = 64, negatives: int = 0, seed: int = 0) -> str:
        file = tmp_path / f"train-{count}-{negatives}-{seed}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows(count, negatives, seed)))
        return str(file)

    return write


@pytest.fixture(scope="session")
def model_folder(tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT with dropout as a transformers folder."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(0)
    AutoModel.from_config(tiny_config()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are recorded and replayed by a stand-in, without a GPU."""
    from replayed import ReplayedByHand

    monkeypatch.setattr("contaccum.towers.cuda_graphs.Recording", ReplayedByHand)
    monkeypatch.setattr("contaccum.towers.cuda_graphs.can_record", lambda inputs: True)
