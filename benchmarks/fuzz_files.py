"""Small valid inputs of every command, for `benchmarks/fuzz.py` to spoil."""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import torch
import yaml
from transformers import BertConfig

from contaccum import dual_encoder
from contaccum.data.prepare import prepare
from contaccum.methods.config import TrainConfig
from contaccum.retrieval.encode import encode
from contaccum.retrieval.run_metrics import evaluate_run
from contaccum.retrieval.search import search
from contaccum.towers.random_encoder import write_weights, write_word_tokenizer
from contaccum.training.run import train

WORDS = [f"w{i}" for i in range(40)]
ROWS = 12
OUTPUT = "out"  # of every command


class Start(NamedTuple):
    """A command line that works, and the files that it reads."""

    words: tuple[str, ...]
    files: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return self.words[0]


def _start(line: str, *files: str) -> Start:
    return Start(tuple(shlex.split(line)), files)


BEIR = ("beir/corpus.jsonl", "beir/queries.jsonl", "beir/qrels/train.tsv", "beir/qrels/test.tsv")
MSMARCO = ("msmarco/msmarco-hard-negatives.jsonl", "msmarco/cross-encoder-ms-marco-MiniLM-L-6-v2-scores.pkl", "msmarco/corpus.jsonl")
PREPARED = (
    *("prepared/dataset_dict.json", "prepared/prepare.json", "prepared/train/state.json", "prepared/train/dataset_info.json"),
    "prepared/train/data-00000-of-00001.arrow",
)
ENCODER = ("encoder/config.json", "encoder/model.safetensors", "encoder/tokenizer.json", "encoder/tokenizer_config.json")
MODEL = (
    *(
        "model/modules.json",
        "model/router_config.json",
        "model/config_sentence_transformers.json",
        "model/document_0_Transformer/config.json",
    ),
    *("model/query_0_Transformer/model.safetensors", "model/query_0_Transformer/tokenizer.json"),
    *("model/query_0_Transformer/sentence_bert_config.json", "model/query_1_Pooling/config.json"),
)
VECTORS = tuple(f"vectors/{kind}/{name}" for kind in ("p", "q") for name in ("manifest.json", "shard-00000.npy", "shard-00000.ids.npy"))
RUN = tuple(
    f"runs/a/{name}"
    for name in (
        *("config.yaml", "log.jsonl", "summary.json", "run.json", "diagnostics.jsonl", "dev.jsonl", "evaluation.json", "test.trec"),
        "model/README.md",
    )
)
CHECKPOINT = "killed/checkpoints/checkpoint-2"
KILLED = (
    *("killed/config.yaml", "killed/run.json", "killed/log.jsonl"),
    *(f"{CHECKPOINT}/{name}" for name in ("files.json", "trainer_state.json", "contaccum_state.pt", "optimizer.pt", "rng_state.pth")),
    *(f"{CHECKPOINT}/query_0_Transformer/{name}" for name in ("model.safetensors", "config.json")),
)
SMALL = "--n-total 4 --n-local 2 --bank 4 --max-updates 2 --max-seq-length 16 --warmup-updates 0"
TRAIN = f"train --model encoder --output {OUTPUT} {SMALL}"

