"""Encoders of random weights as transformers folders: to train from nothing, to measure, and for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def write_encoder(texts: Iterable[str], folder: Path, *, vocabulary: int, width: int, layers: int, max_seq_length: int, seed: int) -> None:
    """A BERT and a tokenizer learnt from the texts, the same each time. The tokenizer is BPE: learning WordPiece is not repeatable."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    special = list(SPECIAL_TOKENS.values())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False))
    _save_tokenizer(tokenizer, folder, max_seq_length)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
        max_position_embeddings=max_seq_length,
    )
    write_weights(config, folder, seed)


def write_word_tokenizer(words: Iterable[str], folder: Path, max_seq_length: int | None = None) -> None:
    """A tokenizer that knows these words, after BERT's special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _save_tokenizer(tokenizer, folder, max_seq_length)


def write_weights(config: Any, folder: Path, seed: int | None = None) -> None:
    """A transformers model of random weights, in single precision and without BERT's own pooler."""
    import torch
    from transformers import AutoModel, BertConfig, BertModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if seed is not None:
        torch.manual_seed(seed)
    if isinstance(config, BertConfig):
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    else:
        AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _save_tokenizer(tokenizer: Any, folder: Path, max_seq_length: int | None) -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    names = list(SPECIAL_TOKENS.values())
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", names.index("[SEP]")), ("[CLS]", names.index("[CLS]")))
    limit = {} if max_seq_length is None else {"model_max_length": max_seq_length}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **limit, **SPECIAL_TOKENS).save_pretrained(folder)
