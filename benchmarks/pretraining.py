"""Pre-training on random crops at size, fast: GradCache by batch against banks by size, as many samples each.

    python benchmarks/pretraining.py pairs --collection ACL --model MODEL --samples 524288 --output pairs
    python benchmarks/pretraining.py run --pairs pairs --model MODEL --grid grid.jsonl --output results.jsonl --processes 8
    python benchmarks/pretraining.py table results.jsonl --json table.json

What `contaccum reproduce pretrain` does with less around it: crops are drawn and tokenised once for all runs, the samples of an update are
encoded at once, and the micro-losses are taken on slices in order, as weights are constant inside one update: for updates and banks of up
to 1,024 by fast_path.py, as one CUDA graph, else by `DualBankInfoNCE` itself (`--whole-updates` does the same). A batch too large for that
is encoded in pieces whose activations are computed again in the backward pass, which is GradCache. One tower, mean pooling, cosine.

A line of the grid is a `Setting` (shared_grid.py). Each run is judged zero-shot, fine-tuned on labelled pairs with a batch of 128, and
judged again: MRR in percent. `seeds results.jsonl` writes the grid of other seeds for the rates that were best on dev queries.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fast_path
import shared_grid
from contaccum import DualBankInfoNCE
from drift import CLIP, Tower, as_graph, beir, lr_share

SCALE = 20.0
PIECE = 1024  # samples that are encoded at once
FAST = 1024  # tuples and samples of an update that fast_path.py is for
FINE_TUNING: dict[str, Any] = {"lr": 5e-5, "samples": 10_240, "n_total": 128}
JUDGED = ("zero-shot", "fine-tuned")
AGES_AT = (0.25, 0.5, 0.75)  # shares of the run after which stored vectors are compared with new ones


@dataclass(frozen=True)
class Setting:
    name: str
    n_total: int = 128
    n: int = 0  # samples of a micro-batch; 0: all of n_total, as GradCache
    bank: int = 0
    correction: str = ""  # "mean+zero-sum", "mean"
    lr: float = 2e-4
    samples: int = 524_288
    start: str = "model"  # or "random"
    seed: int = 0


class Texts:
    """What `pairs` wrote, on the device."""

    def __init__(self, folder: Path, device: str) -> None:
        def load(name: str) -> Tensor:
            return torch.from_numpy(np.load(folder / f"{name}.npy")).to(device)

        self.crops = load("crops_q"), load("crops_p")  # token ids, 0 being padding
        self.documents = load("documents")
        self.passages, self.queries = load("passages"), load("queries")
        self.labelled = {split: load(split) for split in ("train", "dev", "test")}  # places of a query and its passage


def write_pairs(collection: str, model: str, samples: int, tokens: int, output: Path) -> None:
    """Crops of every text of a collection, drawn epoch after epoch as `contaccum train` draws them; the labelled pairs of a BEIR folder."""
    from tokenizers import Tokenizer

    from contaccum.data.drawn_pairs import drawn_pairs
    from contaccum.data.prepare import prepare

    output.mkdir(parents=True)
    prepare(collection, output / "set", unsupervised="crops")
    table, draw = drawn_pairs(output / "set", "crops", "train", None, 0)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.no_padding()

    def ids(texts: list[str], limit: int) -> NDArray[np.int16]:
        tokenizer.enable_truncation(limit)
        found = np.zeros((len(texts), limit), np.uint16)
        for row, encoded in zip(found, tokenizer.encode_batch_fast(texts), strict=True):
            row[: len(encoded.ids)] = encoded.ids
        return found.view(np.int16)

    queries, positives, documents = [], [], []
    for epoch in range(math.ceil(samples / len(table))):
        draw.epoch = epoch
        order = np.random.default_rng(epoch).permutation(len(table))
        for begin in range(0, len(order), 8192):
            rows = table[order[begin : begin + 8192].tolist()]
            queries.append(ids(rows["query"], tokens))
            positives.append(ids(rows["positive"], tokens))
            documents += rows["label"]
    np.save(output / "crops_q.npy", np.concatenate(queries)[:samples])
    np.save(output / "crops_p.npy", np.concatenate(positives)[:samples])
    np.save(output / "documents.npy", np.array(documents[:samples], np.int64))
    texts, passages, splits = beir(collection)
    np.save(output / "queries.npy", ids(texts, 32))
    np.save(output / "passages.npy", ids(passages, 128))
    for split, rows in splits.items():
        np.save(output / f"{split}.npy", np.array([row[:2] for row in rows], np.int64))


class Trainer:
    """A tower and its optimizer; one `update` after the other, on samples in real micro-losses."""

    def __init__(self, tower: Tower, setting: Setting, device: str) -> None:
        self.tower, self.setting, self.device = tower, setting, device
        self.parameters = list(tower.parameters())
        self.lr = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.lr, weight_decay=0.0, fused=True, capturable=device == "cuda")
        self.criterion = DualBankInfoNCE(setting.bank, SCALE, "cosine", drift_correction=setting.correction or None)

    def update(self, queries: Tensor, passages: Tensor, documents: Tensor, share: float) -> Tensor:
        self.lr.fill_(self.setting.lr * share)
        loss = self._update(queries, passages, documents)
        self.criterion.after_update(share)
        return loss

    def stored(self) -> Tensor:
        """The bank's passages as they are read, the newest first."""
        return self.criterion.bank.passages[:, 0].flip(0)

    def encode(self, ids: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            found: Tensor = self.tower(ids.int())
        return found

    def _update(self, queries: Tensor, passages: Tensor, documents: Tensor) -> Tensor:
        q, p = (torch.cat([self._piece(piece, len(ids)) for piece in ids.split(PIECE)]) for ids in (queries, passages))
        loss, *gradients = self._loss(q.detach(), p.detach(), documents)
        torch.autograd.backward([q, p], gradients)
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
        return loss

    def _piece(self, ids: Tensor, of: int) -> Tensor:
        return self.encode(ids) if of <= PIECE else checkpoint(self.encode, ids, use_reentrant=False)

    def _loss(self, queries: Tensor, passages: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean micro-loss, and the gradients on the vectors."""
        n, leaves = self.setting.n or len(queries), [queries.requires_grad_(), passages.requires_grad_()]
        losses = []
        for q, p, keys in zip(*(whole.split(n) for whole in (*leaves, documents)), strict=True):
            losses.append(self.criterion(q, p, None, keys, keys[:, None]))
            (losses[-1] * (n / len(queries))).backward()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return torch.stack([loss.detach() for loss in losses]).mean(), gradients[0], gradients[1]


class FastTrainer(Trainer):
    """The same by fast_path.py; on a GPU an update is one CUDA graph."""

    def __init__(self, tower: Tower, setting: Setting, device: str) -> None:
        super().__init__(tower, setting, device)
        fast = fast_path.Setting(
            setting.name,
            n=setting.n or setting.n_total,
            n_total=setting.n_total,
            bank=setting.bank,
            mean="mean" in setting.correction,
            zero_sum="running" if "zero-sum" in setting.correction else "",
        )
        self.bank = fast_path.Bank(fast, tower.bert.config.hidden_size, device)
        self.inputs: list[Tensor] | None = None

    def stored(self) -> Tensor:
        stored = self.bank.passages[:, 0].flip(0)
        return stored + self.bank.recent[1].mean(0) if "mean" in self.setting.correction else stored

    def _loss(self, queries: Tensor, passages: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, p = F.normalize(queries.requires_grad_(), dim=1), F.normalize(passages.requires_grad_(), dim=1)
        loss, grad_q, grad_p = self.bank.update(q, p, documents, documents)
        of_queries, of_passages = torch.autograd.grad([q, p], [queries, passages], [grad_q, grad_p])
        return loss, of_queries, of_passages

    def _update(self, *inputs: Tensor) -> Tensor:
        if self.device != "cuda":
            return super()._update(*inputs)
        if self.inputs is None:
            self._record(inputs)
        assert self.inputs is not None
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        self.replay()
        return self.found

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        """At a learning rate of 0; then as new."""
        self.inputs, rate = [tensor.clone() for tensor in inputs], self.lr.clone()
        self.found = torch.zeros((), device=self.device)
        self.lr.zero_()
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

        def step() -> None:
            self.found.copy_(super(FastTrainer, self)._update(*self.inputs))  # type: ignore[misc]

        self.replay = as_graph(step)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.bank.clear()
        self.lr.copy_(rate)


def make_trainer(tower: Tower, setting: Setting, device: str) -> Trainer:
    fast = setting.bank <= FAST and setting.n_total <= FAST
    return (FastTrainer if fast else Trainer)(tower, setting, device)


def pretrain(setting: Setting, texts: Texts, model: str, device: str) -> dict[str, Any]:
    torch.manual_seed(setting.seed)
    tower = Tower(model, "mean")
    if setting.start == "random":
        tower.bert.load_state_dict(type(tower.bert)(tower.bert.config, add_pooling_layer=False).state_dict())
    trainer = make_trainer(tower.to(device).train(), setting, device)
    updates = setting.samples // setting.n_total
    order = torch.randperm(updates, generator=torch.Generator().manual_seed(setting.seed)).tolist() if setting.seed else range(updates)
    started, losses, ages = time.perf_counter(), [], {}
    for number, place in enumerate(order):
        rows = slice(place * setting.n_total, (place + 1) * setting.n_total)
        loss = trainer.update(texts.crops[0][rows], texts.crops[1][rows], texts.documents[rows], lr_share(number, updates))
        if number % max(1, updates // 16) == 0 or number == updates - 1:
            losses.append(round(loss.item(), 3))
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss is {losses[-1]} at update {number}")
        if setting.bank and setting.seed == 0 and number + 1 in [round(share * updates) for share in AGES_AT]:
            recent = [order[at] for at in range(number, -1, -1)][: max(1, setting.bank // setting.n_total)]
            ages[number + 1] = cosine_by_age(trainer, texts, recent)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {"updates": updates, "seconds": seconds, "loss": losses, "cosine_by_age": ages}
    found["zero-shot"] = judge(trainer, texts)
    found["fine-tuned"] = judge(fine_tuned(trainer, texts), texts)
    return found


def fine_tuned(before: Trainer, texts: Texts) -> Trainer:
    setting = replace(before.setting, n=0, bank=0, correction="", **FINE_TUNING)
    trainer = make_trainer(copy.deepcopy(before.tower).train(), setting, before.device)
    pairs = texts.labelled["train"][: setting.samples]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(setting.seed))
    updates = len(pairs) // setting.n_total
    for number in range(updates):
        rows = pairs[order[number * setting.n_total : (number + 1) * setting.n_total].to(pairs.device)]
        trainer.update(texts.queries[rows[:, 0]], texts.passages[rows[:, 1]], rows[:, 1], lr_share(number, updates))
    return trainer


@torch.no_grad()
def cosine_by_age(trainer: Trainer, texts: Texts, recent: list[int]) -> list[float]:
    """Mean cosine of the bank's passages, as they are read, and the same texts encoded now; by age in updates, the newest first."""
    stored, total = trainer.stored(), trainer.setting.n_total
    found = []
    for age, place in enumerate(recent):
        old = stored[age * total : (age + 1) * total]
        if age % max(1, len(recent) // 8) == 0 and len(old) == total:
            now = trainer.encode(texts.crops[1][place * total : (place + 1) * total].flip(0))
            found.append(round(F.cosine_similarity(old, now).mean().item(), 3))
    return found


@torch.no_grad()
def judge(trainer: Trainer, texts: Texts) -> dict[str, float]:
    """MRR in percent among all passages; ties count against a query: a collapse is no success."""
    trainer.tower.eval()
    passages, queries = (
        F.normalize(torch.cat([trainer.encode(part) for part in ids.split(2048)]), dim=1) for ids in (texts.passages, texts.queries)
    )
    found = {}
    for split in ("dev", "test"):
        pairs = texts.labelled[split]
        ranks = []
        for part in pairs.split(500):
            scores = queries[part[:, 0]] @ passages.T
            ranks.append((scores >= scores.gather(1, part[:, 1:])).sum(1))
        found[split] = 100 * float((1 / torch.cat(ranks).double()).mean())
    trainer.tower.train()
    return found


def best(output: Path, seeds: list[int]) -> list[Setting]:
    """The runs of seed 0 whose rate is the best on dev queries before fine-tuning, with other seeds."""
    chosen: dict[Setting, tuple[float, Setting]] = {}
    for run in shared_grid.runs_of([output]):
        setting = Setting(**run["setting"])
        if setting.seed == 0:
            cell, score = replace(setting, lr=0.0), run["zero-shot"]["dev"]
            chosen[cell] = max(chosen.get(cell, (-1.0, setting)), (score, setting), key=lambda pair: pair[0])
    return [replace(setting, seed=seed) for seed in seeds for _, setting in chosen.values()]


def summed_up(same: list[dict[str, Any]]) -> dict[str, Any]:
    """What the table says of one setting's runs; loss and ages are the first's."""
    judged = {f"{when} {split}": [round(run[when][split], 2) for run in same] for when in JUDGED for split in ("dev", "test")}
    ages = same[0]["cosine_by_age"]
    return {**judged, "loss": same[0]["loss"], **({"cosine_by_age": ages} if ages else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make, run, seeds, table = (commands.add_parser(name) for name in ("pairs", "run", "seeds", "table"))
    make.add_argument("--collection", required=True, help="BEIR folder with splits train, dev and test")
    make.add_argument("--samples", type=int, default=524_288)
    make.add_argument("--tokens", type=int, default=48, help="of a crop at most")
    run.add_argument("--pairs", type=Path, required=True)
    shared_grid.add_options(run)
    seeds.add_argument("results", type=Path)
    seeds.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    table.add_argument("results", type=Path, nargs="+")
    table.add_argument("--json", type=Path, required=True)
    for command in (make, run):
        command.add_argument("--model", required=True)
        command.add_argument("--output", type=Path, required=True)
    a = parser.parse_args()
    if a.command == "pairs":
        write_pairs(a.collection, a.model, a.samples, a.tokens, a.output)
    elif a.command == "seeds":
        for setting in best(a.results, a.seeds):
            print(json.dumps(asdict(setting)))
    elif a.command == "table":
        shared_grid.write_table(shared_grid.runs_of(a.results), Setting, summed_up, {"fine_tuning": FINE_TUNING}, a.json)
    else:
        shared_grid.compute(a, Setting, lambda: loaded(a), lambda found: ", ".join(f"{found[when]['test']:.2f}" for when in JUDGED))


def loaded(a: argparse.Namespace) -> shared_grid.Train:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = Texts(a.pairs, device)
    return lambda setting: pretrain(setting, texts, a.model, device)


if __name__ == "__main__":
    main()
