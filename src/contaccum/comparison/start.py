"""The model that a comparison starts from, as it is saved: its modules, prompts, similarity and length are those of every run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contaccum.common.errors import DataError
from contaccum.common.outputs import read_if_whole, write_json

KEPT_BY_NAME = ("cls", "mean", "lasttoken")
USUAL = {"pooling": "mean", "similarity": "cosine", "tied": True, "include_prompt": True}  # what need not be said

PROMPTED = {"queries": "query_prompt", "passages": "passage_prompt"}


@dataclass(frozen=True)
class Start:
    fields: dict[str, Any]  # of a training configuration
    modules: str = ""  # in words
    tokens: int | None = None  # that it reads of a text; None: it says nothing of that
    remark: str | None = None  # for the user

    def in_words(self, options: Mapping[str, Any]) -> str:
        """Of a run with these options, what is not usual."""
        pooling = options["pooling"]
        parts = [] if pooling == USUAL["pooling"] else [f"own modules ({self.modules})" if pooling == "own" else f"{pooling} pooling"]
        parts += ["dot product"] if options["similarity"] == "dot" else []
        parts += [] if options["tied"] else ["two towers"]
        parts += [f"{name} begin with {text!r}" for name, field in PROMPTED.items() if (text := options.get(field))]
        parts += [] if options.get("include_prompt", True) else ["prompts are not pooled"]
        return "".join(f", {part}" for part in parts)


def start_of(model: str, file: Path) -> Start:
    """Looked at once; `file` keeps what was found."""
    if (stored := read_if_whole(file)) is not None:
        return Start(**stored)
    from contaccum.towers.dual_encoder import is_sentence_transformer

    found = _looked_at(model) if is_sentence_transformer(model) else Start({"pooling": USUAL["pooling"]})
    write_json(file, asdict(found))
    return found


def _looked_at(name: str) -> Start:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    from contaccum.retrieval.batches import prompt_of
    from contaccum.towers.loading import load_model
    from contaccum.towers.speed import towers

    model = load_model(name, device="cpu")
    chains = _chains(model)
    poolings = {_by_name(chain) for chain in chains}
    if len(chains) > 1 and (len(poolings) > 1 or "own" in poolings):
        raise DataError(f"{name} has two towers with modules of their own, which cannot be trained on; give a model with one tower")
    said, normalised = str(model.similarity_fn_name), any(isinstance(module, Normalize) for module in model.modules())
    prompts = {"query_prompt": prompt_of(model, "query"), "passage_prompt": prompt_of(model, "document")}
    pooled = all(module.include_prompt for module in model.modules() if isinstance(module, Pooling))
    fields = {
        **{"pooling": poolings.pop(), "similarity": "dot" if said == "dot" and not normalised else "cosine", "tied": len(chains) == 1},
        **{field: prompt for field, prompt in prompts.items() if prompt},
        **({} if pooled else {"include_prompt": False}),
    }
    lengths = [length for tower in towers(model) if (length := tower.max_seq_length)]
    remark = f"the model compares by {said} distance, which cannot be trained; cosine instead"
    return Start(fields, ", ".join(map(_shown, chains[0])), min(lengths, default=None), None if said in ("cosine", "dot") else remark)


def _chains(model: Any) -> list[list[Any]]:
    """The modules that a text goes through: of one tower, or of each of two."""
    from sentence_transformers.sentence_transformer.modules import Router

    first, *others = model
    routes: Any = first.sub_modules.values() if isinstance(first, Router) else [[first]]
    return [[*route, *others] for route in routes]


def _by_name(chain: list[Any]) -> str:
    """The pooling, where `dual_encoder` builds the same by its name; else "own". Cosine makes up for a Normalize that is left out."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    kinds = [type(module) for module in chain]
    if kinds not in ([Transformer, Pooling], [Transformer, Pooling, Normalize]) or chain[0].do_lower_case:
        return "own"
    return chain[1].pooling_mode if chain[1].pooling_mode in KEPT_BY_NAME else "own"


def _shown(module: Any) -> str:
    mode = getattr(module, "pooling_mode", None)
    return type(module).__name__ + ("" if mode is None else f" by {mode if isinstance(mode, str) else '+'.join(mode)}")
