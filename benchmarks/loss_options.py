"""What directions and the filters of false negatives bring, each beside the plain loss: trained and tested on a BEIR folder.

    python benchmarks/loss_options.py --data BEIR_FOLDER --model MODEL --guide GUIDE_MODEL --lrs 2e-5 1e-4 --json options.json

Every variant is `ContAccumLoss` on whole updates whose loss is taken on slices of n (`micro_batch_size`): the same as micro-batches.
"in-batch" and "in-batch, symmetric" have no bank: they are batches of N, whose gradient GradCache has too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from transformers import PrinterCallback, set_seed

from contaccum import ContAccumLoss
from contaccum.common.provenance import provenance
from contaccum.core.comparison import DIRECTIONS
from contaccum.data.training_set import load_training_set
from contaccum.training.dev import dev_evaluator

SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
VARIANTS: dict[str, dict[str, Any]] = {
    "in-batch": {"bank_size": 0},
    "in-batch, symmetric": {"bank_size": 0, **SYMMETRIC},
    "contaccum": {},
    "contaccum, symmetric": SYMMETRIC,
    "contaccum, four directions": {"directions": DIRECTIONS},
    "contaccum, margin -0.1": {"margin": -0.1},
    "contaccum, margin 5 %": {"margin": 0.05, "margin_strategy": "relative"},
    "contaccum, guide": {"margin": 0.0},
}
METRICS = ("NDCG@10", "MRR@10")


def main() -> None:
    args = arguments()
    rows = load_training_set(args.data, "train", args.train_limit).select_columns(["query", "positive"])
    rows = rows.select(range(len(rows) - len(rows) % args.n_total))
    evaluator = dev_evaluator(args.data, "test", args.corpus_limit, 42)
    results = []
    for seed in args.seeds:
        for lr in args.lrs:
            for name in args.variants:
                results.append(measure(name, lr, seed, args, rows, evaluator))
                print(json.dumps(results[-1]), flush=True)
                write(args, len(rows), results)


def write(args: argparse.Namespace, rows: int, results: list[dict[str, Any]]) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name != "json"}
    if args.json:
        args.json.write_text(
            json.dumps({"settings": settings, "rows": rows, "results": results, "provenance": provenance()}, indent=1) + "\n"
        )


def measure(
    name: str, lr: float, seed: int, args: argparse.Namespace, rows: Dataset, evaluator: InformationRetrievalEvaluator
) -> dict[str, Any]:
    set_seed(seed)
    model = SentenceTransformer(args.model, model_kwargs={"dtype": "float32"})
    guide = SentenceTransformer(args.guide, model_kwargs={"dtype": "float32"}) if "guide" in name else None
    options = VARIANTS[name]
    loss = ContAccumLoss(model, micro_batch_size=None if options.get("bank_size") == 0 else args.n_local, guide=guide, **options)
    left_out: list[float] = []
    loss.criterion.observers.append(
        lambda step: None if step.blocks.left_out is None else left_out.append(float(step.blocks.left_out) / len(step.rows))
    )
    with tempfile.TemporaryDirectory() as folder:
        training = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.n_total,
            learning_rate=lr,
            warmup_steps=round(0.1 * args.epochs * len(rows) / args.n_total),
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(model=model, args=training, train_dataset=rows, loss=loss)
        trainer.remove_callback(PrinterCallback)
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
    found = evaluator(model)
    metrics = {metric: round(float(found[f"{evaluator.name}_{model.similarity_fn_name}_{metric.lower()}"]), 4) for metric in METRICS}
    share = round(sum(left_out) / len(left_out), 2) if left_out else None
    return {"variant": name, "lr": lr, "seed": seed, **metrics, "left_out_per_query": share, "cpu_seconds": round(seconds)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="BEIR folder with the splits train and test")
    parser.add_argument("--model", required=True)
    parser.add_argument("--guide", help="model of the variant with a guide")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--n-local", type=int, default=8)
    parser.add_argument("--n-total", type=int, default=128)
    parser.add_argument("--train-limit", type=int)
    parser.add_argument("--corpus-limit", type=int, help="test over the relevant passages and at most so many others")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    if args.guide is None and any("guide" in name for name in args.variants):
        parser.error("the variant with a guide needs --guide MODEL; give one, or choose --variants")
    return args


if __name__ == "__main__":
    main()
