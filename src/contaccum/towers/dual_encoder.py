"""`dual_encoder`: a two-tower or tied SentenceTransformer from a name, a folder, a configuration or a pair of checkpoints."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from sentence_transformers import SentenceTransformer, SimilarityFunction
from sentence_transformers.sentence_transformer.modules import Pooling, Router, Transformer
from sentence_transformers.util import load_file_path
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    DPRContextEncoder,
    DPRQuestionEncoder,
    PretrainedConfig,
    PreTrainedModel,
)

from contaccum.common.errors import DataError
from contaccum.common.inputs import readable
from contaccum.towers.loading import WHOLE, check_finite, check_length, check_sizes, check_tokenizer, needed_weights, positions_of

OWN = "own"  # the modules that a SentenceTransformer is saved with
POOLINGS = ("cls", "mean", "lasttoken", OWN)
USUAL_LENGTH = 256  # tokens
SIMILARITIES = ("dot", "cosine")
# Sub-folders under which paired checkpoints are found: (queries, passages).
PAIRS = (
    *(("query_encoder", "doc_encoder"), ("question_encoder", "ctx_encoder"), ("query", "passage")),
    ("query_0_Transformer", "document_0_Transformer"),  # as two towers are saved
)
PARTS = ("config.json", "model.safetensors", "pytorch_model.bin")  # files of a model's folder

Source = str | Path | PretrainedConfig


def dual_encoder(
    model: Source,
    passage_model: Source | None = None,
    *,
    tied: bool = False,
    pooling: str = "cls",
    similarity: str = "dot",
    max_seq_length: int | None = None,
    tokenizer: str | Path | None = None,
    query_prompt: str | None = None,
    passage_prompt: str | None = None,
    include_prompt: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    device: str | None = None,
) -> SentenceTransformer:
    """A SentenceTransformer with a tower for queries and one for passages, or one for both.

    Args:
        model: hub name, model folder, `PretrainedConfig` (random weights; give `tokenizer`), folder with a pair of encoders in it
            (`query_encoder/` and `doc_encoder/`, `question_encoder/` and `ctx_encoder/`, or as two towers are saved here), or DPR's own
            `.cp` checkpoint.
        passage_model: the passage tower's source; None: as `model`.
        tied: one tower for both.
        pooling: "cls", "mean" or "lasttoken"; "own": the modules that `model`, a SentenceTransformer, is saved with (pooling of any kind,
            Dense, Normalize, ...).
        max_seq_length: tokens of a text; None: 256, or as many as the model has positions for.
        similarity: "dot" or "cosine", for `model.similarity` and for search.
        tokenizer: source of the tokenizer where the model has none.
        query_prompt, passage_prompt: put before each query and passage by `encode_query` and `encode_document`.
        include_prompt: pool the prompt's tokens too.
        model_kwargs: for transformers, as {"dtype": torch.bfloat16}; weights are in single precision otherwise.
        device: as "cpu"; None: a GPU where there is one.

    `save_pretrained(folder)` writes one folder that `SentenceTransformer(folder)` loads, for `encode_query` and `encode_document`.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} is unknown; choose one of {', '.join(POOLINGS)}")
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity={similarity!r} is unknown; choose one of {', '.join(SIMILARITIES)}")
    query_source, passage_source = paired_sources(model, passage_model)
    if tied and query_source != passage_source:
        raise ValueError(f"tied=True has one tower, but {query_source} and {passage_source} are two; give one or set tied=False")
    if pooling == OWN and tokenizer is not None:
        raise ValueError(f"tokenizer={tokenizer} cannot be given with pooling='own', which takes the model's; leave one of them out")

    def tower(source: Source | DPRPart) -> list[Any]:
        name = type(source).__name__ if isinstance(source, PretrainedConfig) else source
        # Weights are trained in single precision, whatever they are stored in.
        options = {"dtype": torch.float32, **(model_kwargs or {})}
        with tempfile.TemporaryDirectory() as scratch, readable(f"{name} cannot be loaded as an encoder", WHOLE), needed_weights(name):
            if pooling == OWN:
                transformer, *others = _own_modules(source, str(name), options)
            else:
                folder = _as_folder(source, tokenizer, scratch)
                transformer, others = Transformer(folder, max_seq_length=max_seq_length, model_kwargs=options), []
        for module in (transformer, *others):
            check_finite(module, name)
        check_tokenizer(transformer, name)
        if max_seq_length is None:
            transformer.max_seq_length = min(USUAL_LENGTH, positions_of(transformer) or USUAL_LENGTH)
        else:
            check_length(transformer, max_seq_length)
            transformer.max_seq_length = max_seq_length
        others = others or [Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)]
        if poolings := [module for module in others if isinstance(module, Pooling)]:
            for weight, parameter in transformer.named_parameters():
                if ".pooler." in weight:  # BERT's own pooler: pooling here reads the tokens, so it would never get a gradient
                    parameter.requires_grad_(False)
        for module in poolings:
            module.include_prompt = include_prompt
        return [transformer, *others]

    modules = tower(query_source)
    if not tied:
        modules = [Router.for_query_document(modules, tower(passage_source))]
    prompts = {name: prompt for name, prompt in (("query", query_prompt), ("document", passage_prompt)) if prompt}
    return SentenceTransformer(modules=modules, similarity_fn_name=SimilarityFunction(similarity), prompts=prompts or None, device=device)


