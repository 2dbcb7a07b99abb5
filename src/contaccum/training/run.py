"""From a training set to a model folder: one configuration, one function, one run folder.

A run folder holds `config.yaml` (resolved), `run.json` (commit, versions, machine, seed, data), `log.jsonl` (a line per update),
`diagnostics.jsonl`, with dev queries `dev.jsonl`,
`checkpoints/` until it is finished, and then `model/` and `summary.json`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, set_seed
from transformers.utils.logging import disable_progress_bar

from contaccum.adapters.losses import ContAccumLoss
from contaccum.adapters.trainer import ContAccumTrainer
from contaccum.common.console import hide_usual_load_reports, note, without_bars
from contaccum.common.outputs import read_json
from contaccum.common.sizes import parse_bytes
from contaccum.data.drawn_pairs import DrawPairs, drawn_kind, drawn_pairs
from contaccum.data.training_set import has_negatives, load_training_set, negative_columns, with_hard_negatives, without_blanks
from contaccum.memory.halving import HalvingTrainer
from contaccum.memory.limit import limit_memory, peak_bytes, process_peak_bytes
from contaccum.memory.plan import planned
from contaccum.memory.token_budget import TokenBudgetTrainer
from contaccum.methods.config import AUTO, TrainConfig, with_bank
from contaccum.methods.loss import build_loss
from contaccum.methods.table import Batches, get_method, split_update
from contaccum.methods.towers import build_towers
from contaccum.towers.cuda_graphs import check_graphs, graph_towers
from contaccum.towers.loading import check_vectors, check_words
from contaccum.towers.lora import has_two_adapters, merge_lora
from contaccum.towers.speed import check_compiler, check_unpadded, compile_towers, encoders, unpad_towers, unpads_by_itself
from contaccum.training.dev import DevLog, check_metric, dev_evaluator
from contaccum.training.diagnostics import Diagnostics
from contaccum.training.run_folder import (
    FileList,
    alone_in_run,
    as_resolved_before,
    begin,
    checkpoint_to_resume,
    finish,
    refuse_used_folder,
    remove_older,
)
from contaccum.training.runlog import EpochForDraws, Progress, RunLog
from contaccum.training.sound import check_weights, note_collapse
from contaccum.training.trainer_arguments import training_arguments, warm_up

FIRST_ROWS = 64  # whose words the tokenizer must know


def train(config: TrainConfig, resume: bool = False) -> dict[str, Any]:
    """Train as `config` says and return the summary. With `resume`, go on from the newest complete checkpoint."""
    config.check()
    run, main = Path(config.output), int(os.environ.get("RANK", "0")) == 0
    with ExitStack() as held:
        if resume and main and run.is_dir():
            held.enter_context(alone_in_run(run))
        return _train(config, run, resume, main, held)


def _train(config: TrainConfig, run: Path, resume: bool, main: bool, held: ExitStack) -> dict[str, Any]:
    """`held`: for how long this process is alone in the run folder."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    auto = [name for name, value in {"n_local": AUTO, "bank": "auto"}.items() if getattr(config, name) == value]
    if resume:
        config = as_resolved_before(run, config)
    _check_speed(config, torch.cuda.is_available(), processes)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if not resume and main:
        refuse_used_folder(run)
    if config.memory is not None and (cannot := limit_memory(parse_bytes(config.memory))) and main:
        note(cannot)
    dataset, draw, columns = _data(config, main)
    if config.n_local == AUTO:
        config = planned(config, len(columns), processes)
        if main:
            note(f"n_local={config.n_local}{', with gradient checkpointing' if config.gradient_checkpointing else ''}, as planned")
    method, by_tokens = get_method(config.method), config.local_tokens is not None
    batches = split_update(method, config.n_total, config.n_local, processes, config.whole_updates, by_tokens)
    config = _bank_for(config, batches, len(dataset), processes, main)
    config = replace(config, warmup_updates=warm_up(config, batches, processes, len(dataset)))
    checkpoint = checkpoint_to_resume(run, config, processes) if resume else None
    dev = _dev(config)
    hide_usual_load_reports()
    disable_progress_bar()  # of loading and saving weights: one bar at a time, the run's own
    set_seed(config.seed)
    model = build_towers(config)
    first = dataset[:FIRST_ROWS]
    check_words(model, [*first["query"], *first["positive"]])
    check_vectors(model, first["query"], first["positive"])
    if main:
        _say_adapters(config, model)
    config = _prepare_towers(config, model)
    labelled = isinstance(draw, DrawPairs) and draw.labelled
    loss = build_loss(config, model, batches, gather_across_devices=processes > 1, mask_labels=labelled)
    config = replace(config, drift_correction=loss.criterion.drift_correction)
    with without_bars():
        model.model_card_data.set_widget_examples(dataset)  # the trainer, when it is made, would do so with a bar of its own
    if main and not resume:
        held.enter_context(alone_in_run(run))
    log = RunLog(run / "log.jsonl", loss.criterion, config.log_every, writes=main)
    trainer = _trainer_kind(config, "n_local" in auto)(
        model=model,
        args=training_arguments(config, batches, processes, len(dataset), columns),
        train_dataset=dataset,
        loss=loss,
        evaluator=dev,
        callbacks=_callbacks(config, run, loss, log, draw, main),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if main and not resume:
        begin(run, config, processes, auto)
    updates_before, best = _before(checkpoint)  # which training may delete
    if main and checkpoint is not None:
        remove_older(checkpoint, config.keep_checkpoints, best)
    started, cpu_started = time.perf_counter(), time.process_time()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    summary = _summary(config, trainer, loss, log, time.perf_counter() - started, updates_before)
    summary |= {"cpu_seconds": time.process_time() - cpu_started, "threads": torch.get_num_threads()}
    if main:
        check_weights(model)
        note_collapse(log.written)
        if has_two_adapters(model):
            merge_lora(model)
        finish(run, model, summary, config.checkpoints_at_end)
    return summary


def _bank_for(config: TrainConfig, batches: Batches, rows: int, processes: int, main: bool) -> TrainConfig:
    """`config` with its bank as a number; ValueError where the data is too small for it or for a batch."""
    if batches.per_process * processes > rows:
        raise ValueError(f"a batch of {batches.per_process * processes} is larger than the training set of {rows} rows")
    if config.n_total > rows:
        raise ValueError(f"n_total={config.n_total} is more than the training set's {rows} rows; use at most that many")
    auto, config = config.bank == "auto", with_bank(config, batches.micro_batch * processes, rows)
    if not get_method(config.method).bank:
        return replace(config, bank=0)
    if config.bank_size > rows:
        raise ValueError(f"bank={config.bank} is larger than the training set of {rows} rows; use at most that many")
    if auto and main:
        note(f"bank={config.bank}, for updates of {config.n_total} and {rows:,} rows")
    return config


def _dev(config: TrainConfig) -> InformationRetrievalEvaluator | None:
    if config.dev is None:
        return None
    check_metric(config.dev_metric)
    return dev_evaluator(config.dev, config.dev_split, config.dev_passages, config.seed)


def _trainer_kind(config: TrainConfig, auto: bool) -> Callable[..., ContAccumTrainer]:
    """`auto`: its micro-batches may turn out too large."""
    method = get_method(config.method)
    if config.local_tokens is not None and not method.cached:
        return partial(TokenBudgetTrainer, tokens=config.local_tokens, padded=not config.unpad)
    return HalvingTrainer if auto and not method.one_batch else ContAccumTrainer


def _check_speed(config: TrainConfig, cuda: bool, processes: int) -> None:
    if config.local_tokens is not None and processes > 1 and not get_method(config.method).cached:
        raise ValueError(
            f"local_tokens={config.local_tokens} cuts micro-batches by the texts of one process, and {processes} would cut differently; "
            "use n_local"
        )
    if config.torch_compile:
        check_compiler(cuda)
    if config.unpad:
        check_unpadded(config.precision, config.torch_compile, cuda)
    if config.cuda_graphs:
        check_graphs(config.gradient_checkpointing, bool(config.unpad), cuda, processes)


def _prepare_towers(config: TrainConfig, model: SentenceTransformer) -> TrainConfig:
    """`config` with `unpad` as it was decided."""
    if config.unpad is None:
        config = replace(config, unpad=not config.cuda_graphs and unpads_by_itself(model, config.precision))
    if config.gradient_checkpointing:  # here: not every sentence-transformers takes it from every transformers' trainer
        for encoder in encoders(model):
            encoder.gradient_checkpointing_enable({"use_reentrant": False})
    if config.unpad:
        unpad_towers(model)
    if config.torch_compile:
        compile_towers(model)
    if config.cuda_graphs:
        graph_towers(model)
    return config


def _say_adapters(config: TrainConfig, model: SentenceTransformer) -> None:
    if config.lora_rank is None:
        return
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    twice = "" if config.tied else ", each tower its own; --tied has one tower"
    print(f"note: adapters of {trained:,} weights are trained, on {frozen / 1e9:.2f} GB of frozen ones{twice}")


def _before(checkpoint: Path | None) -> tuple[int, str | None]:
    """Updates until this checkpoint, and the best one until then."""
    state = {} if checkpoint is None else read_json(checkpoint / "trainer_state.json")
    return int(state.get("global_step", 0)), state.get("best_model_checkpoint")


def _summary(
    config: TrainConfig, trainer: ContAccumTrainer, loss: ContAccumLoss, log: RunLog, seconds: float, updates_before: int
) -> dict[str, Any]:
    updates = trainer.state.global_step
    return {
        "method": config.method,
        "updates": updates,
        "samples_per_second": (updates - updates_before) * config.n_total / seconds,
        "seconds": seconds,
        "final_loss": log.final_loss(),
        "negatives_per_query": log.most_negatives,
        "peak_bytes": peak_bytes(),
        "process_peak_bytes": process_peak_bytes(),
        "bank_bytes": loss.criterion.bank.nbytes,
        "resumed_at_update": updates_before or None,
        "halvings": getattr(trainer, "halvings", 0),
        "dev_best": trainer.state.best_metric,
        "dev_best_update": trainer.state.best_global_step,
    }


def _data(config: TrainConfig, main: bool) -> tuple[Dataset, Any, list[str]]:
    if (kind := drawn_kind(config.data)) is not None:
        if config.hard_negatives:
            raise ValueError(f"hard_negatives={config.hard_negatives}: pairs drawn from {config.data} have none; leave it out")
        return *drawn_pairs(config.data, kind, config.split, config.limit, config.seed), []
    loaded = load_training_set(config.data, config.split, config.limit)
    dataset = without_blanks(loaded)
    if main and len(dataset) < len(loaded):
        note(f"{len(loaded) - len(dataset):,} of {len(loaded):,} rows have a blank query or positive and are left out")
    wanted = config.hard_negatives
    if wanted is None:
        wanted = int(has_negatives(dataset))
    table, draw = with_hard_negatives(dataset, wanted, config.seed)
    if main and len(table) < len(dataset):
        note(f"{len(dataset) - len(table):,} of {len(dataset):,} rows have fewer than {wanted} hard negatives and are left out")
    return table, draw, negative_columns(wanted) if wanted else []


def _callbacks(config: TrainConfig, run: Path, loss: ContAccumLoss, log: RunLog, draw: Any, main: bool) -> list[TrainerCallback]:
    watching: list[TrainerCallback] = [log, Progress(log, config.n_total), *([FileList()] if main else [])]
    if draw is not None:
        watching.append(EpochForDraws(draw))
    if config.diagnose_every or config.drift_every:
        every, mass_every = config.diagnose_every, 5 * config.diagnose_every
        watching.append(Diagnostics(run / "diagnostics.jsonl", loss, every, mass_every, config.drift_every, writes=main))
    if config.dev is not None:
        watching.append(DevLog(run / "dev.jsonl", config.similarity, config.dev_metric, writes=main))
    return watching
