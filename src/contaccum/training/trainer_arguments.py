"""A configuration as the trainer's arguments."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from contaccum.methods.config import TrainConfig
from contaccum.methods.table import Batches
from contaccum.training.dev import metric_key

MOST_AHEAD = 512  # micro-batches that wait to be trained on


def training_arguments(
    config: TrainConfig, batches: Batches, processes: int, rows: int, negatives: list[str]
) -> SentenceTransformerTrainingArguments:
    updates = _updates(config, batches, processes, rows)
    if config.dev is not None and config.dev_every > updates:
        raise ValueError(f"dev_every={config.dev_every} is more than the run's {updates} updates; use a smaller one")
    keeps_best = config.dev is not None and config.save_every > 0  # without checkpoints dev metrics are a curve, and the last model stays
    save_every = config.dev_every if keeps_best else config.save_every  # the best model is one of those saved
    columns = ["positive", *negatives]
    prompts = {"query": config.query_prompt, **dict.fromkeys(columns, config.passage_prompt)}
    routes = {} if config.tied else {"query": "query", **dict.fromkeys(columns, "document")}
    workers = tokenizing_workers(config)
    return SentenceTransformerTrainingArguments(
        output_dir=str(Path(config.output) / "checkpoints"),
        per_device_train_batch_size=batches.per_process,
        gradient_accumulation_steps=batches.accumulation,
        num_train_epochs=config.epochs,
        max_steps=config.max_updates or -1,
        learning_rate=config.lr,
        optim="adamw_torch_fused",  # transformers' default from PyTorch 2.8 on
        lr_scheduler_type="linear",
        warmup_steps=warm_up(config, batches, processes, rows),
        weight_decay=config.weight_decay,
        adam_epsilon=config.adam_eps,
        max_grad_norm=config.max_grad_norm,
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        tf32=config.tf32 or None,
        seed=config.seed,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or 500,
        eval_strategy="no" if config.dev is None else "steps",
        eval_steps=config.dev_every,
        load_best_model_at_end=keeps_best,
        metric_for_best_model=metric_key(config.dev_metric, config.similarity) if keeps_best else None,
        save_total_limit=config.keep_checkpoints,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # would wait for the device at every micro-step
        dataloader_num_workers=workers,
        dataloader_prefetch_factor=prefetched(workers, batches.accumulation),
        dataloader_pin_memory=torch.cuda.is_available(),
        accelerator_config={"non_blocking": torch.cuda.is_available()},  # does not wait for the copy of a pinned batch
        dataloader_drop_last=processes > 1,  # processes must agree on the number of micro-batches
        # Each forward uses one tower. Looking for unused parameters then would take the other tower for such; but GradCache's replay, where
        # only the last mini-batch synchronises, needs just that.
        ddp_find_unused_parameters=batches.mini is not None,
        router_mapping=routes,
        prompts={column: prompt for column, prompt in prompts.items() if prompt},
        report_to=_reports(config.report_to),
        use_cpu=not torch.accelerator.is_available(),  # without this, several processes on CPUs would each train alone
        disable_tqdm=True,
    )


def _reports(names: str) -> list[str]:
    """Where else to log, each of them installed."""
    reports = [name.strip() for name in names.split(",")]
    for name in reports:
        if name not in ("none", "all", *get_available_reporting_integrations()):
            raise ValueError(f"report_to={name} is not installed, or not known; pip install {name}, or leave it out")
    return reports


def _updates(config: TrainConfig, batches: Batches, processes: int, rows: int) -> int:
    per_epoch = math.ceil(rows / (batches.per_process * processes) / batches.accumulation)
    return config.max_updates or math.ceil(config.epochs * per_epoch)


def warm_up(config: TrainConfig, batches: Batches, processes: int, rows: int) -> int:
    """Its updates; a tenth of the run where it would be longer than the run."""
    updates = _updates(config, batches, processes, rows)
    return config.warmup_updates if config.warmup_updates < updates else updates // 10


def tokenizing_workers(config: TrainConfig) -> int:
    workers = (2 if torch.cuda.is_available() else 0) if config.workers is None else config.workers
    if workers:
        _forked_tokenise_alone()
    return workers


def prefetched(workers: int, accumulation: int) -> int | None:
    """Micro-batches that each worker makes ahead: those of a whole update together, as the trainer asks for them at once. With fewer a GPU
    waits at the start of every update."""
    return None if workers == 0 else max(2, math.ceil(min(accumulation, MOST_AHEAD) / workers))


@cache
def _forked_tokenise_alone() -> None:
    """A tokenizer's threads do not follow into a forked process; with TOKENIZERS_PARALLELISM=true it would wait forever."""
    if hasattr(os, "register_at_fork"):  # where processes are forked at all
        os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))
