"""Many trainings of one small pair of towers, fast: banks, corrections and learning rates compared on equal terms.

Weights are constant inside one update, so its N_total samples are encoded at once and the K micro-losses are computed as one batch:
micro-step k sees the bank's tuples and those of the k - 1 micro-batches before it. On a GPU the whole update is one CUDA graph. Loss and
gradients are those of `DualBankInfoNCE` fed micro-batch by micro-batch (tests/test_fast_path.py); what it cannot do is save memory.

    python benchmarks/drift.py tokens --data ACL --model MODEL --output tokens.npz
    python benchmarks/drift.py run --tokens tokens.npz --model MODEL --grid grid.jsonl --output results.jsonl [--processes 6]

A line of the grid is a `Setting`. Several processes share a grid: each takes the next line that nobody has taken. A result that is in the
output already is not computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contaccum.provenance import provenance

SCALES = {"cosine": 20.0, "dot": 1.0}
CLIP, EPS = 2.0, 1e-8
QUERY_TOKENS, PASSAGE_TOKENS = 32, 128


@dataclass(frozen=True)
class Setting:
    """One training. Without a bank, `n` = `n_total` is the large batch (and GradCache's gradient), a smaller `n` gradient accumulation."""

    name: str
    n: int = 8
    n_total: int = 128
    bank: int = 0
    mean: bool = False  # drift_correction="mean"
    zero_sum: str = (
        ""  # of gradients: "passages", with the mean "mean+zero-sum"; "both" towers', and "others": see `_without_others`; tried only here
    )
    gradient_scale: str = "in-batch"  # or "paper"
    tied: bool = False  # one tower
    pooling: str = "cls"  # or "mean"
    beta2: float = 0.999  # of Adam
    warmup: float = 0.1  # share of the run
    similarity: str = "cosine"
    lr: float = 1e-4
    epochs: float = 3
    rows: int = 40_960
    seed: int = 0
    split: str = "dev"


class Bank:
    """The last `bank` tuples, oldest first, and the last update's vectors; at first empty."""

    def __init__(self, setting: Setting, width: int, device: str) -> None:
        self.setting = setting
        size, total = setting.bank, setting.n_total

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.queries, self.passages = zeros(size, width), zeros(size, width)
        self.query_keys, self.passage_keys = zeros(size, dtype=torch.int64), zeros(size, dtype=torch.int64)
        self.recent = zeros(2, total, width)  # queries and passages of the last update, as they were
        self.count = zeros(dtype=torch.int64)

    def clear(self) -> None:
        for buffer in (self.queries, self.passages, self.query_keys, self.passage_keys, self.recent, self.count):
            buffer.zero_()

    def update(self, queries: Tensor, passages: Tensor, query_keys: Tensor, passage_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean micro-loss of an update (N_total, d) and its gradients on both; then its tuples enter."""
        s, total = self.setting, len(queries)
        k, n = total // s.n, s.n
        q, p = queries.detach().requires_grad_(), passages.detach().requires_grad_()
        own = (SCALES[s.similarity] * (q.view(k, n, -1) @ p.view(k, n, -1).mT)).masked_fill(
            self._same_batch(query_keys, passage_keys), -torch.inf
        )
        if s.bank:
            losses, rows = self._banked(q, p, own, query_keys.view(k, n), passage_keys.view(k, n))
        else:
            losses, rows = (own.logsumexp(2) - own.diagonal(dim1=1, dim2=2)).sum(1), torch.full((k,), n, device=q.device)
        loss = (losses / rows).mean()
        grad_q, grad_p = torch.autograd.grad(loss if s.gradient_scale == "paper" else losses.mean() / n, (q, p))
        if s.zero_sum:
            grad_p = (_without_others if s.zero_sum == "others" else _centred)(grad_p.view(k, n, -1))
        if s.zero_sum == "both":
            grad_q = _centred(grad_q.view(k, n, -1))
        return loss.detach(), grad_q.view_as(q), grad_p.view_as(p)

    def _same_batch(self, query_keys: Tensor, passage_keys: Tensor) -> Tensor:
        n = self.setting.n
        q, p = query_keys.view(-1, n), passage_keys.view(-1, n)
        same = (q[:, :, None] == q[:, None]) | (p[:, :, None] == p[:, None])
        return same & ~torch.eye(n, dtype=torch.bool, device=q.device)

    def _banked(self, q: Tensor, p: Tensor, own: Tensor, query_keys: Tensor, passage_keys: Tensor) -> tuple[Tensor, Tensor]:
        """(k,) sums over the rows of each micro-batch and the bank before it, and their number."""
        s, scale = self.setting, SCALES[self.setting.similarity]
        k, n, m = *query_keys.shape, s.bank
        current_q, current_p = q.view(k, n, -1), p.view(k, n, -1)
        with torch.no_grad():
            means = self._means(q.detach(), p.detach()) if s.mean else None
            bank_q = self._windows("queries", q.detach(), None if means is None else means[0])
            bank_p = self._windows("passages", p.detach(), None if means is None else means[1])
            bank_qk, bank_pk = self._windows("query_keys", query_keys.view(-1)), self._windows("passage_keys", passage_keys.view(-1))
            present = torch.arange(m, device=q.device) >= m - (self.count + n * torch.arange(k, device=q.device))[:, None]  # (k, m)
            between = scale * (bank_q @ bank_p.mT)  # (k, m, m)
            targets = between.diagonal(dim1=1, dim2=2).clone()
            same = (bank_qk[:, :, None] == bank_qk[:, None]) | (bank_pk[:, :, None] == bank_pk[:, None])
            same &= ~torch.eye(m, dtype=torch.bool, device=q.device)
            constant = between.masked_fill_(same | ~present[:, None], -torch.inf).logsumexp(2).masked_fill(~present, 0.0)  # (k, m)
            duplicate = (query_keys[:, :, None] == bank_qk[:, None]) | (passage_keys[:, :, None] == bank_pk[:, None])  # (k, n, m)
        over_bank = (scale * (current_q @ bank_p.mT)).masked_fill(duplicate | ~present[:, None], -torch.inf)
        of_bank = (scale * (bank_q @ current_p.mT)).masked_fill(duplicate.mT, -torch.inf)
        current = (torch.cat([own, over_bank], 2).logsumexp(2) - own.diagonal(dim1=1, dim2=2)).sum(1)
        past = (torch.cat([constant[:, :, None], of_bank], 2).logsumexp(2) - targets).masked_fill(~present, 0.0).sum(1)
        self.count += k * n
        return current + past, n + present.sum(1)

    def _means(self, q: Tensor, p: Tensor) -> Tensor:
        """(2, k, d): of the last N_total samples at each micro-step, its own included."""
        n, total = self.setting.n, len(q)
        both = torch.cat([self.recent, torch.stack([q, p])], 1)
        sums = F.pad(both.cumsum(1), (0, 0, 1, 0))
        ends = torch.arange(n, total + 1, n, device=q.device)
        filled = (self.count + ends).clamp(max=total)
        self.recent.copy_(both[:, total:])
        return (sums[:, total + ends] - sums[:, ends]) / filled[:, None]

    def _windows(self, name: str, new: Tensor, means: Tensor | None = None) -> Tensor:
        """(k, m, ...): the bank as each micro-step reads it; the buffer then holds the newest."""
        stored, n = getattr(self, name), self.setting.n
        unit = self.setting.similarity == "cosine"
        entering = new if means is None else (new.view(-1, n, new.shape[1]) - means[:, None]).view_as(new)
        line = torch.cat([stored, entering])
        windows = line.unfold(0, len(stored), n)[:-1]  # (k, ..., m)
        windows = windows.movedim(-1, 1) if line.dim() > 1 else windows
        stored.copy_(line[len(new) :])
        if means is None:
            return windows
        read = windows + means[:, None]
        return F.normalize(read, dim=-1) if unit else read


def _centred(gradients: Tensor) -> Tensor:
    return gradients - gradients.mean(1, keepdim=True)


def _without_others(gradients: Tensor) -> Tensor:
    """Each minus the mean of the others, which leaves its own share of the mean where it is."""
    n = gradients.shape[1]
    return _centred(gradients) * (n / (n - 1))


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
        self.pairs = {split: torch.from_numpy(arrays[split]).to(device) for split in ("train", "dev", "test")}


def train(setting: Setting, tokens: Tokens, model: str, device: str) -> dict[str, Any]:
    torch.manual_seed(setting.seed)
    first = Tower(model, setting.pooling)
    width: int = first.bert.config.hidden_size
    towers = nn.ModuleList([first, first if setting.tied else Tower(model, setting.pooling)]).to(device).train()
    parameters = list(towers.parameters())
    lr = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, setting.beta2), weight_decay=0.0, eps=EPS, fused=True, capturable=device == "cuda"
    )
    bank = Bank(setting, width, device)
    pairs = tokens.pairs["train"][: setting.rows]
    chosen = torch.zeros(setting.n_total, dtype=torch.int64, device=device)
    last_loss = torch.zeros((), device=device)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        queries, passages = pairs[chosen].unbind(1)
        with torch.autocast(device, torch.bfloat16):
            q, p = towers[0](tokens.queries[queries]), towers[1](tokens.passages[passages])
        if setting.similarity == "cosine":
            q, p = F.normalize(q, dim=1), F.normalize(p, dim=1)
        loss, grad_q, grad_p = bank.update(q, p, tokens.query_keys[queries], tokens.passage_keys[passages])
        torch.autograd.backward([q, p], [grad_q, grad_p])
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])
        last_loss.copy_(loss)

    step = update
    if device == "cuda":
        step = _graph(update)
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


def _graph(update: Callable[[], None]) -> Callable[[], None]:
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
        ranks.append((scores >= scores.gather(1, pairs[begin : begin + 500, 1:])).sum(1))  # ties count against it: a collapse is no success
    found = torch.cat(ranks)
    return {"MRR": 100 * float((1 / found.double()).mean()), "ranks": found.tolist()}


def _encode(tower: nn.Module, ids: Tensor, setting: Setting) -> Tensor:
    parts = []
    for part in ids.split(2048):
        with torch.autocast(ids.device.type, torch.bfloat16):
            parts.append(tower(part))
    vectors = torch.cat(parts)
    return F.normalize(vectors, dim=1) if setting.similarity == "cosine" else vectors


def write_tokens(data: str, model: str, output: str) -> None:
    """A BEIR folder with splits train, dev and test as the arrays that `Tokens` reads."""
    from transformers import AutoTokenizer

    from contaccum.data.beir import read_qrels
    from contaccum.retrieval.texts import encoded_texts, qrels_file, read_queries

    tokenizer = AutoTokenizer.from_pretrained(model)
    splits = {split: read_qrels(qrels_file(Path(data), split)) for split in ("train", "dev", "test")}
    queries = {query.id: query.text for split in splits for query in read_queries(data, split)}
    passages = dict(encoded_texts(data))
    arrays: dict[str, Any] = {}
    places = []
    for name, texts, limit in (("q", queries, QUERY_TOKENS), ("p", passages, PASSAGE_TOKENS)):
        ids = tokenizer(list(texts.values()), truncation=True, max_length=limit)["input_ids"]
        arrays[name] = np.zeros((len(ids), limit), np.uint16)
        for row, found in zip(arrays[name], ids, strict=True):
            row[: len(found)] = found
        known: dict[str, int] = {}
        arrays[name + "k"] = np.array([known.setdefault(text, len(known)) for text in texts.values()])
        places.append({key: place for place, key in enumerate(texts)})
    for split, qrels in splits.items():
        arrays[split] = np.array([(places[0][query], places[1][doc]) for query, grades in qrels.items() for doc in grades])
    np.savez_compressed(output, **arrays)


def work(tokens: str, model: str, grid: str, output: str, until: float) -> None:
    """Take settings that nobody has taken until there are none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    loaded = Tokens(tokens, device)
    finished = computed(Path(output))
    for line in Path(grid).read_text().splitlines():
        setting = Setting(**json.loads(line))
        if setting in finished or time.time() > until or not _claim(Path(f"{output}.claims"), setting):
            continue
        started = time.perf_counter()
        try:
            found = train(setting, loaded, model, device)
        except Exception:
            found = {"error": traceback.format_exc()}
        with open(output, "a", encoding="utf-8") as results:
            told = {"setting": asdict(setting), **found, "total_seconds": time.perf_counter() - started}
            results.write(json.dumps({**told, "provenance": provenance(setting.seed)}) + "\n")
        end = found.get("error", f"MRR {found.get('MRR', 0):.2f}, {found.get('seconds', 0):.0f} s")
        print(f"{setting.name}, {setting.similarity}, lr {setting.lr:g}, {setting.epochs:g} epochs, seed {setting.seed}: {end}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def computed(output: Path) -> set[Setting]:
    """Settings with a result in the output."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    return {Setting(**found["setting"]) for found in map(json.loads, lines) if "error" not in found}


def _claim(folder: Path, setting: Setting) -> bool:
    """Whether no other process has taken it."""
    folder.mkdir(exist_ok=True)
    name = hashlib.sha256(repr(setting).encode()).hexdigest()[:16]
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    make, run = commands.add_parser("tokens"), commands.add_parser("run")
    make.add_argument("--data", required=True)
    run.add_argument("--tokens", required=True)
    run.add_argument("--grid", required=True)
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so many")
    run.add_argument("--until", type=float, help=argparse.SUPPRESS)
    for command in (make, run):
        command.add_argument("--model", required=True)
        command.add_argument("--output", required=True)
    a = parser.parse_args()
    if a.command == "tokens":
        write_tokens(a.data, a.model, a.output)
        return
    if a.until is None:  # not one of the processes that share a grid: claims that lie there are of a run that ended
        shutil.rmtree(f"{a.output}.claims", ignore_errors=True)
    until = a.until or time.time() + a.seconds
    others = [subprocess.Popen([sys.executable, *sys.argv, "--processes", "1", "--until", str(until)]) for _ in range(a.processes - 1)]
    work(a.tokens, a.model, a.grid, a.output, until)
    for other in others:
        other.wait()


if __name__ == "__main__":
    main()
