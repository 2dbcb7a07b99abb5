"""Whether arguments and micro-batches make sense: a ValueError names the value and the remedy."""

from __future__ import annotations

import math
import warnings
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from contaccum.core.comparison import DIRECTIONS, HARDNESS, MARGINS, PARTITIONS, Comparison


def check_micro_batch(
    queries: Tensor, positives: Tensor, negatives: Tensor | None, query_keys: Tensor | None, passage_keys: Tensor | None
) -> None:
    """ValueError that names the first shape, type or device that does not fit."""
    if queries.dim() != 2 or len(queries) == 0 or not queries.is_floating_point():
        raise ValueError(f"queries must be floating-point vectors (n, d) with n > 0, not {_describe(queries)}")
    n, d = queries.shape
    if positives.shape != queries.shape:
        raise ValueError(f"positives must be (n, d) = ({n}, {d}) as the queries are, not {_describe(positives)}")
    if negatives is not None and (negatives.dim() != 3 or negatives.shape[0] != n or negatives.shape[2] != d):
        raise ValueError(
            f"negatives must be (n, h, d) = ({n}, h, {d}), not {_describe(negatives)}; stack the hard negatives of a query in dim 1"
        )
    h = 0 if negatives is None else negatives.shape[1]
    _check_keys("query_keys", query_keys, (n,))
    _check_keys("passage_keys", passage_keys, (n, 1 + h))
    for name, tensor in (("positives", positives), ("negatives", negatives), ("query_keys", query_keys), ("passage_keys", passage_keys)):
        if tensor is not None and tensor.device != queries.device:
            raise ValueError(f"{name} lie on {tensor.device} but queries on {queries.device}; move them to one device")


def check_guide(guide: tuple[Tensor, Tensor] | None, queries: Tensor, negatives: Tensor | None, how: Comparison) -> None:
    """A guide's vectors of the same texts: (n, g) and (n, 1 + h, g)."""
    if guide is None:
        return
    if how.margin is None:
        raise ValueError("guide vectors have no effect with margin=None; give margin=0.0 for those above the positive")
    n, c = len(queries), 1 + (0 if negatives is None else negatives.shape[1])
    of_queries, of_passages = guide
    if of_queries.dim() != 2 or len(of_queries) != n or of_passages.shape != (n, c, of_queries.shape[1]):
        raise ValueError(
            f"guide must be vectors ({n}, g) of the queries and ({n}, {c}, g) of the passages, not {_describe(of_queries)} and "
            f"{_describe(of_passages)}"
        )


def _check_keys(name: str, keys: Tensor | None, shape: tuple[int, ...]) -> None:
    if keys is not None and (tuple(keys.shape) != shape or keys.dtype != torch.int64):
        raise ValueError(f"{name} must be int64 of shape {shape}: one key per text, not {_describe(keys)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def check_comparison(how: Comparison) -> None:
    check_scale(how.scale)
    if isinstance(how.directions, str) or "query_to_doc" not in how.directions or len(set(how.directions)) != len(how.directions):
        raise ValueError(f"directions={how.directions!r} must be a tuple, each once, with 'query_to_doc' among them: it has the positive")
    for direction in how.directions:
        one_of("directions", direction, DIRECTIONS)
    one_of("partition_mode", how.partition_mode, PARTITIONS)
    if how.partition_mode == "per_direction" and set(how.directions) - {"query_to_doc", "doc_to_query"}:
        raise ValueError(
            "partition_mode='per_direction' needs the positive in each direction; 'query_to_query' and 'doc_to_doc' lack it: use 'joint'"
        )
    if how.hardness_mode is not None:
        one_of("hardness_mode", how.hardness_mode, HARDNESS, "or None")
    if not _is_number(how.hardness_strength) or how.hardness_strength < 0:
        raise ValueError(f"hardness_strength={how.hardness_strength!r} must be a number of at least 0")
    if how.hardness_mode is not None and how.hardness_strength == 0:
        warnings.warn(f"hardness_mode={how.hardness_mode!r} has no effect with hardness_strength=0; give it a strength", stacklevel=4)
    one_of("margin_strategy", how.margin_strategy, MARGINS)
    if how.margin is None and how.margin_strategy != MARGINS[0]:
        raise ValueError(f"margin_strategy={how.margin_strategy!r} has no effect without a margin; give margin=0.05, say")
    if how.margin is not None and not _is_number(how.margin):
        raise ValueError(f"margin={how.margin!r} must be a number, or None for no filter")


def check_scale(scale: Any) -> None:
    if isinstance(scale, Tensor):
        raise ValueError("scale must be a number: scores between bank entries are kept, so a learnable scale cannot reach them")
    if not (_is_number(scale) and scale > 0):
        raise ValueError(f"scale={scale!r} must be a positive number; use 1.0 for dot and 20.0 for cosine")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def one_of(name: str, value: str, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join([*choices, more] if more else choices)}")


def tuples(name: str, value: int | str) -> int:
    if isinstance(value, str):
        raise ValueError(f'{name}={value!r} is not a number of tuples; give one, or "auto"')
    return whole_number(name, value)


def update_number(name: str, value: int) -> int:
    if whole_number(name, value) < 0:
        raise ValueError(f"{name}={value} is negative; updates are counted from 0")
    return int(value)


def whole_number(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a whole number; give one")
    return int(value)