def is_sentence_transformer(model: str | Path) -> bool:
    """Whether this folder or name has modules of its own; DataError where that cannot be known."""
    with readable(f"{model} cannot be read as a model", WHOLE):
        return load_file_path(str(model), "modules.json") is not None


def _own_modules(source: Source | DPRPart, name: str, options: dict[str, Any]) -> list[Any]:
    remedy = "use cls, mean or lasttoken"
    if isinstance(source, (PretrainedConfig, DPRPart)):
        raise DataError(f"pooling='own' takes the modules of a saved SentenceTransformer, and {name} is none; {remedy}")
    load_encoder_config(source)
    if not is_sentence_transformer(source):
        raise DataError(f"pooling='own' takes the modules of a saved SentenceTransformer, and {name} has no modules.json; {remedy}")
    modules: list[Any] = list(SentenceTransformer(str(source), model_kwargs=options, device="cpu"))
    if not modules or not isinstance(modules[0], Transformer):
        first = type(modules[0]).__name__ if modules else "nothing"
        raise DataError(f"pooling='own' takes modules that begin with a Transformer, and {name} begins with {first}; {remedy}")
    for module in modules[1:]:
        module.to(options["dtype"])
    return modules


def paired_sources(model: Source, passage_model: Source | None) -> tuple[Source | DPRPart, Source | DPRPart]:
    if passage_model is not None:
        return model, passage_model
    if isinstance(model, PretrainedConfig):
        return model, model
    path = Path(model)
    if path.is_file():
        if path.name in PARTS:
            raise DataError(f"{path} is a part of a model; give its folder, {path.parent}")
        return DPRPart(path, "question_model."), DPRPart(path, "ctx_model.")
    for query_folder, passage_folder in PAIRS:
        if (path / query_folder).is_dir() and (path / passage_folder).is_dir():
            return path / query_folder, path / passage_folder
    return model, model


