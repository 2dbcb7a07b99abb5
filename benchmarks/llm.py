"""A decoder as tower: peak memory and samples per second of an update of 128 samples, ours beside sentence-transformers' GradCache.

    python benchmarks/llm.py --json results/llm-h200.json     # one GPU, no network, under 4 minutes
    python benchmarks/llm.py --tiny --json /tmp/llm.json       # the same on a CPU, with a tiny decoder

One tower of Qwen3-Embedding-0.6B's shape with random weights in bfloat16, under autocast; last-token pooling, cosine. Trained are adapters
of rank 16 on all linear layers of the blocks (float32), or all weights (bfloat16, AdamW's moments too); each with and without gradient
checkpointing. Ours is `ContAccumLoss` on micro-batches of n, with a full bank of 1,024 tuples. The other is
`CachedMultipleNegativesRankingLoss` on the batch of 128, with mini-batches of n. Texts are of full length: no padding.

1. Gradients: a small decoder in float32, three micro-batches with a bank, against the definition through autograd.
2. Every cell is run in the largest of `--caps`, which limits PyTorch's allocator. It fits a smaller cap if it reserved no more than that.
   Where it reserved more but had less in use, it is run again in the smaller cap.
3. Cells are begun as long as `--seconds` last, the largest n first. Those left over say so.

`reserved_bytes` is what the allocator held at most, from the first update on; `allocated_bytes` what was in use. The CUDA context comes on
top.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from torch import Tensor, nn
from transformers import AutoModel, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from contaccum import ContAccumLoss, dual_encoder
from contaccum.common.provenance import provenance
from contaccum.common.sizes import parse_bytes
from contaccum.core.infonce import Columns, Rows, naive_dual_bank_infonce
from contaccum.experiments.bench import make_update, set_precision
from contaccum.experiments.workloads import Workload, fill_bank, random_features
from contaccum.memory.limit import limit_memory
from contaccum.report.terminal import show_lines
from contaccum.towers.lora import Lora, adapt
from contaccum.towers.random_encoder import write_word_tokenizer
from contaccum.towers.speed import encoders

SEED = 0
OURS, CACHED = "ContAccumLoss", "CachedMultipleNegativesRankingLoss"
ADAPTERS, ALL = "adapters", "all weights"
SHAPE: dict[str, Any] = {
    "vocab_size": 151_669,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
QWEN3_06B = Qwen3Config(**SHAPE, head_dim=128, intermediate_size=3072, tie_word_embeddings=True, max_position_embeddings=32_768)
SHAPE_TINY: dict[str, Any] = {
    "vocab_size": 30_522,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY = Qwen3Config(**SHAPE_TINY, head_dim=8, intermediate_size=64, tie_word_embeddings=True)
LORA = Lora(rank=16, alpha=32.0)
LR = 1e-5
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    trained: str
    checkpointing: bool
    n: int
    loss: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny decoder, as for a CPU")
    parser.add_argument("--n-total", type=int, default=128)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8], help="samples whose activations are held at once")
    parser.add_argument("--trained", nargs="+", default=[ADAPTERS, ALL], choices=(ADAPTERS, ALL))
    parser.add_argument("--bank", type=int, default=1024)
    parser.add_argument("--query-tokens", type=int, default=64)
    parser.add_argument("--passage-tokens", type=int, default=256)
    parser.add_argument("--caps", nargs="+", default=["11GB", "24GB"], help="memories of GPUs")
    parser.add_argument("--seconds", type=float, default=165, help="no cell begins later")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    equality = gradient_error(device)
    print(f"gradients against the definition: {equality:.1e} of the largest", flush=True)
    work = Workload(args.n_total, 1, args.bank, args.query_tokens, args.passage_tokens, 0, "bf16")
    rows = measure(TINY if args.tiny else QWEN3_06B, work, args, device)
    show_lines(table(rows, args.caps))
    if args.json:
        content = {
            "provenance": provenance(SEED),
            "model": {**(SHAPE_TINY if args.tiny else SHAPE), "parameters": rows[-1]["parameters"]},
            "workload": {**asdict(work), "n_local": args.n, "lora_rank": LORA.rank},
            "caps": args.caps,
            "gradient_error": equality,
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# 1 ---------------------------------------------------------------------------------------------------------------------


def gradient_error(device: str) -> float:
    """Largest difference of a weight's gradient from the definition's, over the largest gradient: adapters on a small decoder, float32."""
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        model = decoder(TINY, Path(folder), device, torch.float32)
    add_adapters(model)
    batches = [[random_features(model, task, torch.full((4,), 12)) for task in ("query", "document")] for _ in range(3)]
    loss = ContAccumLoss(model, bank_size=8, drift_correction=None)
    for batch in batches:
        loss([dict(column) for column in batch], None).backward()
    found = take_gradients(model)
    defined(model, batches, scale=20.0).backward()
    expected = take_gradients(model)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


def defined(model: SentenceTransformer, batches: list[list[dict[str, Any]]], scale: float) -> Tensor:
    """The sum of the micro-losses as the full matrix over micro-batch and bank gives them. All earlier tuples are still in the bank."""
    total, past = torch.zeros((), device=model.device), None
    for number, batch in enumerate(batches):
        queries, passages = (nn.functional.normalize(model(dict(column))["sentence_embedding"], dim=1) for column in batch)
        ids = torch.arange(len(queries) * number, len(queries) * (number + 1), device=queries.device)
        rows, columns = Rows(queries, ids), Columns(passages[:, None], ids)
        nothing = Rows(queries[:0].detach(), ids[:0]), Columns(passages[:0, None].detach(), ids[:0])
        total = total + naive_dual_bank_infonce(rows, columns, *(past or nothing), scale)
        before, behind = past or nothing
        past = (
            Rows(torch.cat([before.queries, queries.detach()]), torch.cat([before.ids, ids])),
            Columns(torch.cat([behind.passages, passages[:, None].detach()]), torch.cat([behind.ids, ids])),
        )
    return total


def take_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert any(bool(gradient.any()) for gradient in gradients)
    return gradients


# 2 ---------------------------------------------------------------------------------------------------------------------


def measure(config: Qwen3Config, work: Workload, args: argparse.Namespace, device: str) -> list[Row]:
    """A row per cell."""
    until, rows = time.monotonic() + args.seconds, []
    limits = sorted(((parse_bytes(cap), cap) for cap in args.caps), reverse=True)
    with tempfile.TemporaryDirectory() as folder:
        for trained in args.trained:
            model = decoder(config, Path(folder), device, torch.bfloat16)
            if trained == ADAPTERS:
                add_adapters(model)
            set_precision(model, "bf16")
            share = until if trained == args.trained[-1] else time.monotonic() + (until - time.monotonic()) * 0.65  # adapters take longer
            for cell in cells(trained, args.n):
                row = run_cell(model, cell, work, limits, time.monotonic() < share)
                print(" ".join(line(row, args.caps)), flush=True)
                rows.append(row)
            del model
            release()
    return rows


def cells(trained: str, sizes: Sequence[int]) -> Iterator[Cell]:
    """The quick ones first."""
    for n, checkpointing, loss in itertools.product(sorted(sizes, reverse=True), (False, True), (OURS, CACHED)):
        yield Cell(trained, checkpointing, n, loss)


def run_cell(model: SentenceTransformer, cell: Cell, work: Workload, limits: Sequence[tuple[int, str]], has_time: bool) -> Row:
    row: Row = {**asdict(cell), "parameters": sum(p.numel() for p in model.parameters())}
    row |= dict.fromkeys(("seconds", "samples_per_second", "reserved_bytes", "allocated_bytes", "failed"))
    row["fits"] = {}
    if not has_time:
        return {**row, "failed": "no time was left"}
    for place, (limit, cap) in enumerate(limits if model.device.type == "cuda" else limits[:1]):
        if place and row["reserved_bytes"] <= limit:
            row["fits"][cap] = True
        elif place and row["allocated_bytes"] > limit:
            row["fits"][cap] = False
        else:
            limit_memory(limit)
            found = timed(model, cell, work)
            row["fits"][cap] = found is not None
            if place == 0 and found is not None:
                row |= found
        if not row["fits"][cap]:
            row["fits"] |= {smaller: False for _, smaller in limits[place + 1 :]}
            break
    if model.device.type != "cuda":
        row["fits"] = {}
    return row if row["seconds"] is not None else {**row, "failed": "out of memory"}


def timed(model: SentenceTransformer, cell: Cell, work: Workload) -> Row | None:
    """A short update, which makes what the optimizer keeps, and a whole one, which is timed; None where memory ran out."""
    torch.manual_seed(SEED)
    for encoder in encoders(model):
        if cell.checkpointing:
            encoder.gradient_checkpointing_enable({"use_reentrant": False})
    release()
    on_gpu = model.device.type == "cuda"
    try:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, fused=on_gpu)
        loss = make_loss(model, cell, work)
        make_update(model, loss, optimizer, batches(model, cell, work, 2 * cell.n))
        update = batches(model, cell, work, work.n_total)
        wait(on_gpu)
        started = time.perf_counter()
        make_update(model, loss, optimizer, update)
        wait(on_gpu)
        seconds = time.perf_counter() - started
    except torch.OutOfMemoryError:
        return None
    finally:
        for encoder in encoders(model):
            encoder.gradient_checkpointing_disable()
        model.zero_grad(set_to_none=True)
    memory = {"reserved_bytes": torch.cuda.max_memory_reserved(), "allocated_bytes": torch.cuda.max_memory_allocated()} if on_gpu else {}
    return {"seconds": seconds, "samples_per_second": work.n_total / seconds, **memory}


def make_loss(model: SentenceTransformer, cell: Cell, work: Workload) -> nn.Module:
    if cell.loss == CACHED:
        return CachedMultipleNegativesRankingLoss(model, mini_batch_size=cell.n)
    loss = ContAccumLoss(model, bank_size=work.bank).to(model.device)
    fill_bank(loss, model, work)
    return loss


def batches(model: SentenceTransformer, cell: Cell, work: Workload, samples: int) -> list[list[dict[str, Any]]]:
    size = samples if cell.loss == CACHED else cell.n
    lengths = {"query": work.query_tokens, "document": work.passage_tokens}
    return [[random_features(model, task, torch.full((size,), tokens)) for task, tokens in lengths.items()] for _ in range(samples // size)]


def decoder(config: Qwen3Config, folder: Path, device: str, dtype: torch.dtype) -> SentenceTransformer:
    """One tower of random weights, and a tokenizer that is never used."""
    torch.manual_seed(SEED)
    if not (folder / "config.json").exists():
        write_word_tokenizer(["a"], folder)
        with torch.device(device):
            AutoModel.from_config(config, dtype=dtype).save_pretrained(folder)
    options = {"dtype": dtype}
    return dual_encoder(folder, tied=True, pooling="lasttoken", similarity="cosine", model_kwargs=options).to(device).train()


def add_adapters(model: SentenceTransformer) -> None:
    """With values in both matrices: a new adapter's second is 0, and the first would get no gradient."""
    for encoder in encoders(model):
        adapt(encoder, LORA)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


# What is shown -----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], caps: Sequence[str]) -> list[list[str]]:
    return [["trained, checkpointing, n, loss", "samples/s", "reserved", *caps], *(line(row, caps) for row in rows)]


def line(row: Row, caps: Sequence[str]) -> list[str]:
    name = f"{row['trained']}{', checkpointing' if row['checkpointing'] else ''}, n = {row['n']}, {row['loss']}"
    if row["seconds"] is None:
        return [name, row["failed"], "", *("" for _ in caps)]
    held = "" if row["reserved_bytes"] is None else f"{row['reserved_bytes'] / 1e9:.2f} GB"
    return [name, f"{row['samples_per_second']:.1f}", held, *("fits" if row["fits"].get(cap) else "-" for cap in caps)]


if __name__ == "__main__":
    main()
