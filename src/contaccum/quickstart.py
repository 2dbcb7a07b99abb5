"""The first five minutes: harvest, train, search, compare, on two CPU cores and without a network.

1. Docstring -> source pairs from the installed packages become a BEIR folder.
2. A small two-tower encoder with random weights and a tokenizer of its own is written to a folder.
3. Every method trains it by the same command a user would type, one core each, two at a time.
4. Each model ranks the whole collection for the test queries.
5. A table, plots and a page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contaccum.data.beir import read_qrels, read_texts
from contaccum.data.harvest import Pair, harvest, write_beir
from contaccum.provenance import provenance
from contaccum.report.page import write_page
from contaccum.report.results import RunResult, log_of

PARALLEL = 2
SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
# Names as the table shows them -> options of `contaccum train`.
METHODS = {
    "gradaccum": {"method": "gradaccum"},
    "gradcache": {"method": "gradcache"},
    "contaccum (paper)": {"method": "contaccum"},
    "contaccum (mean)": {"method": "contaccum", "drift_correction": "mean"},
}
INTRODUCTION = (
    "Docstrings are the queries, function bodies the passages, both from the Python packages installed here. The same small two-tower "
    "encoder is trained from random weights by each method, with the same micro-batch and the same samples per update. contaccum (paper) "
    "reads banked vectors as they were stored, which is too old for weights that move this fast; contaccum (mean) reads them with the "
    "present mean."
)


@dataclass(frozen=True)
class Settings:
    pairs: int = 8000
    test: int = 1000
    epochs: float = 3
    n_total: int = 128
    n_local: int = 8
    bank: int = 512
    lr: float = 5e-4
    max_seq_length: int = 32
    seed: int = 42
    vocabulary: int = 8000
    width: int = 128
    layers: int = 2

    def train_options(self) -> dict[str, Any]:
        sizes = {"n_total": self.n_total, "n_local": self.n_local, "bank": self.bank, "max_seq_length": self.max_seq_length}
        fixed = {"pooling": "mean", "similarity": "cosine", "save_every": 0}
        return {**sizes, **fixed, "epochs": self.epochs, "lr": self.lr, "seed": self.seed}


def quickstart(output: Path, settings: Settings, say: Callable[[str], None] = print) -> list[RunResult]:
    """Do all five steps in `output`, a new folder, and return the results in the methods' order."""
    started = time.perf_counter()
    output.mkdir(parents=True)
    say("Reading docstrings and functions of the installed packages ...")
    pairs = harvest(limit=settings.pairs)
    write_beir(pairs, output / "data", test=settings.test)
    write_encoder(pairs, output / "encoder", settings)
    say(f"{len(pairs):,} pairs, {settings.test:,} of them for testing. Training {len(METHODS)} methods, {PARALLEL} at a time ...")
    finished = {name: (seconds, peak) for name, seconds, peak in _train_all(output, settings)}
    say("Searching the whole collection with each model ...")
    evaluate = evaluator(output / "data")
    results = []
    for name, (seconds, peak) in finished.items():
        run = run_folder(output, name)
        log = log_of(run)
        negatives = max(line["negatives_per_query"] for line in log)
        results.append(RunResult(name, evaluate(run / "model"), seconds, peak, negatives, log))
    described = {**provenance(settings.seed), "settings": settings.train_options(), "total_seconds": round(time.perf_counter() - started)}
    write_page(output / "report.html", "contaccum quickstart", INTRODUCTION, results, "MRR", described)
    told = json.dumps({"results": [result.as_json() for result in results], "provenance": described}, indent=1)
    (output / "results.json").write_text(told + "\n", encoding="utf-8")
    return results


def run_folder(output: Path, name: str) -> Path:
    return output / "runs" / name.replace(" ", "-").replace("(", "").replace(")", "")


def write_encoder(pairs: list[Pair], folder: Path, settings: Settings) -> None:
    """A BERT of random weights, and a WordPiece tokenizer learnt from the pairs."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    special = list(SPECIAL_TOKENS.values())
    trainer = trainers.WordPieceTrainer(vocab_size=settings.vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator((text for pair in pairs for text in (pair.query, pair.passage)), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", special.index("[SEP]")), ("[CLS]", special.index("[CLS]")))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=settings.max_seq_length, **SPECIAL_TOKENS).save_pretrained(folder)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=max(1, settings.width // 64),
        intermediate_size=4 * settings.width,
        max_position_embeddings=settings.max_seq_length,
    )
    torch.manual_seed(settings.seed)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)


def _train_all(output: Path, settings: Settings) -> Iterator[tuple[str, float, int]]:
    """(method, seconds, peak bytes of its process) in the methods' order; up to PARALLEL processes at once, one thread each."""
    waiting, running, done = list(METHODS), dict[int, tuple[str, float]](), dict[str, tuple[float, int]]()
    while waiting or running:
        while waiting and len(running) < PARALLEL:
            name = waiting.pop(0)
            running[_start(output, name, settings)] = (name, time.perf_counter())
        pid, status, usage = os.wait4(-1, 0)
        if pid not in running:
            continue
        name, begun = running.pop(pid)
        if status:
            log = run_folder(output, name).with_suffix(".log")
            raise RuntimeError(f"training {name} failed; the end of {log}:\n{log.read_text()[-2000:]}")
        done[name] = (time.perf_counter() - begun, usage.ru_maxrss * 1024)
    for name in METHODS:
        yield name, *done[name]


def _start(output: Path, name: str, settings: Settings) -> int:
    run = run_folder(output, name)
    run.parent.mkdir(exist_ok=True)
    options = {"data": output / "data", "model": output / "encoder", "output": run, **settings.train_options(), **METHODS[name]}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    alone = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with open(run.with_suffix(".log"), "w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "contaccum", "train", *words]
        return subprocess.Popen(command, env={**os.environ, **alone}, stdout=log, stderr=log).pid


def evaluator(data: Path) -> Callable[[Path], dict[str, float]]:
    """A function from a model folder to its metrics on the test queries, by exact search over the whole collection."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    qrels, queries = read_qrels(data / "qrels" / "test.tsv"), read_texts(data / "queries.jsonl")
    collection: dict[str, Any] = dict(read_texts(data / "corpus.jsonl"))
    judge = InformationRetrievalEvaluator(
        {key: queries[key] for key in qrels},
        collection,
        {key: set(documents) for key, documents in qrels.items()},
        accuracy_at_k=[1, 20, 100],
        precision_recall_at_k=[100],
        mrr_at_k=[100],
        ndcg_at_k=[10],
        map_at_k=[100],
        batch_size=128,
        write_csv=False,
    )
    names = {"Top@1": "accuracy@1", "Top@20": "accuracy@20", "Top@100": "accuracy@100", "MRR": "mrr@100", "NDCG@10": "ndcg@10"}

    def evaluate(model: Path) -> dict[str, float]:
        found = judge(SentenceTransformer(str(model), device="cpu"))
        return {shown: float(found[f"cosine_{key}"]) for shown, key in names.items()}

    return evaluate


def free_folder(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that is not there yet: nothing is overwritten."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
