"""Models that are damaged, of another kind or hostile, and training that can come to nothing: refused before it starts, or ended."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import Commands, commands
from conftest import WORDS, write_beir
from contaccum import dual_encoder
from contaccum.common.errors import DataError, DivergedError
from contaccum.memory.plan import plan
from contaccum.methods.config import TrainConfig
from contaccum.retrieval.device import check_device
from contaccum.retrieval.evaluate import evaluate
from contaccum.retrieval.model import model_on_device
from contaccum.towers.loading import load_model
from contaccum.towers.random_encoder import write_word_tokenizer
from contaccum.training.run import train
from contaccum.training.sound import UPDATES, check_learns, check_losses, note_collapse
from data_files import jsonl as lines
from data_files import write

__all__ = ["commands"]

NAME = "encoder.layer.0.attention.self.query.weight"


class Owned:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return open, ("owned", "w")


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights[NAME] = change(weights[NAME]).contiguous()
        save_file(weights, file, metadata={"format": "pt"})

    return spoil


def _kept(keep: Callable[[str], bool], rename: Callable[[str], str] = str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({rename(name): weight for name, weight in load_file(file).items() if keep(name)}, file, metadata={"format": "pt"})

    return spoil


def _file(name: str, content: Callable[[bytes], bytes] | None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        before = (folder / name).read_bytes()
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content(before))

    return spoil


def _config(**changes: object) -> Callable[[Path], None]:
    return _file("config.json", lambda before: json.dumps({**json.loads(before), **changes}).encode())


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Owned()))


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (_file("model.safetensors", None), "cannot be loaded"),
    "weights cut off": (_file("model.safetensors", lambda before: before[: len(before) // 2]), "cannot be loaded"),
    "empty weights": (_file("model.safetensors", lambda before: b""), "cannot be loaded"),
    "a pickle in disguise": (_file("model.safetensors", lambda before: pickle.dumps(Owned())), "cannot be loaded"),
    "a pickle": (_pickled, "(it holds objects that are no weights, and might run code)"),
    "no tensors": (_kept(lambda name: False), "weights, as "),
    "a tensor missing": (_kept(lambda name: name != NAME), f"lacks 1 of its weights, as {NAME}, which would be random"),
    "other names": (_kept(lambda name: True, lambda name: f"x.{name}"), "weights, as "),
    "a layer less than none": (_config(num_hidden_layers=-1), ""),
    "another shape": (_weights(lambda weight: weight[:3]), "(weights have other shapes than its config.json says)"),
    "NaN": (_weights(lambda weight: weight * float("nan")), "holds weights that are not finite, as "),
    "infinite": (_weights(lambda weight: weight + float("inf")), "holds weights that are not finite, as "),
    "no tokenizer": (_without_tokenizer, "has no tokenizer: every word would be the same"),
    "no JSON": (_file("config.json", lambda before: b"{"), ""),
    "deep JSON": (_file("config.json", lambda before: b"[" * 100_000), ""),
    "a size that is a text": (_config(hidden_size="wide"), ""),
    "a size that is a list": (_config(hidden_size=[[16]]), ""),
    "heads that do not divide": (_config(num_attention_heads=3), "cannot be loaded"),
    "an unknown type": (_config(model_type="none"), ""),
    "a broken tokenizer": (_file("tokenizer.json", lambda before: b'{"model": 7}'), "cannot be loaded"),
    "code of its own": (
        _config(model_type="none", auto_map={"AutoConfig": "evil.Evil"}),
        "it needs code of its own, which is not run here; in Python",
    ),
    "too few vectors": (lambda folder: write_word_tokenizer([f"x{i}" for i in range(500)], folder), "but its tokenizer knows 505"),
}


@pytest.fixture
def copied(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder to spoil, in the working folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def config(data: str, model: object, **options: object) -> TrainConfig:
    sizes = {"n_total": 8, "n_local": 4, "bank": 8, "max_seq_length": 16, "warmup_updates": 0, "save_every": 0, "pooling": "mean"}
    return TrainConfig(data=data, model=str(model), output="run", **{**sizes, **options})


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_model_is_refused_whoever_loads_it(name: str, copied: Path, jsonl) -> None:
    spoil, message = SPOILT[name]
    write(copied / "evil.py", "open('owned', 'w')\nclass Evil: pass\n")
    spoil(copied)
    for use in (lambda: train(config(jsonl(16), copied)), lambda: load_model(copied)):
        with pytest.raises(DataError) as error:
            use()
        assert str(copied) in str(error.value)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    assert not Path("run").exists()
    assert not Path("owned").exists()  # nothing was unpickled or run


def test_a_model_without_what_nothing_uses_is_loaded(copied: Path) -> None:
    """BERT's own pooler, which most encoders on the hub lack."""
    _kept(lambda name: not name.startswith("pooler."))(copied)
    model = dual_encoder(copied, pooling="mean", max_seq_length=16)
    whole = load_file(copied / "model.safetensors")
    assert not any("pooler" in name for name in whole)
    assert torch.equal(model.state_dict()[f"0.sub_modules.query.0.model.{NAME}"], whole[NAME])


