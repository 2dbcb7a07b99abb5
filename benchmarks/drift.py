"""Many trainings of one small pair of towers, fast: banks, corrections and learning rates compared on equal terms.

An update is computed at once (fast_path.py); on a GPU it is one CUDA graph.

    python benchmarks/drift.py tokens --data ACL --model MODEL --output tokens.npz
    python benchmarks/drift.py run --tokens tokens.npz --model MODEL --grid grid.jsonl --output results.jsonl [--processes 6]
    python benchmarks/drift.py table results.jsonl --json table.json

A line of the grid is a `Setting`; grids.py writes those that were run. Several processes share a grid: each takes the next line that
nobody has taken. A result that is in the output already is not computed again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shared_grid
from fast_path import Bank, Setting

CLIP, EPS = 2.0, 1e-8


class Tower(nn.Module):
    """A BERT that reads padded rows of token ids, 0 being padding, and gives its first token's vector or the mean of all."""

    def __init__(self, folder: str, pooling: str) -> None:
        from transformers import AutoModel

        super().__init__()
        self.pooling = pooling
        self.bert = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", add_pooling_layer=False)

    def forward(self, ids: Tensor) -> Tensor:
        padding = torch.zeros(ids.shape, device=ids.device, dtype=torch.bfloat16).masked_fill_(ids == 0, -3e4)
        mask = padding[:, None, None].expand(-1, 1, ids.shape[1], -1)  # made here: transformers would wait for the device to look at it
        found: Tensor = self.bert.encoder(self.bert.embeddings(input_ids=ids.long()), attention_mask=mask)[0]
        if self.pooling == "cls":
            return found[:, 0].float()
        real = (ids != 0)[:, :, None]
        return (found.float() * real).sum(1) / real.sum(1)


class Tokens:
    """Token ids of all texts, a key per text, and the pairs of each split, on the device."""

    def __init__(self, file: str, device: str) -> None:
        arrays = np.load(file)
        self.queries, self.passages = (torch.from_numpy(arrays[name].astype(np.int32)).to(device) for name in ("q", "p"))
        self.query_keys, self.passage_keys = (torch.from_numpy(arrays[name]).to(device) for name in ("qk", "pk"))
        # (rows, 2 or more): query, positive, hard negatives
        self.pairs = {split: torch.from_numpy(arrays[split]).to(device) for split in ("train", "dev", "test")}