STARTS = (
    _start(f"prepare pairs.csv --output {OUTPUT}", "pairs.csv"),
    _start(f"prepare pairs.jsonl --output {OUTPUT} --hold-out 0.2", "pairs.jsonl"),
    _start(f"prepare pairs.parquet --output {OUTPUT}", "pairs.parquet"),
    _start(f"prepare dpr --output {OUTPUT}", "dpr/biencoder-x-train.json"),
    _start(f"prepare beir --output {OUTPUT}", *BEIR),
    _start(f"prepare msmarco --output {OUTPUT}", *MSMARCO),
    _start(f"prepare prepared --output {OUTPUT}", *PREPARED),
    _start(f"mine prepared --output {OUTPUT} --collection passages.tsv --stopwords none", "passages.tsv", *PREPARED),
    _start(f"mine pairs.jsonl --output {OUTPUT} --match regex --stopwords none", "pairs.jsonl"),
    _start(f"mine pairs.jsonl --output {OUTPUT} --method existing", "pairs.jsonl"),
    _start(f"mine beir --output {OUTPUT} --method dense --model model --depth 5 --per-query 2", *BEIR, *MODEL),
    _start("plan --model encoder --memory 2GB --n-total 4 --max-seq-length 16 --json", "encoder/config.json"),
    _start(f"{TRAIN} --data pairs.jsonl", "pairs.jsonl", *ENCODER),
    _start(f"{TRAIN} --data prepared", *PREPARED),
    _start(f"{TRAIN} --data beir --tied --pooling mean --similarity cosine", *BEIR),
    _start(f"{TRAIN} --data pairs.jsonl --dev beir --dev-split test --dev-every 1", *BEIR),
    _start(f"{TRAIN.replace('encoder', 'dpr.cp')} --data pairs.jsonl --tokenizer encoder", "dpr.cp", *ENCODER),
    _start("train config.yaml", "config.yaml", "pairs.jsonl"),
    _start("train killed/config.yaml --resume", *KILLED),
    _start(f"encode model beir --output {OUTPUT}", *BEIR[:1], *MODEL),
    _start(f"encode model questions.csv --queries --output {OUTPUT}", "questions.csv"),
    _start(f"encode model passages.tsv --output {OUTPUT} --shard-size 5", "passages.tsv"),
    _start(f"encode model prepared --queries --split train --output {OUTPUT}", *PREPARED),
    _start(
        f"search vectors/p vectors/q --output {OUTPUT}/found.trec --json-output {OUTPUT}/found.json --k 5", *VECTORS, "beir/corpus.jsonl"
    ),
    _start(f"search vectors/p vectors/q --output {OUTPUT}/found.trec --no-verify --k 5", *VECTORS),
    _start(f"evaluate --run run.trec --qrels beir --output {OUTPUT}/evaluation.json --compare run.json", "run.trec", "run.json", *BEIR),
    _start("evaluate --run answers.json --match regex --json", "answers.json"),
    _start(
        "evaluate --run answers.trec --queries questions.csv --collection passages.tsv --json",
        "answers.trec",
        "questions.csv",
        "passages.tsv",
    ),
    _start(f"evaluate model beir --output {OUTPUT} --k 5", *BEIR, *MODEL),
    _start(f"report runs/a runs/b --output {OUTPUT}/report.html --json {OUTPUT}/r.json --markdown {OUTPUT}/t.md", *RUN),
    _start("push runs/a me/model --dry-run", *RUN),
    _start(f"reproduce main --dataset acl --data beir --scale tiny --only dpr --jobs 0 --set max_updates=1 --dry-run --output {OUTPUT}"),
    _start(
        f"reproduce bank-size --dataset acl --data beir --scale tiny --output {OUTPUT} --jobs 0 --only 'N_total = 2, bank = 8' "
        "--set max_updates=1 --set max_seq_length=16 --model encoder",
        *BEIR,
        "encoder/config.json",
    ),
    _start(
        "bench --model tiny --n-total 4 --n-local 2 --bank 4 --rounds 1 --updates 1 --query-tokens 4 --passage-tokens 8 "
        f"--output {OUTPUT}/b.json"
    ),
    _start(
        f"compare pairs.csv --model encoder --output {OUTPUT} --methods contaccum --n-total 4 --n-local 2 --minutes 0",
        "pairs.csv",
        "encoder/config.json",
    ),
    _start(f"quickstart --output {OUTPUT} --pairs 500 --epochs 0.1"),
)