SPOILT_SIZES = ({"num_hidden_layers": -1}, {"num_hidden_layers": 10**9})
SPOILT_FIELDS = ({"hidden_size": "wide"}, {"num_attention_heads": 3}, {"vocab_size": -5}, {"hidden_act": "none"})


@pytest.mark.parametrize("changes", [*SPOILT_FIELDS, *SPOILT_SIZES])
def test_a_plan_of_a_spoilt_configuration_is_refused(changes: dict, copied: Path) -> None:
    _config(**changes)(copied)
    with pytest.raises(ValueError, match="model") as error:
        plan(TrainConfig(model=str(copied), memory="2GB", n_total=4, max_seq_length=16, hard_negatives=0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("use", [dual_encoder, lambda file: plan(TrainConfig(model=str(file), memory="2GB"))])
def test_a_file_of_a_model_s_folder_is_no_dpr_checkpoint(use: Callable[[Path], object], copied: Path) -> None:
    with pytest.raises(DataError, match=r"model\.safetensors is a part of a model; give its folder"):
        use(copied / "model.safetensors")


@pytest.mark.parametrize(
    "content",
    [b"", b"text", pickle.dumps([1]), pickle.dumps({"model_dict": {"question_model.x": 1}}), pickle.dumps(Owned())],
)
def test_a_dpr_checkpoint_that_is_none(content: bytes, copied: Path) -> None:
    file = write(copied / "dpr.cp", content)
    with pytest.raises(DataError, match=str(file)) as error:
        dual_encoder(file, tokenizer=copied)
    assert "\n" not in str(error.value)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "stored", [[1], {"model_dict": [1]}, {"model_dict": {1: 2}}, {"model_dict": {f"question_model.{NAME}": torch.zeros(3)}}]
)
def test_a_dpr_checkpoint_of_other_things(stored: object, copied: Path) -> None:
    torch.save(stored, copied / "dpr.cp")
    with pytest.raises(DataError, match=r"dpr\.cp"):
        dual_encoder(copied / "dpr.cp", tokenizer=copied)


@pytest.mark.parametrize(
    ("tokens", "message"), [(65, "more than the model's 64 positions; use 64"), (2, "no room for words beside 2 special")]
)
def test_a_length_that_the_model_cannot_have(tokens: int, message: str, model_folder: str, jsonl, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: train(config(jsonl(16), model_folder, max_seq_length=tokens)),
        lambda: model_on_device(model_folder, "cpu", tokens),
    ):
        with pytest.raises(ValueError, match=f"max_seq_length={tokens}.*{message}"):
            use()
    assert not Path("run").exists()


def test_positions_before_the_padding_do_not_count(tokenizer_folder: str) -> None:
    from transformers import RobertaConfig

    shape = {"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    roberta = RobertaConfig(**shape, max_position_embeddings=34, pad_token_id=1)
    assert dual_encoder(roberta, tokenizer=tokenizer_folder, max_seq_length=32).max_seq_length == 32
    assert dual_encoder(roberta, tokenizer=tokenizer_folder).max_seq_length == 32
    with pytest.raises(ValueError, match="more than the model's 32 positions"):
        dual_encoder(roberta, tokenizer=tokenizer_folder, max_seq_length=33)


@pytest.mark.parametrize("device", ["meta", "cuda:99", "nowhere", "", "cpu:x"])
def test_a_device_without_memory_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be used: .*; use cpu, or leave it out"):
        check_device(device)


# Data that training can learn nothing from


def training_file(tmp_path: Path, rows: list[tuple[str, str]]) -> str:
    return str(write(tmp_path / "rows.jsonl", lines([{"query": query, "positive": positive} for query, positive in rows])))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([("w1", "w2")] * 7, {}, "n_total=8 is more than the training set's 7 rows"),
        ([("", " \t")] * 16, {}, "none of 16 rows has both a query and a positive"),
        ([("w1", "\u3000")] * 16, {}, "none of 16 rows has both a query and a positive"),
        ([("q", "p")] * 16, {}, "the tokenizer knows next to no word of the first 32 texts"),
        ([("\u200b", "\u200b")] * 16, {}, "the tokenizer knows next to no word"),
    ],
)
def test_data_that_teaches_nothing(rows, options, message: str, model_folder: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        train(config(training_file(tmp_path, rows), model_folder, **options))
    assert not Path("run").exists()


def test_blank_rows_are_left_out_aloud(model_folder: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [(WORDS[i], f"{WORDS[i]} {WORDS[i + 1]}") for i in range(12)]
    train(config(training_file(tmp_path, [*rows, ("", "w1"), ("w2", " ")]), model_folder, epochs=1.0, bank=4))
    assert "note: 2 of 14 rows have a blank query or positive and are left out" in capsys.readouterr().err


QRELS = {
    "an unknown query": ("query-id\tcorpus-id\tscore\nq99\td0\t1\n", "names the query 'q99', which queries.jsonl does not hold"),
    "an unknown passage": ("query-id\tcorpus-id\tscore\nq0\td99\t1\n", "names the document 'd99', which corpus.jsonl does not hold"),
    "nothing relevant": ("query-id\tcorpus-id\tscore\nq0\td0\t0\n", "judges nothing as relevant"),
}


@pytest.mark.parametrize("name", QRELS)
def test_dev_judgements_that_fit_nothing(name: str, model_folder: str, jsonl, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    dev = write_beir(tmp_path / "dev", ["w1", "w2"], ["w1", "w2"], dev=range(2))
    content, message = QRELS[name]
    write(dev / "qrels" / "dev.tsv", content)
    with pytest.raises(DataError, match=message):
        train(config(jsonl(16), model_folder, dev=str(dev), dev_every=1))
    assert not Path("run").exists()


# Training that goes wrong


def test_a_run_whose_losses_are_no_numbers_ends_with_a_line(
    model_folder: str, jsonl, tmp_path: Path, commands: Commands, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--n-total", "8", "--n-local", "4", "--bank", "8", "--max-seq-length", "16", "--warmup-updates", "0", "--lr", "1e30"]
    words += ["--max-updates", "30", "--log-every", "1", "--output", "run"]
    said = commands.refused("train", "--data", jsonl(16), "--model", model_folder, *words, code=1)
    assert "is finite; use a lower --lr" in said
    assert not Path("run/model").exists()
    assert not Path("run/summary.json").exists()
    assert len(Path("run/log.jsonl").read_text().splitlines()) < 30  # not to the bitter end


def test_weights_that_are_no_numbers_are_not_saved(model_folder: str, jsonl, tmp_path: Path, monkeypatch) -> None:
    """The last update alone spoils them: no loss shows it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DivergedError, match="training has left weights that are not finite, as "):
        train(config(jsonl(16), model_folder, lr=1e30, weight_decay=1e10, max_updates=1))
    assert not Path("run/model").exists()


def test_a_few_losses_that_are_no_numbers_end_nothing() -> None:
    odd, fine = {"update": 1, "loss": float("nan")}, {"update": 2, "loss": 1.0}
    check_losses([])
    check_losses([odd] * (UPDATES - 1))
    check_losses([*[odd] * UPDATES, fine], ended=True)
    for stuck, ended in (([fine, *[odd] * UPDATES], False), ([odd] * 3, True)):
        with pytest.raises(DivergedError, match=f"no loss of the last {min(UPDATES, len(stuck))} updates"):
            check_losses(stuck, ended)


def _same_for_all(folder: Path, change: str) -> None:
    if change == "zero weights":
        file = folder / "model.safetensors"
        save_file({name: torch.zeros_like(weight) for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    else:
        _config(layer_norm_eps=1e30)(folder)


@pytest.mark.parametrize("change", ["zero weights", "a large layer_norm_eps"])
def test_a_model_that_gives_all_texts_one_vector_is_not_trained_and_said(change: str, copied: Path, jsonl, tmp_path: Path, capsys) -> None:
    data = write_beir(tmp_path / "data", ["w1 w2", "w3"], ["w1", "w3 w4"], test=range(2))
    evaluate(str(copied), data, device="cpu", progress=False)
    assert "the same vector" not in capsys.readouterr().err
    _same_for_all(copied, change)
    with pytest.raises(DataError, match="gives the first texts the same vector, all of them; give one whose weights are whole"):
        train(config(jsonl(16), copied))
    assert not Path("run").exists()
    evaluate(str(copied), data, device="cpu", progress=False)
    said = "note: the model gives the first texts the same vector, all of them: results of a search, and metrics, mean nothing\n"
    assert capsys.readouterr().err == said * 2  # of queries and of passages


def test_losses_of_a_collapsed_model_are_named(capsys) -> None:
    standing = {"loss": math.log(128), "negatives_per_query": 127}
    for lines_ in ([standing] * (UPDATES - 1), [standing] * UPDATES + [standing | {"loss": 4.8}]):
        note_collapse(lines_)
    assert capsys.readouterr().err == ""
    note_collapse([standing | {"loss": 4.8}] + [standing | {"loss": math.log(128) + 1e-4}] * UPDATES)
    assert "note: the model collapsed in training: the loss of the last 10 updates is log(1 + negatives) = 4.852" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("positive", "options", "updates"),
    [
        ("w1 w2", {"max_updates": 3}, 3),  # of all rows the same
        ("w{} w1", {"method": "gradaccum", "n_local": 1}, UPDATES),  # a micro-batch of one row has no negative
    ],
)
def test_training_without_anything_to_learn_ends(positive: str, options: dict, updates: int, model_folder: str, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", lines({"query": f"w{row}", "positive": positive.format(row)} for row in range(40)))
    arguments = {**vars(config(str(data), model_folder)), "output": str(tmp_path / "run"), "log_every": 2, **options}
    with pytest.raises(DivergedError, match=f"the loss of all {updates} updates is 0: no query has a negative"):
        train(TrainConfig(**arguments))
    assert not (tmp_path / "run" / "model").exists()


def test_losses_of_0_before_the_bank_are_no_matter() -> None:
    check_learns([{"loss": 0.0}] * UPDATES + [{"loss": 1.0}], ended=True)
    check_learns([{"loss": 0.0}] * (UPDATES - 1))
    check_learns([{"loss": float("nan")}], ended=True)


def test_adapters_are_refused_where_they_would_be_read_at_random(model_folder: str, jsonl, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.__version__", "5.7.0")
    with pytest.raises(ValueError, match=r"lora_rank needs transformers 5\.8 or later, as this one \(5\.7\.0\)"):
        train(config(jsonl(16), model_folder, lora_rank=4, tied=True))
    assert not Path("run").exists()
