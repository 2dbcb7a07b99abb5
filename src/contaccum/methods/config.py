"""What decides a training run: one flat configuration, from YAML, with every field overridable. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from contaccum.common.inputs import read_yaml
from contaccum.common.sizes import parse_bytes
from contaccum.core.bank_size import auto_bank
from contaccum.methods.table import METHODS, get_method

CHOICES: dict[str, tuple[str | None, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "bank_dtype": (None, "float32", "bfloat16"),
    "pooling": ("cls", "mean", "lasttoken", "own"),
    "similarity": ("dot", "cosine"),
    "gradient_scale": ("in-batch", "paper"),
    "drift_correction": ("auto", "mean+zero-sum", "mean", None),
    "partition_mode": ("joint", "per_direction"),
    "margin_strategy": ("absolute", "relative"),
    "weights_dtype": ("float32", "bfloat16"),
    "quantize": ("4bit", None),
}
ABOVE_0 = (
    *("lr", "epochs", "max_seq_length", "log_every", "keep_checkpoints", "dev_every", "max_updates", "limit", "adam_eps"),
    *("local_tokens", "threads"),
)
UNLIMITED = ("max_updates", "limit")  # where left out
NOT_NEGATIVE = (
    *("warmup_updates", "save_every", "max_grad_norm", "weight_decay", "workers", "diagnose_every", "drift_every"),
    *("bank", "hard_negatives", "dev_passages", "seed"),
)
AUTO = 0  # n_local before it is planned


FIRST = "The ten that matter first"
DATA, MODEL, METHOD, SCHEDULE = "Data", "Model", "Method", "Schedule"
MEMORY, SAVING, EVALUATION = "Memory and speed", "Saving and logging", "Evaluation during training"
GROUPS = (FIRST, DATA, MODEL, METHOD, SCHEDULE, MEMORY, SAVING, EVALUATION)  # as `contaccum train --help` shows them

MOST_EPOCHS, LARGEST_SCALE = 1_000_000, 1_000_000
LARGEST_LR = 1e30  # which spoils all weights at once; more, AdamW cannot compute with


def option(group: str, default: Any, text: str, accepts: str | None = None) -> Any:
    """A field with its help; `accepts`: a word that may be given in place of a number."""
    return field(default=default, metadata={"help": text, "accepts": accepts, "group": group})


@dataclass(frozen=True)
class TrainConfig:
    """All that decides a run. The defaults are the paper's for Natural Questions, but for the bank, its correction, gradients and names."""

    data: str = option(FIRST, "", "training set: a BEIR folder, a .jsonl file or a saved data set")
    output: str = option(FIRST, "", "run folder to write")
    model: str = option(FIRST, "bert-base-uncased", "hub name, model folder, folder with a pair of encoders, or DPR checkpoint")
    passage_model: str | None = option(MODEL, None, "model of the passage tower, if it is another one")
    tokenizer: str | None = option(MODEL, None, "hub name or folder of the tokenizer, if the model has none")
    tied: bool = option(MODEL, False, "one tower for queries and passages")
    pooling: str = option(MODEL, "cls", "cls, mean or lasttoken; own: the modules that a SentenceTransformer is saved with")
    similarity: str = option(MODEL, "dot", "dot or cosine")
    scale: float | None = option(MODEL, None, "factor on the similarities; left out: 1 for dot, 20 for cosine")
    max_seq_length: int = option(MODEL, 256, "tokens per text, prompt included")
    query_prompt: str | None = option(MODEL, None, "put before each query; saved with the model")
    passage_prompt: str | None = option(MODEL, None, "put before each passage; saved with the model")
    include_prompt: bool = option(MODEL, True, "pool the prompt's tokens too")
    lora_rank: int | None = option(MODEL, None, "freeze the towers and train adapters of this rank")
    lora_alpha: float | None = option(MODEL, None, "what adapters add is multiplied by this over the rank; left out: twice the rank")
    lora_dropout: float = option(MODEL, 0.0, "dropout before adapters")
    lora_targets: str | None = option(
        MODEL, None, "layers to adapt, as q_proj,v_proj; left out: all linear layers of the transformer's blocks"
    )
    method: str = option(FIRST, "contaccum", "; ".join(f"{name}: {method.summary}" for name, method in METHODS.items()))
    n_total: int = option(FIRST, 128, "samples per update, over all processes")
    n_local: int = option(FIRST, 8, "samples that fit in memory at once, per process; auto: as many as fit in --memory", accepts="auto")
    local_tokens: int | None = option(
        MEMORY, None, "cut an update into micro-batches of at most this many tokens, padding included, instead of n_local samples"
    )
    whole_updates: bool = option(
        MEMORY, False, "encode n_total at once and compute the loss in slices: same gradients, faster, needs that memory"
    )
    bank: int | str = option(FIRST, "auto", "tuples in the bank; auto: 8 updates' worth, at most a sixteenth of the rows", accepts="auto")
    query_bank: int | None = option(METHOD, None, "queries in the bank, if fewer than tuples; 0: none")
    start_update: int = option(METHOD, 0, "updates without a bank at the start")
    query_bank_stop_update: int | None = option(METHOD, None, "leave banked queries out from this update on")
    cache_hard_negatives: bool = option(METHOD, True, "keep hard negatives in the bank too")
    mask_duplicates: bool = option(METHOD, True, "equal texts are never each other's negatives")
    drift_correction: str | None = option(
        METHOD,
        "auto",
        "mean: give stored vectors the present mean; mean+zero-sum: also take the common part off the passages' gradients; "
        "none: neither, as in the paper; auto: mean+zero-sum if the bank holds vectors of older weights",
    )
    gradient_scale: str = option(METHOD, "in-batch", "in-batch: as large as without a bank; paper: divided by the banked rows too")
    directions: str = option(
        METHOD,
        "query_to_doc",
        "comparisons, with commas: query_to_doc, doc_to_query (symmetric), query_to_query, doc_to_doc (all four: GTE)",
    )
    partition_mode: str = option(METHOD, "joint", "one softmax over all directions (joint), or per_direction")
    margin: float | None = option(
        METHOD, None, "leave out negatives that are more similar to the query than its positive minus this; -0.1 as Qwen3-Embedding"
    )
    margin_strategy: str = option(METHOD, "absolute", "absolute, or relative: minus this part of it; 0.05 as NV-Retriever")
    bank_dtype: str | None = option(METHOD, None, "type of the stored vectors: float32 or bfloat16")
    hard_negatives: int | None = option(DATA, None, "hard negatives per query, drawn again each epoch; left out: 1 if the data has any")
    epochs: float = option(FIRST, 40, "passes over the data")
    max_updates: int | None = option(SCHEDULE, None, "stop after this many updates, whatever --epochs says")
    lr: float = option(FIRST, 2e-5, "peak learning rate")
    warmup_updates: int = option(SCHEDULE, 1237, "updates of linear warm-up; in a run shorter than that, a tenth of the run")
    weight_decay: float = option(SCHEDULE, 0.0, "AdamW's weight decay")
    adam_eps: float = option(SCHEDULE, 1e-8, "AdamW's epsilon")
    max_grad_norm: float = option(SCHEDULE, 2.0, "clip gradients to this norm; 0: no clipping")
    precision: str = option(MEMORY, "fp32", "fp32, bf16 or fp16 (autocast)")
    memory: str | None = option(FIRST, None, "limit PyTorch's GPU memory to this, as 11GB")
    weights_dtype: str = option(MEMORY, "float32", "float32 or bfloat16; adapters are float32 in any case")
    quantize: str | None = option(MEMORY, None, "4bit: the frozen weights beneath adapters, by bitsandbytes")
    gradient_checkpointing: bool = option(MEMORY, False, "recompute activations in the backward pass")
    torch_compile: bool = option(MEMORY, False, "compile the towers' layers; takes time at the start")
    unpad: bool | None = option(
        MEMORY,
        None,
        "compute no padding (BERT, DistilBERT, ELECTRA, RoBERTa, XLM-RoBERTa); left out: on in half precision on NVIDIA GPUs since Ampere",
    )
    cuda_graphs: bool = option(
        MEMORY, False, "launch a tower's layers at once: faster if micro-batches are too small to fill the GPU; same encoders as --unpad"
    )
    tf32: bool = option(MEMORY, False, "faster, less exact fp32 matrix products, on NVIDIA GPUs since Ampere")
    seed: int = option(DATA, 42, "seed of weights, order, dropout and drawn negatives")
    split: str = option(DATA, "train", "split of a BEIR folder to train on")
    limit: int | None = option(DATA, None, "train on this many rows only, the first ones")
    save_every: int = option(SAVING, 500, "updates between checkpoints; 0: none")
    keep_checkpoints: int = option(SAVING, 2, "checkpoints kept while training")
    checkpoints_at_end: bool = option(SAVING, False, "keep them when the run has ended, too; each takes three times the model's room")
    log_every: int = option(SAVING, 10, "updates between writes to the log")
    diagnose_every: int = option(SAVING, 0, "write diagnostics.jsonl, with so many updates between two timings, as 10; 0: none")
    drift_every: int = option(SAVING, 0, "updates between two measurements of how far stored vectors have drifted; 0: none")
    dev: str | None = option(
        EVALUATION, None, "BEIR folder or prepared set with dev queries to search during training; the best model is kept"
    )
    dev_split: str = option(EVALUATION, "dev", "split of --dev")
    dev_every: int = option(EVALUATION, 100, "updates between two searches")
    dev_metric: str = option(EVALUATION, "MRR@10", "metric that chooses the best model: MRR, NDCG, Recall or Accuracy at 1, 10, 20 or 100")
    dev_passages: int | None = option(EVALUATION, None, "search the relevant passages and this many others instead of all")
    threads: int | None = option(MEMORY, None, "PyTorch's threads on a CPU; left out: its own choice")
    workers: int | None = option(DATA, None, "processes that tokenise ahead; left out: 2 on a GPU, else none")
    report_to: str = option(SAVING, "none", "also log to these, with commas: tensorboard, wandb, trackio, ...")

    @property
    def bank_size(self) -> int:
        """`bank` once it is a number, see `with_bank`."""
        assert isinstance(self.bank, int)
        return self.bank

    @property
    def direction_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.directions.split(","))

    def check(self) -> None:
        """ValueError that names the first value that cannot be, or not on this machine."""
        import torch

        if not self.data:
            raise ValueError("no training set: give --data")
        if not self.output:
            raise ValueError("no run folder: give --output")
        self.check_values()
        if self.precision == "fp16" and not torch.cuda.is_available():
            raise ValueError("precision fp16 needs a CUDA device; use bf16 or fp32")
        if self.tf32 and not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8):
            raise ValueError("tf32 needs an NVIDIA GPU of the Ampere generation or later; leave it out")

    def check_values(self) -> None:
        """ValueError that names the first value that cannot be."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join("none" if choice is None else choice for choice in choices)
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {listed}")
        for name, value in vars(self).items():
            if isinstance(value, str) and any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError(f"{name}={_shown(value)} holds a NUL or half of a surrogate pair, which no text or path can; leave it out")
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
        for name, value in numbers.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}={value} is not a finite number; give one, or leave it out")
        for name in ABOVE_0:
            if name in numbers and not numbers[name] > 0:
                raise ValueError(f"{name}={numbers[name]} must be above 0" + ("; leave it out for no limit" if name in UNLIMITED else ""))
        if self.bank != "auto" and not isinstance(self.bank, int):
            raise ValueError(f"bank={self.bank!r} is not a number of tuples; give one, or auto")
        for name in NOT_NEGATIVE:
            if numbers.get(name, 0) < 0:
                raise ValueError(f"{name}={numbers[name]} is negative; use 0 or more")
        for name, number in numbers.items():
            if isinstance(number, int) and abs(number) >= 2**63:
                raise ValueError(f"{name}={_shown(number)} is too large; use one below {2**63}")
        if self.epochs > MOST_EPOCHS:
            raise ValueError(f"epochs={self.epochs:g} is too many; use {MOST_EPOCHS:,} at most")
        if self.lr > LARGEST_LR:
            raise ValueError(f"lr={self.lr:g} is too large; use {LARGEST_LR:g} at most")
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} is too large; use one below {2**32}")
        if self.scale is not None and not 0 < self.scale <= LARGEST_SCALE:
            raise ValueError(f"scale={self.scale:g} must be above 0 and {LARGEST_SCALE:,} at most; leave it out for 1 (dot) or 20 (cosine)")
        if self.similarity == "cosine" and self.margin is not None and self.margin_strategy == "absolute" and self.margin >= 2:
            raise ValueError(f"margin={self.margin:g} leaves out all negatives, as cosines differ by 2 at most; use less, as -0.1")
        get_method(self.method)
        self.check_token_budget()
        self.check_adapters()
        self.check_comparison()
        if self.memory is not None:
            parse_bytes(self.memory)

    def check_token_budget(self) -> None:
        """ValueError for what cannot be with micro-batches by tokens."""
        if self.local_tokens is None:
            return
        if get_method(self.method).one_batch:
            raise ValueError(f"local_tokens={self.local_tokens} cuts an update, but {self.method} has one batch; leave it out")
        if self.n_local == AUTO or self.whole_updates:
            other = "n_local=auto" if self.n_local == AUTO else "whole_updates"
            raise ValueError(f"local_tokens={self.local_tokens} and {other} each say what is in memory at once; use one of them")
        if self.cuda_graphs:
            raise ValueError("cuda_graphs records every shape of a micro-batch, and by tokens there are too many; leave local_tokens out")

    def check_comparison(self) -> None:
        """ValueError for directions or a margin that cannot be."""
        from contaccum.core import checks, comparison  # with torch

        how = (self.direction_names, self.partition_mode)
        checks.check_comparison(comparison.Comparison(1.0, *how, margin=self.margin, margin_strategy=self.margin_strategy))

    def check_adapters(self) -> None:
        """ValueError for the first of these values that cannot be, alone or with the others."""
        for name, given, least in (("lora_rank", self.lora_rank, 1), ("lora_alpha", self.lora_alpha, 1e-9)):
            if given is not None and given < least:
                raise ValueError(
                    f"{name}={given} must be above 0; leave it out for {'no adapters' if name == 'lora_rank' else 'twice the rank'}"
                )
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout} is no share; use 0 or more and less than 1")
        if self.lora_rank is None:
            for name in ("lora_alpha", "lora_dropout", "lora_targets", "quantize"):
                if getattr(self, name):
                    raise ValueError(f"{name}={getattr(self, name)} is for adapters; give --lora-rank too, as 16, or leave it out")
        if self.quantize and not self.tied:
            raise ValueError("quantize=4bit is for one tower, as two are merged with their weights when they are saved; use --tied")
        if self.cuda_graphs and self.lora_rank is not None:
            raise ValueError("cuda_graphs does not record adapters; leave it or lora_rank out")
        if self.precision == "fp16" and self.weights_dtype == "bfloat16":
            raise ValueError("precision fp16 cannot scale the gradients of bfloat16 weights; use precision bf16")


def with_bank(config: TrainConfig, micro_batch: int = 1, rows: int | None = None) -> TrainConfig:
    """`config` with its bank as a number: where it says "auto", that of `auto_bank`."""
    return replace(config, bank=auto_bank(config.n_total, micro_batch, rows)) if config.bank == "auto" else config


def load_config(file: str | Path | None, overrides: dict[str, Any]) -> TrainConfig:
    """A YAML of fields, if given, with single ones overridden."""
    known = {f.name: f for f in fields(TrainConfig)}
    values = {**given_in(file), **overrides}
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{file or 'the configuration'} has an unknown field {unknown[0]!r}; known are {', '.join(known)}")
    return TrainConfig(**{name: typed(name, value) for name, value in values.items()})


def given_in(file: str | Path | None) -> dict[str, Any]:
    """What a YAML of fields says; nothing if there is none."""
    return {} if file is None else read_yaml(file, "give a YAML file of options")


def typed(name: str, value: Any) -> Any:
    """A field's value. YAML reads 2e-5 as a text and 40 as a whole number; everything else must have its type."""
    kind = str(TrainConfig.__annotations__[name])
    if value is None and "None" in kind:
        return None
    if name == "drift_correction" and value == "none":
        return None
    if name == "bank" and value == "auto":
        return value
    if name == "n_local" and value == "auto":
        return AUTO
    if name == "n_local" and str(value) == "0":
        raise ValueError("n_local=0 must be at least 1, or auto")
    base = kind.replace(" | None", "").replace("int | str", "int")
    try:
        if base == "float" and not isinstance(value, bool):
            return float(value)
        if base == "int" and not isinstance(value, bool) and int(value) == float(value):
            return int(value)
    except (OverflowError, TypeError, ValueError):
        pass
    if (base == "bool" and isinstance(value, bool)) or (base == "str" and isinstance(value, str)):
        return value
    raise ValueError(f"{name}={_shown(value)} is not of type {base}" + (", nor auto" if name in ("n_local", "bank") else ""))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