def train(setting: Setting, tokens: Tokens, model: str, device: str, compiled: bool = False) -> dict[str, Any]:
    torch.manual_seed(setting.seed)
    first = Tower(model, setting.pooling)
    width: int = first.bert.config.hidden_size
    towers = nn.ModuleList([first, first if setting.tied else Tower(model, setting.pooling)]).to(device).train()
    encoders = [torch.compile(tower, dynamic=False) if compiled else tower for tower in towers]
    parameters = list(towers.parameters())
    lr = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, setting.beta2), weight_decay=0.0, eps=EPS, fused=True, capturable=device == "cuda"
    )
    pairs = tokens.pairs["train"][: setting.rows, : 2 + setting.hard_negatives]
    if pairs.shape[1] != 2 + setting.hard_negatives:
        raise ValueError(f"the tokens hold {pairs.shape[1] - 2} hard negatives a query, not {setting.hard_negatives}")
    bank = Bank(setting, width, device, len(pairs))
    chosen = torch.zeros(setting.n_total, dtype=torch.int64, device=device)
    last_loss = torch.zeros((), device=device)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        queries, passages = pairs[chosen, 0], pairs[chosen, 1:]  # (N_total,), (N_total, c)
        with torch.autocast(device, torch.bfloat16):
            q, p = encoders[0](tokens.queries[queries]), encoders[1](tokens.passages[passages.flatten()])
        if setting.similarity == "cosine":
            q, p = F.normalize(q, dim=1), F.normalize(p, dim=1)
        p = p if setting.hard_negatives == 0 else p.view(*passages.shape, -1)
        loss, grad_q, grad_p = bank.update(q, p, tokens.query_keys[queries], tokens.passage_keys[passages], chosen)
        torch.autograd.backward([q, p], [grad_q, grad_p])
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])
        last_loss.copy_(loss)

    step = update
    if device == "cuda":
        step = as_graph(update)
        for state in optimizer.state.values():  # the graph was made with a learning rate of 0: weights are as they were
            for value in state.values():
                value.zero_()
        bank.clear()
    per_epoch = len(pairs) // setting.n_total
    updates = math.ceil(setting.epochs * per_epoch)
    order, generator = torch.empty(0), torch.Generator().manual_seed(setting.seed)
    started, losses = time.perf_counter(), []
    for number in range(updates):
        place = number % per_epoch
        if place == 0:
            order = torch.randperm(len(pairs), generator=generator).to(device)
        chosen.copy_(order[place * setting.n_total : (place + 1) * setting.n_total])
        lr.fill_(setting.lr * lr_share(number, updates, setting.warmup))
        step()
        if number % max(1, updates // 10) == 0:
            losses.append(round(last_loss.item(), 4))
    seconds = time.perf_counter() - started
    return {"updates": updates, "seconds": seconds, "loss": losses, **evaluate(towers, tokens, setting)}


def lr_share(number: int, updates: int, warmup: float = 0.1) -> float:
    """Linear warm-up over a tenth of the run, then linear decay: as `contaccum train` does."""
    warm = int(updates * warmup)
    return number / warm if number < warm else (updates - number) / (updates - warm)


def as_graph(update: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return graph.replay


@torch.no_grad()
def evaluate(towers: nn.ModuleList, tokens: Tokens, setting: Setting) -> dict[str, Any]:
    """Rank of each query's passage among all passages, and the mean reciprocal rank in percent."""
    towers.eval()
    pairs = tokens.pairs[setting.split]
    passages, queries = _encode(towers[1], tokens.passages, setting), _encode(towers[0], tokens.queries[pairs[:, 0]], setting)
    ranks = []
    for begin in range(0, len(queries), 500):
        scores = queries[begin : begin + 500] @ passages.T
        ranks.append(
            (scores >= scores.gather(1, pairs[begin : begin + 500, 1:2])).sum(1)
        )  # ties count against it: a collapse is no success
    found = torch.cat(ranks)
    return {"MRR": 100 * float((1 / found.double()).mean()), "ranks": found.tolist()}


def _encode(tower: nn.Module, ids: Tensor, setting: Setting) -> Tensor:
    parts = []
    for part in ids.split(2048):
        with torch.autocast(ids.device.type, torch.bfloat16):
            parts.append(tower(part))
    vectors = torch.cat(parts)
    return F.normalize(vectors, dim=1) if setting.similarity == "cosine" else vectors


def write_tokens(data: str, model: str, output: Path, collection: str | None, lengths: Sequence[int]) -> None:
    """A BEIR folder with splits train, dev and test, or a prepared one with its collection, as the arrays that `Tokens` reads."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    queries, passages, splits = beir(data) if collection is None else _prepared(data, collection)
    arrays: dict[str, Any] = {split: np.array(rows) for split, rows in splits.items()}
    for name, texts, limit in zip("qp", (queries, passages), lengths, strict=True):
        ids = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
        arrays[name] = np.zeros((len(ids), limit), np.uint16)
        for row, found in zip(arrays[name], ids, strict=True):
            row[: len(found)] = found
        known: dict[str, int] = {}
        arrays[name + "k"] = np.array([known.setdefault(text, len(known)) for text in texts])
    np.savez_compressed(output, **arrays)


Splits = dict[str, list[tuple[int, ...]]]  # rows of places: query, positive, hard negatives


def beir(data: str) -> tuple[list[str], list[str], Splits]:
    """Texts of all queries and passages, and the pairs of each split."""
    from contaccum.data.readers.beir import qrels_file, read_qrels
    from contaccum.data.readers.collections import encoded_texts
    from contaccum.data.readers.queries import read_queries

    judged = {split: read_qrels(qrels_file(Path(data), split)) for split in ("train", "dev", "test")}
    queries = {query.id: query.text for split in judged for query in read_queries(data, split)}
    passages = dict(encoded_texts(data))
    query_at, passage_at = ({key: place for place, key in enumerate(texts)} for texts in (queries, passages))
    splits: Splits = {
        split: [(query_at[query], passage_at[doc]) for query, grades in qrels.items() for doc in grades] for split, qrels in judged.items()
    }
    return list(queries.values()), list(passages.values()), splits


def _prepared(data: str, collection: str) -> tuple[list[str], list[str], Splits]:
    """The same of a folder by `contaccum prepare` or `mine`: all of a row's hard negatives, of training rows that have as many as any."""
    from contaccum.data.readers.collections import encoded_texts
    from contaccum.data.training_set import load_training_set

    passages = [text for _, text in encoded_texts(collection)]
    place = {text: number for number, text in enumerate(passages)}
    queries: list[str] = []
    splits: Splits = {}
    for split in ("train", "dev", "test"):
        rows = list(load_training_set(data, split))
        most = max(len(row["negatives"]) for row in rows)
        splits[split] = []
        for row in rows:
            if len(row["negatives"]) == most:
                splits[split].append((len(queries), place[row["positive"]], *(place[text] for text in row["negatives"])))
                queries.append(row["query"])
    return queries, passages, splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    make, run, table = commands.add_parser("tokens"), commands.add_parser("run"), commands.add_parser("table")
    make.add_argument("--data", required=True)
    make.add_argument("--lengths", type=int, nargs=2, default=(32, 128), metavar=("QUERY", "PASSAGE"), help="tokens of a text at most")
    make.add_argument("--collection", help="passages of data that `contaccum prepare` or `mine` wrote")
    run.add_argument("--tokens", required=True)
    shared_grid.add_options(run)
    run.add_argument("--compile", action="store_true", help="towers by torch.compile: half a minute first, then faster")
    table.add_argument("results", type=Path, nargs="+")
    table.add_argument("--json", type=Path, required=True)
    table.add_argument("--commit", help="which drift.py and package the runs were of, where they could not tell")
    for command in (make, run):
        command.add_argument("--model", required=True)
        command.add_argument("--output", type=Path, required=True)
    a = parser.parse_args()
    if a.command == "tokens":
        write_tokens(a.data, a.model, a.output, a.collection, a.lengths)
        return
    if a.command == "table":
        told = {"provenance": {"commit": a.commit}} if a.commit else {}
        shared_grid.write_table(
            shared_grid.runs_of(a.results), Setting, lambda same: {"MRR": [round(run["MRR"], 2) for run in same]}, told, a.json
        )
        return
    shared_grid.compute(a, Setting, lambda: loaded(a), lambda found: f"MRR {found['MRR']:.2f}, {found['seconds']:.0f} s")


def loaded(a: argparse.Namespace) -> shared_grid.Train:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    tokens = Tokens(a.tokens, device)
    return lambda setting: train(setting, tokens, a.model, device, a.compile)


if __name__ == "__main__":
    main()
