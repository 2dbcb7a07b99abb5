"""LoRA through peft: each tower is frozen, and gets two thin matrices beside every linear layer of its blocks, which alone are trained.

One tower is saved as sentence-transformers saves adapters: without its base, which is found again by name. Two towers lie in sub-folders
of one model, and sentence-transformers looks for the base in a sub-folder, too. `AdaptedTransformer` puts that right for checkpoints,
which are read by the training that wrote them. A finished model of two towers is merged, so that it loads everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn
from transformers import PreTrainedModel

from contaccum.towers.speed import stacks, towers

READS_ADAPTERS = "5.8"  # the transformers that does, with peft 0.19


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float  # what an adapter adds is multiplied by alpha / rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # names of layers; none: all linear layers of the blocks


def add_lora(model: SentenceTransformer, lora: Lora) -> None:
    """Freeze the towers, and give each an adapter. ValueError where a saved one could not be read."""
    if Version(transformers.__version__) < Version(READS_ADAPTERS):
        raise ValueError(
            f"lora_rank needs transformers {READS_ADAPTERS} or later, as this one ({transformers.__version__}) reads random weights for an "
            "adapter; pip install 'contaccum[lora]'"
        )
    found = list(towers(model))
    model.requires_grad_(False)  # also what follows a tower's transformer
    for tower in found:
        base = _base(tower.auto_model)
        adapt(tower.auto_model, lora)
        tower.auto_model.peft_config["default"].base_model_name_or_path = base
        if len(found) > 1:
            tower.__class__ = AdaptedTransformer


def adapt(encoder: PreTrainedModel, lora: Lora) -> None:
    """Adapters are in float32, whatever the base is in: small updates would be rounded off in half precision."""
    peft = _peft()
    targets: Any = list(lora.targets) or block_linears(encoder)
    _check_targets(encoder, lora.targets)
    config = peft.LoraConfig(
        task_type="FEATURE_EXTRACTION", r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets
    )
    encoder.add_adapter(config)
    for parameter in encoder.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def block_linears(encoder: PreTrainedModel) -> str:
    """A pattern of the names of all linear layers inside the encoder's stacked blocks, as peft reads it."""
    names = _linears(encoder)
    if not names:
        raise ValueError(f"no linear layers are found in the blocks of {encoder.config.model_type}; name those to adapt: --lora-targets")
    numbered = {tuple(r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")) for name in names}
    return "|".join(sorted(r"\.".join(parts) for parts in numbered))


def _linears(encoder: PreTrainedModel) -> list[str]:
    blocks = {id(layer) for _, layers in stacks(encoder) for layer in layers}
    inside = tuple(f"{name}." for name, module in encoder.named_modules() if id(module) in blocks)
    return [name for name, module in encoder.named_modules() if isinstance(module, nn.Linear) and name.startswith(inside)]


def _check_targets(encoder: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """peft itself passes over a name that is in no layer, where another is."""
    known = {name.rpartition(".")[2] for name in _linears(encoder)}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in encoder.named_modules()):
            raise ValueError(
                f"lora_targets: no layer of {encoder.config.model_type} is named {target!r}; there are {', '.join(sorted(known))}"
            )


def merge_lora(model: SentenceTransformer) -> None:
    """Put what the adapters have learnt into the weights, in float32, and leave no adapter."""
    for tower in towers(model):
        encoder: Any = tower.auto_model.float()
        for name, layer in _adapted(encoder):
            layer.merge()
            encoder.set_submodule(name, layer.get_base_layer())
        encoder._hf_peft_config_loaded = False
        del encoder.peft_config
        tower.__class__ = Transformer


def _adapted(encoder: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    yield from [(name, module) for name, module in encoder.named_modules() if isinstance(module, LoraLayer)]


def has_two_adapters(model: SentenceTransformer) -> bool:
    return any(isinstance(tower, AdaptedTransformer) for tower in towers(model))


class AdaptedTransformer(Transformer):
    """A tower whose adapter lies in a sub-folder, and its base elsewhere."""

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **options: Any) -> AdaptedTransformer:  # type: ignore[override]
        return super().load(str(Path(model_name_or_path, subfolder)), **options)


def quantization(kind: str) -> dict[str, Any]:
    """Options with which transformers loads a base in 4 bits; ValueError where that cannot be."""
    check_quantization()
    from transformers import BitsAndBytesConfig

    assert kind == "4bit"
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    return {"quantization_config": config}


def check_quantization() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "quantize=4bit needs the package bitsandbytes, which is not installed here; install it or leave quantize out"
        ) from error


def _base(encoder: PreTrainedModel) -> str:
    """Where the base is found again; ValueError for one that is nowhere."""
    name = str(encoder.name_or_path)
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if not name or Path(name).is_absolute():
        raise ValueError(
            f"an adapter is saved without its base, and this {encoder.config.model_type} was put together from several sources; "
            "save it first with dual_encoder(...).save_pretrained(FOLDER), and give that folder as the model"
        )
    return name


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError("lora_rank needs the package peft, which is not installed here; install it or leave lora_rank out") from error
    return peft
