"""Run under torchrun, or alone: train each method for a few updates and save weights and bank. Arguments: tiny model, data, folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from contaccum import ContAccumLoss, ContAccumTrainer, dual_encoder
from contaccum.data.training_set import load_training_set, negative_columns, with_hard_negatives
from contaccum.methods.config import TrainConfig
from contaccum.methods.loss import build_loss
from contaccum.methods.table import METHODS, split_update
from contaccum.towers.speed import unpad_towers
from contaccum.training.processes import leave_processes

COMBINED = "combined"  # several widths, all directions and a filter
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def main(model_folder: str, data: str, output: str) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for name, method in {**METHODS, COMBINED: METHODS["contaccum"]}.items():
        for hard_negatives in (0, 1):
            torch.manual_seed(0)
            # With a tokenizer given, each process writes and loads a folder of its own.
            model = dual_encoder(model_folder, tokenizer=model_folder, pooling="mean", max_seq_length=32)
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0  # processes draw apart
            if processes > 1 and hard_negatives:
                unpad_towers(model)  # which computes the same
            batches = split_update(method, 16, 8 // processes, processes)
            if name == COMBINED:
                loss = ContAccumLoss(model, gather_across_devices=processes > 1, directions=FOUR, margin=-0.05, bank_size=20)
                trained = MatryoshkaLoss(model, loss, [16, 8])
            else:
                config = TrainConfig(method=name, bank=20, query_bank=13, similarity="cosine")
                loss = trained = build_loss(config, model, batches, gather_across_devices=processes > 1)
            table, _ = with_hard_negatives(load_training_set(data), hard_negatives, seed=0)
            names = ["positive", *negative_columns(hard_negatives)][: 1 + hard_negatives]
            args = SentenceTransformerTrainingArguments(
                output_dir=f"{output}/trainer",
                per_device_train_batch_size=batches.per_process,
                gradient_accumulation_steps=batches.accumulation,
                num_train_epochs=1,
                optim="sgd",  # the weights then move by the gradients themselves
                learning_rate=0.1,
                max_grad_norm=0.0,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                ddp_find_unused_parameters=batches.mini is not None,
                router_mapping={"query": "query", **dict.fromkeys(names, "document")},
            )
            trainer = ContAccumTrainer(model=model, args=args, train_dataset=table, loss=trained)
            trainer.train()
            if trainer.is_world_process_zero():
                file = Path(output) / f"{name}-{hard_negatives}.pt"
                torch.save((trainer.model.state_dict(), loss.criterion.state_dict(), trainer.state.global_step), file)
            elif method.bank:  # every process holds the same bank
                torch.save(loss.criterion.state_dict(), Path(output) / f"{name}-{hard_negatives}-rank.pt")


def threads_between_processes() -> list[str]:
    names = (file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm"))
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_processes()
    assert not threads_between_processes()  # which may abort a process that ends