class DPRPart:
    """One encoder of a checkpoint of DPR's own format: a pickled tuple or dict with a `model_dict` of prefixed BERT weights."""

    def __init__(self, file: Path, prefix: str) -> None:
        self.file, self.prefix = file, prefix

    def __str__(self) -> str:
        return f"{self.file} ({self.prefix}*)"

    def load(self, config: Any) -> BertModel:
        with readable(f"{self.file} is not a DPR bi-encoder checkpoint", "give one, or a model folder"):
            weights = torch.load(self.file, map_location="cpu", weights_only=True)
            weights = weights.get("model_dict", weights)
            part = {name[len(self.prefix) :]: value for name, value in weights.items() if name.startswith(self.prefix)}
        if not part:
            raise DataError(f"{self.file} holds no weights that start with {self.prefix!r}: it is not a DPR bi-encoder checkpoint")
        model = BertModel(config, add_pooling_layer=any(name.startswith("pooler.") for name in part))
        with readable(f"{self.file} does not fit {type(config).__name__}", "give --tokenizer the folder or name of the same kind of model"):
            missing, unexpected = model.load_state_dict(part, strict=False)
        wrong = [*missing, *(name for name in unexpected if not name.endswith(("position_ids", "encode_proj.weight", "encode_proj.bias")))]
        if wrong:
            raise DataError(f"{self.file} does not fit {type(config).__name__}: {len(wrong)} weights differ, among them {wrong[0]}")
        return model


def _as_folder(source: Source | DPRPart, tokenizer: str | Path | None, scratch: str) -> str:
    """Something that transformers' Auto classes load: `source` itself where it is one, else written to `scratch`."""
    if isinstance(source, DPRPart):
        config = load_encoder_config(tokenizer or "bert-base-uncased", "tokenizer")
        if not isinstance(config, BertConfig):
            raise DataError(f"tokenizer={tokenizer} names a {type(config).__name__}, but {source} is a BERT checkpoint")
        _save_model(source.load(config), scratch)
        _save_tokenizer(tokenizer or "bert-base-uncased", scratch)
        return scratch
    if isinstance(source, PretrainedConfig):
        if tokenizer is None:
            raise DataError(f"{type(source).__name__} says nothing of the tokenizer; give tokenizer=NAME")
        _save_model(AutoModel.from_config(source), scratch)
        _save_tokenizer(tokenizer, scratch)
        return scratch
    config = load_encoder_config(source)
    if config.model_type == "dpr":  # transformers' DPR classes wrap a BERT; the tower is the BERT
        _save_model(_dpr_bert(source, config), scratch)
        _save_tokenizer(tokenizer or source, scratch)
        return scratch
    if tokenizer is not None:
        _save_model(AutoModel.from_pretrained(source), scratch)
        _save_tokenizer(tokenizer, scratch)
        return scratch
    return str(source)


def load_encoder_config(source: str | Path, what: str = "model") -> PretrainedConfig:
    _check_path(what, source)
    with readable(f"no {what} can be read from {source}", WHOLE):
        config: PretrainedConfig = AutoConfig.from_pretrained(source)
    check_sizes(config, source)
    return config


def _save_model(model: PreTrainedModel, folder: str) -> None:
    """In each of several processes; `save_pretrained` writes in the first alone."""
    model.config.save_pretrained(folder)
    save_model(model, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})


def _save_tokenizer(source: str | Path, folder: str) -> None:
    _check_path("tokenizer", source)
    with readable(f"no tokenizer can be read from {source}", WHOLE):
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _check_path(what: str, source: str | Path) -> None:
    """DataError for what can only be a path, and leads nowhere."""
    is_path = Path(source).is_absolute() or str(source).startswith(".")
    if is_path and not os.path.exists(source):
        raise DataError(f"no {what} can be read from {source}: there is no such folder or file")


def _dpr_bert(source: str | Path, config: PretrainedConfig) -> BertModel:
    if (config.architectures or [""])[0] == "DPRContextEncoder":
        inner = DPRContextEncoder.from_pretrained(source).ctx_encoder.bert_model
    else:
        inner = DPRQuestionEncoder.from_pretrained(source).question_encoder.bert_model
    fields = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures", "projection_dim")}
    bert = BertModel(BertConfig(**fields), add_pooling_layer=False)
    bert.load_state_dict(inner.state_dict())
    return bert
