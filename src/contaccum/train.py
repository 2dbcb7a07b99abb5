"""From a training set to a model folder: one configuration, one function, one run folder.

A run folder holds `config.yaml` (resolved), `run.json` (commit, versions, machine, seed), `log.jsonl` (a line per update),
`checkpoints/`, and when it is finished `model/` and `summary.json`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import PrinterCallback, ProgressCallback, set_seed

from contaccum.budget import limit_memory, parse_bytes, peak_bytes
from contaccum.data.training import load_training_set, negative_columns, with_hard_negatives
from contaccum.methods import Batches, build_loss, cut, get_method
from contaccum.provenance import provenance
from contaccum.runlog import EpochOf, Progress, RunLog
from contaccum.towers import dual_encoder
from contaccum.trainer import CheckpointError, ContAccumTrainer, last_complete_checkpoint

PRECISIONS = ("fp32", "bf16", "fp16")


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a run. The defaults are the paper's settings for Natural Questions, but for the model's and data's names."""

    data: str = option("", "training set: a BEIR folder, a .jsonl file or a saved data set")
    output: str = option("", "run folder to write")
    model: str = option("bert-base-uncased", "hub name, model folder, folder with a pair of encoders, or DPR checkpoint")
    passage_model: str | None = option(None, "the passage tower's source, where it is another")
    tokenizer: str | None = option(None, "the tokenizer's source, where the model has none")
    tied: bool = option(False, "one tower for queries and passages")
    pooling: str = option("cls", "cls, mean or lasttoken")
    similarity: str = option("dot", "dot or cosine")
    scale: float | None = option(None, "factor on the similarity; left out: 1 for dot, 20 for cosine")
    max_seq_length: int = option(256, "tokens per text")
    method: str = option("contaccum", "dpr, gradaccum, gradcache, prebatch, contaccum, ...: see contaccum train --help")
    n_total: int = option(128, "samples per update, over all processes")
    n_local: int = option(8, "samples whose activations fit in memory at once, per process")
    bank: int = option(2048, "tuples in the bank")
    query_bank: int | None = option(None, "queries in the bank, where fewer")
    start_update: int = option(0, "updates before which there is no bank")
    query_bank_stop_update: int | None = option(None, "update from which on the query bank is off")
    cache_hard_negatives: bool = option(True, "bank hard negatives too")
    mask_duplicates: bool = option(True, "equal texts are never each other's negatives")
    reduction: str = option("paper", "paper or local")
    bank_dtype: str | None = option(None, "precision of the bank: float32 or bfloat16")
    hard_negatives: int | None = option(None, "hard negatives per query, drawn anew each epoch; left out: 1 where the data has them")
    epochs: float = option(40, "passes over the data")
    max_updates: int | None = option(None, "stop after this many updates instead")
    lr: float = option(2e-5, "peak learning rate")
    warmup_updates: int = option(1237, "updates of linear warm-up; a tenth of the run where it is shorter than that")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    adam_eps: float = option(1e-8, "AdamW's epsilon")
    max_grad_norm: float = option(2.0, "gradient clipping; 0: none")
    precision: str = option("fp32", "fp32, bf16 or fp16 (autocast)")
    memory: str | None = option(None, "hold the CUDA allocator to this, as 11GB")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    torch_compile: bool = option(False, "compile the towers")
    seed: int = option(42, "seed of weights, order, dropout and drawn negatives")
    split: str = option("train", "split of a BEIR folder to train on")
    limit: int | None = option(None, "train on the first so many rows")
    save_every: int = option(500, "updates between checkpoints; 0: none")
    keep_checkpoints: int = option(2, "checkpoints kept")
    log_every: int = option(10, "updates between writes to the log")
    workers: int = option(0, "processes that tokenise ahead")
    report_to: str = option("none", "none, tensorboard, wandb, ...")

    def check(self) -> None:
        """ValueError that names the first value that cannot be."""
        if not self.data:
            raise ValueError("no training set: give --data")
        if not self.output:
            raise ValueError("no run folder: give --output")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
        if self.bank_dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"bank_dtype {self.bank_dtype!r} is unknown; choose float32 or bfloat16")
        for name in ("lr", "epochs", "max_seq_length", "log_every", "keep_checkpoints"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("bank", "warmup_updates", "save_every", "max_grad_norm", "weight_decay", "workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; use 0 or more")
        if self.precision != "fp32" and self.precision == "fp16" and not torch.cuda.is_available():
            raise ValueError("precision fp16 needs a CUDA device; use bf16 or fp32")
        get_method(self.method)
        if self.memory is not None:
            parse_bytes(self.memory)


def load_config(file: str | Path | None, overrides: dict[str, Any]) -> TrainConfig:
    """A YAML of fields, if given, with single ones overridden."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"{file} cannot be read as YAML: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file} must hold fields and values, as 'lr: 2.0e-5'")
    known = {f.name: f for f in fields(TrainConfig)}
    values = {**values, **overrides}
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{file or 'the configuration'} has an unknown field {unknown[0]!r}; known are {', '.join(known)}")
    return TrainConfig(**{name: _coerce(name, value, str(known[name].type)) for name, value in values.items()})


def _coerce(name: str, value: Any, kind: str) -> Any:
    """YAML reads 2e-5 as a text and 40 as a whole number; everything else must have its type."""
    if value is None and "None" in kind:
        return None
    base = kind.replace(" | None", "")
    try:
        if base == "float" and not isinstance(value, bool):
            return float(value)
        if base == "int" and not isinstance(value, bool) and int(value) == float(value):
            return int(value)
    except (TypeError, ValueError):
        pass
    if (base == "bool" and isinstance(value, bool)) or (base == "str" and isinstance(value, str)):
        return value
    raise ValueError(f"{name}={value!r} is not of type {base}")


def train(config: TrainConfig, resume: bool = False) -> dict[str, Any]:
    """Train as `config` says and return the summary. With `resume`, go on from the newest complete checkpoint."""
    config.check()
    run = Path(config.output)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    main = int(os.environ.get("RANK", "0")) == 0
    checkpoint = _checkpoint_to_resume(run, config) if resume else None
    if not resume and main:
        _refuse_used_folder(run)
    method, batches = get_method(config.method), cut(get_method(config.method), config.n_total, config.n_local, processes)
    if config.memory is not None and (cannot := limit_memory(parse_bytes(config.memory))) and main:
        print(f"note: {cannot}")

    dataset, draw, columns = _data(config, main)
    if method.bank and config.bank > len(dataset):
        raise ValueError(f"bank={config.bank} is larger than the training set of {len(dataset)} rows; use at most that many")
    if batches.per_process * processes > len(dataset):
        raise ValueError(f"a batch of {batches.per_process * processes} is larger than the training set of {len(dataset)} rows")
    set_seed(config.seed)
    model = dual_encoder(
        config.model,
        config.passage_model,
        tied=config.tied,
        pooling=config.pooling,
        similarity=config.similarity,
        max_seq_length=config.max_seq_length,
        tokenizer=config.tokenizer,
    )
    loss = build_loss(
        method,
        model,
        batches,
        config.bank,
        config.query_bank,
        config.similarity,
        scale=config.scale or {"dot": 1.0, "cosine": 20.0}[config.similarity],
        gather_across_devices=processes > 1,
        start_update=config.start_update,
        query_bank_stop_update=config.query_bank_stop_update,
        cache_hard_negatives=config.cache_hard_negatives,
        mask_duplicates=config.mask_duplicates,
        reduction=config.reduction,
        bank_dtype=getattr(torch, config.bank_dtype) if config.bank_dtype else None,
    )
    log = RunLog(run / "log.jsonl", loss.criterion, config.log_every, writes=main)
    trainer = ContAccumTrainer(
        model=model,
        args=_arguments(config, batches, processes, len(dataset), columns),
        train_dataset=dataset,
        loss=loss,
        callbacks=[log, Progress(log, config.n_total), *([EpochOf(draw)] if draw else [])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if main:
        _claim(run, config)
    started = time.perf_counter()
    first_update = 0 if checkpoint is None else json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.perf_counter() - started
    updates = trainer.state.global_step
    summary = {
        "method": config.method,
        "updates": updates,
        "samples_per_second": (updates - first_update) * config.n_total / seconds,
        "seconds": seconds,
        "final_loss": log.last.get("loss"),
        "negatives_per_query": log.last.get("negatives_per_query"),
        "peak_bytes": peak_bytes(),
        "bank_bytes": loss.criterion.bank.nbytes,
        "resumed_at_update": first_update or None,
    }
    if main:
        _finish(run, model, summary)
    return summary


def _checkpoint_to_resume(run: Path, config: TrainConfig) -> Path | None:
    """The newest complete checkpoint of the same run; None where it was killed before its first."""
    stored = run / "config.yaml"
    if not stored.exists():
        raise ValueError(f"{run} holds no run to resume; start it without --resume")
    before = asdict(load_config(stored, {}))
    changed = {k: v for k, v in asdict(config).items() if before[k] != v and k != "output"}
    if changed:
        name, value = next(iter(changed.items()))
        raise ValueError(f"{run} was started with {name}={before[name]!r}, not {value!r}; resume it unchanged or use another --output")
    if (run / "summary.json").exists():
        raise ValueError(f"{run} is finished: its model is in {run / 'model'}")
    try:
        return last_complete_checkpoint(run / "checkpoints")
    except CheckpointError:
        return None


def _refuse_used_folder(run: Path) -> None:
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise ValueError(f"{run} is not empty; use --resume to go on with a run there, or another --output")


def _claim(run: Path, config: TrainConfig) -> None:
    """Only now, when nothing of the input can be refused any more, is anything written."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False), encoding="utf-8")
    (run / "run.json").write_text(json.dumps(provenance(config.seed), indent=1) + "\n", encoding="utf-8")


def _data(config: TrainConfig, main: bool) -> tuple[Dataset, Any, list[str]]:
    dataset = load_training_set(config.data, config.split, config.limit)
    wanted = config.hard_negatives
    if wanted is None:
        wanted = int(any(len(negatives) for negatives in dataset["negatives"]))
    table, draw = with_hard_negatives(dataset, wanted, config.seed)
    if main and len(table) < len(dataset):
        print(f"note: {len(dataset) - len(table):,} of {len(dataset):,} rows have fewer than {wanted} hard negatives and are left out")
    return table, draw, negative_columns(wanted) if wanted else []


def _arguments(
    config: TrainConfig, batches: Batches, processes: int, rows: int, negatives: list[str]
) -> SentenceTransformerTrainingArguments:
    per_epoch = math.ceil(rows / (batches.per_process * processes) / batches.accumulation)
    updates = config.max_updates or math.ceil(config.epochs * per_epoch)
    routes = {} if config.tied else {"query": "query", **dict.fromkeys(["positive", *negatives], "document")}
    return SentenceTransformerTrainingArguments(
        output_dir=str(Path(config.output) / "checkpoints"),
        per_device_train_batch_size=batches.per_process,
        gradient_accumulation_steps=batches.accumulation,
        num_train_epochs=config.epochs,
        max_steps=config.max_updates or -1,
        learning_rate=config.lr,
        lr_scheduler_type="linear",
        warmup_steps=config.warmup_updates if config.warmup_updates < updates else updates // 10,
        weight_decay=config.weight_decay,
        adam_epsilon=config.adam_eps,
        max_grad_norm=config.max_grad_norm,
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        gradient_checkpointing=config.gradient_checkpointing,
        torch_compile=config.torch_compile,
        seed=config.seed,
        save_strategy="steps" if config.save_every else "no",
        save_steps=config.save_every or 500,
        save_total_limit=config.keep_checkpoints,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # would wait for the device at every micro-step
        dataloader_num_workers=config.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_drop_last=processes > 1,  # processes must agree on the number of micro-batches
        # Each forward uses one tower. Looking for unused parameters then would take the other tower for such; but GradCache's replay, where
        # only the last mini-batch synchronises, needs just that.
        ddp_find_unused_parameters=batches.mini is not None,
        router_mapping=routes,
        report_to=config.report_to,
        use_cpu=not torch.accelerator.is_available(),  # without this, several processes on CPUs would each train alone
        disable_tqdm=True,
    )


def _finish(run: Path, model: Any, summary: dict[str, Any]) -> None:
    """The model first, whole or not at all; then the summary, which says that the run is finished."""
    part = run / "model.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        model.save_pretrained(str(part))
        part.replace(run / "model")
        (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    except Exception as error:
        raise CheckpointError(f"could not save {run / 'model'}: {error}; make room and go on with --resume") from error
