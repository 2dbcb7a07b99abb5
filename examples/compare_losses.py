"""Three losses in sentence-transformers' own trainer, judged by its own evaluator.

    python examples/compare_losses.py --data BEIR_FOLDER --model sentence-transformers/all-MiniLM-L6-v2
    python examples/compare_losses.py --data BEIR_FOLDER --model MODEL --train-limit 1280 --corpus-limit 2000 --json losses.json

1. MultipleNegativesRankingLoss: batches of n, gradients accumulated over N / n of them.
2. CachedMultipleNegativesRankingLoss: batches of N in mini-batches of n. It embeds every text twice.
3. ContAccumLoss with its defaults: batches of n, gradients accumulated over N / n of them, and a ContAccumCallback.

Equal for all: the model in float32 as loaded, the rows and their order, the seed, the learning rate with 10 % warmup and linear decay, the
updates, n and N. Rows that fill no whole update are left out. Dropout draws differ once the losses use random numbers differently.
Not equal: ContAccumLoss masks equal texts in a batch, the other two take them as negatives. The table says how many rows share a text;
with `--no-duplicates` no batch holds a text twice, but batches of n and of N then hold other rows.

Trained on qrels/train, tested on qrels/test. Seconds are those of training, the first method's start-up included. Use one device.
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
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss
from torch import nn
from transformers import PrinterCallback, TrainerCallback, set_seed

from contaccum import ContAccumCallback, ContAccumLoss
from contaccum.common.provenance import provenance
from contaccum.data.training_set import load_training_set
from contaccum.training.dev import dev_evaluator

METHODS = {"mnrl": "MultipleNegativesRankingLoss", "cached": "CachedMultipleNegativesRankingLoss", "contaccum": "ContAccumLoss"}
METRICS = ("NDCG@10", "MRR@10")


def main() -> None:
    args = arguments()
    rows = load_training_set(args.data, "train", args.train_limit).select_columns(["query", "positive"])
    rows = rows.select(range(len(rows) - len(rows) % args.update_size))
    if not len(rows):
        raise SystemExit(f"the training rows fill no update of {args.update_size}; give more, or a smaller --update-size")
    evaluator = dev_evaluator(args.data, "test", args.corpus_limit, args.seed)
    results = [measure(name, args, rows, evaluator) for name in args.methods]

    shared = max(len(rows) - len(set(rows[name])) for name in rows.column_names)
    print(f"\n{len(rows)} rows ({shared} repeat a text), {len(rows) // args.update_size} updates of {args.update_size} an epoch", end="; ")
    print(f"{len(evaluator.queries)} test queries, {len(evaluator.corpus)} passages")
    print(f"{'':36}{'NDCG@10':>10}{'MRR@10':>10}{'seconds':>10}")
    for row in results:
        print(f"{row['loss']:36}{row['NDCG@10']:10.4f}{row['MRR@10']:10.4f}{row['seconds']:10.1f}")
    if args.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        result = {"settings": settings, "rows": len(rows), "repeats": shared, "results": results, "provenance": provenance(args.seed)}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, args: argparse.Namespace, rows: Dataset, evaluator: InformationRetrievalEvaluator) -> dict[str, Any]:
    """One method from the same weights: trained, then tested."""
    set_seed(args.seed)
    model = SentenceTransformer(args.model, model_kwargs={"dtype": "float32"})  # weights may be stored in half precision
    loss: nn.Module
    if name == "mnrl":
        loss = MultipleNegativesRankingLoss(model, **args.loss_options)
    elif name == "cached":
        loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=args.batch_size, **args.loss_options)
    else:
        loss = ContAccumLoss(model, **args.loss_options)
    batch = args.update_size if name == "cached" else args.batch_size
    with tempfile.TemporaryDirectory() as folder:
        training = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=args.update_size // batch,
            learning_rate=args.lr,
            lr_scheduler_type="linear",
            warmup_steps=round(0.1 * args.epochs * len(rows) / args.update_size),
            batch_sampler="no_duplicates" if args.no_duplicates else "batch_sampler",
            bf16=args.bf16,
            seed=args.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        callbacks: list[TrainerCallback] = [ContAccumCallback(loss)] if isinstance(loss, ContAccumLoss) else []
        trainer = SentenceTransformerTrainer(model=model, args=training, train_dataset=rows, loss=loss, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    found = evaluator(model)
    metrics = {metric: float(found[f"{evaluator.name}_{model.similarity_fn_name}_{metric.lower()}"]) for metric in METRICS}
    return {"method": name, "loss": METHODS[name], **metrics, "seconds": seconds, "updates": trainer.state.global_step}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="BEIR folder with the splits train and test")
    parser.add_argument("--model", required=True, help="what SentenceTransformer loads: a name or a folder")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="n, the samples whose activations are alive at once")
    parser.add_argument("--update-size", type=int, default=128, help="N, the samples of an update")
    parser.add_argument("--seed", type=int, default=42)
    options = 'arguments that all three losses have, as JSON: \'{"directions": ["query_to_doc", "doc_to_query"]}\''
    parser.add_argument("--loss-options", type=json.loads, default={}, help=options)
    parser.add_argument("--train-limit", type=int, help="train on the first so many rows")
    parser.add_argument("--corpus-limit", type=int, help="test over the relevant passages and at most so many others")
    parser.add_argument("--no-duplicates", action="store_true", help="no batch holds a text twice")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    if args.batch_size < 1 or args.update_size < 1 or args.update_size % args.batch_size:
        parser.error(f"--update-size {args.update_size} must be a multiple of --batch-size {args.batch_size}")
    return args


if __name__ == "__main__":
    main()
