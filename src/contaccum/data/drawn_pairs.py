"""Pairs drawn from plain text when they are read, again for every epoch: what `prepare --unsupervised` prepares for.

A row of the set is a piece of a document. Its pair depends on the seed, the epoch and the row's own keys alone: not on its place, on the
batch it is read in, or on what was drawn before. So a resumed run draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from contaccum.common.outputs import read_json
from contaccum.data.prepared import SUMMARY_FILE
from contaccum.data.readers.files import passage_text
from contaccum.data.training_set import load_splits

KINDS = {
    "crops": "two independent random crops of a text, a tenth to a half of its length each (Contriever)",
    "inverse-cloze": "a sentence, and the text without it; in a tenth of the draws with it",
    "neighbours": "up to three sentences, and up to three that follow",
    "title-body": "a title and its text",
    "dropout": "a text and itself: dropout makes two views of it (SimCSE)",
}
OF_SENTENCES = ("inverse-cloze", "neighbours")  # their texts have a sentence on each line
SHORTEST_CROP, CROP_SHARES = 20, (0.1, 0.5)  # characters; shares of the text
KEPT_SHARE = 0.1  # of the draws of inverse-cloze that leave the sentence in its text
WINDOW = 3  # sentences of a neighbour at most

Texts = list[str]
Uniform = NDArray[np.float64]  # (rows, draws) in [0, 1)


def drawn_kind(path: str | Path) -> str | None:
    """How pairs are drawn from a prepared set; None where it holds pairs."""
    summary = Path(path) / SUMMARY_FILE
    kind = read_json(summary).get("format") if summary.is_file() else None
    return kind if kind in KINDS else None


def drawn_pairs(path: str | Path, kind: str, split: str, limit: int | None, seed: int) -> tuple[Dataset, DrawPairs]:
    """The set as the trainer reads it: query, positive and, where pairs have a document, its key as `label`."""
    table = load_splits(Path(path), split)
    if limit is not None:
        table = table.select(range(min(limit, len(table))))
    draw = DrawPairs(kind, seed)
    table.set_transform(draw)
    return table, draw


class DrawPairs:
    """Pairs of a batch of rows (columns title, text, document, piece) at `epoch`."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed, self.epoch = kind, seed, 0

    @property
    def labelled(self) -> bool:
        """Whether pairs of one document are kept from being each other's negatives. Titles are compared by their own text instead."""
        return self.kind != "title-body"

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        make, draws = _MAKERS[self.kind]
        chances = uniform(self.seed, self.epoch, batch["document"], batch["piece"], draws)
        queries, positives = make(batch["title"], batch["text"], chances)
        pairs: dict[str, list[Any]] = {"query": queries, "positive": positives}
        return pairs | {"label": batch["document"]} if self.labelled else pairs


def uniform(seed: int, epoch: int, documents: list[int], pieces: list[int], draws: int) -> Uniform:
    """(rows, draws) numbers in [0, 1), a function of the arguments of its own row alone."""
    run = _mixed(np.array([seed], np.uint64) * _ODD + np.uint64(epoch))
    rows = _mixed(np.array(documents, np.int64).view(np.uint64) + run) + np.array(pieces, np.uint64) * _ODD
    states = _mixed(rows)[:, None] + np.arange(1, draws + 1, dtype=np.uint64) * _ODD
    return (_mixed(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of x spread over all 64 (the finaliser of SplitMix64; products wrap around)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _crops(titles: Texts, texts: Texts, chances: Uniform) -> tuple[Texts, Texts]:
    sizes = np.array([len(text) for text in texts], np.float64)[:, None]
    least, most = CROP_SHARES
    lengths = np.minimum(np.maximum(SHORTEST_CROP, sizes * (least + (most - least) * chances[:, :2])), sizes)
    starts = (sizes - lengths) * chances[:, 2:]
    places = np.concatenate([starts, starts + lengths], 1).astype(np.int64).tolist()
    queries = [_words_between(text, place[0], place[2]) for text, place in zip(texts, places, strict=True)]
    return queries, [_words_between(text, place[1], place[3]) for text, place in zip(texts, places, strict=True)]


def _words_between(text: str, start: int, stop: int) -> str:
    """The words that begin or go on between two characters, each whole."""
    end = text.find(" ", stop)
    return text[text.rfind(" ", 0, start) + 1 : None if end < 0 else end]


def _inverse_cloze(titles: Texts, texts: Texts, chances: Uniform) -> tuple[Texts, Texts]:
    queries, positives = [], []
    for text, (place, keep) in zip(texts, chances.tolist(), strict=True):
        sentences = text.split("\n")
        query = sentences[int(place * len(sentences))]
        if keep >= KEPT_SHARE:
            del sentences[int(place * len(sentences))]
        queries.append(query)
        positives.append(" ".join(sentences))
    return queries, positives


def _neighbours(titles: Texts, texts: Texts, chances: Uniform) -> tuple[Texts, Texts]:
    queries, positives = [], []
    for text, (place, before, after) in zip(texts, chances.tolist(), strict=True):
        sentences = text.split("\n")
        middle = 1 + int(place * (len(sentences) - 1))
        queries.append(" ".join(sentences[max(0, middle - 1 - int(before * WINDOW)) : middle]))
        positives.append(" ".join(sentences[middle : middle + 1 + int(after * WINDOW)]))
    return queries, positives


def _title_body(titles: Texts, texts: Texts, chances: Uniform) -> tuple[Texts, Texts]:
    return titles, texts


def _same(titles: Texts, texts: Texts, chances: Uniform) -> tuple[Texts, Texts]:
    whole = [passage_text(title, text) for title, text in zip(titles, texts, strict=True)]
    return whole, whole


# With the numbers drawn for each pair.
_MAKERS: dict[str, tuple[Callable[[Texts, Texts, Uniform], tuple[Texts, Texts]], int]] = {
    "crops": (_crops, 4),
    "inverse-cloze": (_inverse_cloze, 2),
    "neighbours": (_neighbours, 3),
    "title-body": (_title_body, 0),
    "dropout": (_same, 0),
}
