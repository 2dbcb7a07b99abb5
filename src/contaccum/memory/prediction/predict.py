"""Peak memory of a training configuration, predicted from the model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from contaccum.memory.limit import blas_workspace_bytes
from contaccum.memory.prediction.loss import LossTrace, record_loss
from contaccum.memory.prediction.towers import Running, Tower, can_checkpoint, record, tower_configs
from contaccum.memory.prediction.update import Simulation, TowerInput, Update
from contaccum.methods.config import TrainConfig, with_bank
from contaccum.methods.table import get_method, split_update
from contaccum.methods.towers import lora_of, weights_dtype
from contaccum.towers.dual_encoder import OWN

# What decides the memory of loss and bank, besides the size of the micro-batch. They compute in float32 whatever the towers do.
LOSS_FIELDS = (
    *("method", "bank", "query_bank", "similarity", "hard_negatives", "cache_hard_negatives"),
    *("mask_duplicates", "drift_correction", "bank_dtype", "directions", "partition_mode", "margin"),
)

UNSEEN = 0.01  # on top: on an H200 fp32 backward passes held a few hidden states more than are recorded (results/memory-h200.json)


@dataclass(frozen=True)
class Prediction:
    """What PyTorch's CUDA allocator will hold at most. The CUDA context, some hundreds of MB, comes on top and is no part of it."""

    peak_bytes: int  # reserved: what `limit_memory` limits and `torch.cuda.max_memory_reserved` tells
    allocated_bytes: int  # of that in use at most: `torch.cuda.max_memory_allocated`
    parts: dict[str, int]  # what is in use then, by purpose
    bank_bytes: int  # the bank alone

    def __post_init__(self) -> None:
        assert sum(self.parts.values()) == self.allocated_bytes


class Predictor:
    """Predictions for configurations of one model. Recordings are kept, so that further predictions are quick."""

    def __init__(self, config: TrainConfig) -> None:
        self.configs = tower_configs(config.model, config.passage_model, config.tokenizer)
        self._alike = self.configs[0].to_dict() == self.configs[1].to_dict()
        self._towers: dict[tuple[object, ...], Tower] = {}
        self._losses: dict[tuple[object, ...], LossTrace] = {}

    @property
    def can_checkpoint(self) -> bool:
        return all(can_checkpoint(config) for config in self.configs)

    def predict(self, config: TrainConfig, query_tokens: int | None = None, processes: int = 1, apart: bool = False) -> Prediction:
        """For `config.n_local` as it stands. `query_tokens`: longest query, where shorter than `config.max_seq_length`."""
        check(config, query_tokens)
        update = self.update(config, query_tokens, processes, apart)
        meter = Simulation(update).run()
        return Prediction(
            peak_bytes=round((1 + UNSEEN) * meter.allocator.peak_reserved),
            allocated_bytes=meter.allocator.peak_allocated,
            parts={kind: size for kind, size in meter.at_peak.items() if size},
            bank_bytes=update.loss.bank_bytes,
        )

    def update(self, config: TrainConfig, query_tokens: int | None = None, processes: int = 1, apart: bool = False) -> Update:
        config = with_bank(config)
        batches = split_update(get_method(config.method), config.n_total, config.n_local, processes, config.whole_updates)
        queries = TowerInput(self._tower(config, 0, query_tokens or config.max_seq_length), query_tokens or config.max_seq_length, 1)
        passages = TowerInput(self._tower(config, 1, config.max_seq_length), config.max_seq_length, 1 + (config.hard_negatives or 0))
        if queries.tower.width != passages.tower.width:
            raise ValueError(
                f"the towers' vectors have {queries.tower.width} and {passages.tower.width} dimensions; give a pair of one width"
            )
        gathered = batches.micro_batch * processes
        return Update(
            queries=queries,
            passages=passages,
            tied=config.tied,
            samples=batches.mini or batches.per_process,
            micro_steps=batches.accumulation,
            loss=self._loss(config, gathered, queries.tower.width),
            cached=None if batches.mini is None else batches.per_process,
            apart=apart,
            workspace_bytes=blas_workspace_bytes(),
        )

    def _tower(self, config: TrainConfig, which: int, tokens: int) -> Tower:
        which = 0 if self._alike else which
        running = running_of(config)
        key = (which, tokens, running)
        if key not in self._towers:
            self._towers[key] = record(self.configs[which], tokens, running)
        return self._towers[key]

    def _loss(self, config: TrainConfig, samples: int, width: int) -> LossTrace:
        key = (samples, width, *(getattr(config, name) for name in LOSS_FIELDS))
        if key not in self._losses:
            self._losses[key] = record_loss(config, samples, width)
        return self._losses[key]


def running_of(config: TrainConfig) -> Running:
    pooling = "mean" if config.pooling == OWN else config.pooling  # what a projection takes besides is small beside a transformer
    return Running(pooling, config.precision, config.gradient_checkpointing, weights_dtype(config), lora_of(config), bool(config.quantize))


def check(config: TrainConfig, query_tokens: int | None = None) -> None:
    """ValueError that names the first value that cannot be planned for."""
    config.check_values()
    for name, tokens in (("--max-seq-length", config.max_seq_length), ("--max-query-length", query_tokens)):
        if tokens is not None and tokens < 2:
            raise ValueError(f"{name} {tokens} is too short; use at least 2 tokens")