def make(folder: Path) -> None:
    """All of them in `folder`, which is the working folder too: paths that are stored are relative."""
    texts = [" ".join(WORDS[(7 * i + j) % len(WORDS)] for j in range(3)) for i in range(2 * ROWS)]
    rows = [
        {"query": texts[i], "positive": f"{texts[i]} is w{i} é", "negatives": [texts[ROWS + i]], "answers": [f"w{i}"]} for i in range(ROWS)
    ]
    _jsonl(folder / "pairs.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    lines = [f'"{row["query"]}","{row["positive"]}\n""so""",{row["negatives"][0]}' for row in rows]
    (folder / "pairs.csv").write_text("\n".join(["query,positive,negative", *lines]) + "\n", encoding="utf-8")
    contexts = [[{"title": "T", "text": text, "passage_id": str(i)}] for i, text in enumerate(texts)]
    records = [
        {"question": row["query"], "answers": row["answers"], "positive_ctxs": contexts[i], "hard_negative_ctxs": contexts[ROWS + i]}
        for i, row in enumerate(rows)
    ]
    (folder / "dpr").mkdir()
    (folder / "dpr" / "biencoder-x-train.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    for name in ("beir", "msmarco"):
        _beir(folder / name, rows)
    _jsonl(folder / MSMARCO[0], [{"qid": i, "pos": [i], "neg": {"bm25": [(i + 1) % ROWS]}} for i in range(ROWS)])
    scores = {i: {i: 9.0, (i + 1) % ROWS: np.float32(1.0)} for i in range(ROWS)}
    (folder / MSMARCO[1]).write_bytes(pickle.dumps(scores))
    passages = [f'{i}\t"{row["positive"]}"\tT' for i, row in enumerate(rows)]
    (folder / "passages.tsv").write_text("\n".join(["id\ttext\ttitle", *passages]) + "\n", encoding="utf-8")
    (folder / "questions.csv").write_text("".join(f"{row['query']}\t{row['answers']!r}\n" for row in rows), encoding="utf-8")
    (folder / "answers.trec").write_text("".join(f"{i} Q0 {(i + j) % ROWS} {j + 1} {9 - j} x\n" for i in range(ROWS) for j in range(3)))
    prepare(folder / "pairs.jsonl", folder / "prepared")
    _models(folder)
    for kind, queries in (("p", False), ("q", True)):
        options: dict[str, Any] = {"queries": True, "split": "test"} if queries else {}
        encode("model", "beir", folder / "vectors" / kind, progress=False, **options)
    search("vectors/p", "vectors/q", "run.trec", k=5, json_output="run.json", progress=False)
    search("vectors/p", "vectors/q", "found.trec", k=5, json_output="answers.json", query_texts="questions.csv", progress=False)
    for seed, name in enumerate("ab"):
        _run(folder / "runs" / name, seed)
    _killed(folder / "killed")
    config = yaml.safe_dump({name: value for name, value in asdict(_config("out", 0)).items() if value is not None})
    (folder / "config.yaml").write_text(config, encoding="utf-8")


def _jsonl(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _beir(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "qrels").mkdir(parents=True)
    _jsonl(folder / "corpus.jsonl", [{"_id": str(i), "title": "", "text": row["positive"]} for i, row in enumerate(rows)])
    _jsonl(folder / "queries.jsonl", [{"_id": str(i), "text": row["query"]} for i, row in enumerate(rows)])
    for split, numbers in (("train", range(ROWS)), ("test", range(4))):
        judged = "".join(f"{i}\t{i}\t1\n" for i in numbers)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")


def _models(folder: Path) -> None:
    write_word_tokenizer([*WORDS, "is"], folder / "encoder", max_seq_length=32)
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    write_weights(BertConfig(**shape, max_position_embeddings=32), folder / "encoder", seed=0)
    model = dual_encoder(folder / "encoder", max_seq_length=16)
    model.save_pretrained(str(folder / "model"))
    weights = next(module for module in model.modules() if type(module).__name__ == "BertModel").state_dict()
    renamed = {f"{part}_model.{name}": value for part in ("question", "ctx") for name, value in weights.items()}
    torch.save({"model_dict": renamed, "epoch": 1}, folder / "dpr.cp")


def _config(output: str, seed: int) -> TrainConfig:
    sizes: dict[str, Any] = {"n_total": 4, "n_local": 2, "bank": 4, "max_updates": 2, "max_seq_length": 16, "warmup_updates": 0}
    return TrainConfig(data="pairs.jsonl", model="encoder", output=output, seed=seed, diagnose_every=1, save_every=0, **sizes)


def _killed(folder: Path) -> None:
    """A run after its first checkpoint of two."""
    train(replace(_config(folder.name, 0), max_updates=4, save_every=2, keep_checkpoints=2, checkpoints_at_end=True, diagnose_every=0))
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / "checkpoint-4")


def _run(folder: Path, seed: int) -> None:
    name = str(folder.relative_to(Path.cwd()))
    train(_config(name, seed))
    (folder / "test.trec").write_text(Path("run.trec").read_text())
    _jsonl(folder / "dev.jsonl", [{"update": 1, "MRR@10": 0.5}, {"update": 2, "MRR@10": 0.6}])
    evaluate_run(f"{name}/test.trec", qrels="beir", output=f"{name}/evaluation.json")
