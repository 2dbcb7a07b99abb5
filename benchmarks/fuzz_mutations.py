"""What `benchmarks/fuzz.py` does to an input: to a file's bytes, to the values in it, to the place where it lies, or to the options."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml

WORKING = "inputs"  # the working folder
Spoil = Callable[[Path, random.Random], None]

TOKENS = (
    *(b'"', b"\\", b"\\ud800", b"{", b"[", b"]", b"}", b",", b":", b"null", b"NaN", b"1e999", b"\t", b"\r", b"\n", b"\0", b"\xff"),
    *(b"\xef\xbb\xbf", b"\xe9", b"-1", b"9" * 30, b"true", b"../evil", "\u2028".encode(), b"[" * 2000, b"x" * 200_000, b"(a+)+$"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 5, 0.5, 10**30, -(10**9), 2**31, 2**63, float("nan"), float("inf"), -float("inf"), 1e-300),
    *("", " ", "x", "None", "auto", "\ud800", "\0", "a\nb", "../evil", "/proc/self/mem", "(a+)+$" * 3, "é" * 300, "9" * 5000),
    *([], {}, [[]], ["x"], [None], {"x": 1}, [0.5, "x"]),
)
OPTION_VALUES = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1",
        "3",
        "0.5",
        "nan",
        "inf",
        "-inf",
        "1e308",
        "1e-300",
        "9" * 30,
        "x",
        "None",
        "none",
        "auto",
        "é",
        "\udcff",
        "a,b",
    ),
    *(",", "1,1", "0,0", "/", ".", "/dev/null", "/dev/full", "/proc/self/mem", "nowhere", "nowhere/deeper", "pairs.csv", "beir"),
    *("encoder", "model", "run.trec", "prepared", "meta", "cuda:7", "cpu", "mps", "float16", "fp16", "bf16", "1TB", "-3GB", "1e400GB"),
    *(
        "x" * 300,
        "a" * 5000,
        "MRR@0",
        "MRR@10",
        "NDCG@x",
        "(a+)+$",
        "~",
        "*",
        "$HOME",
        "a\nb",
        "\0",
        "test",
        "train",
        "dev",
        "IVF4,PQ2",
        "Flat",
    ),
)


def change_bytes(file: Path, chance: random.Random) -> None:
    """A few pieces cut, doubled or overwritten."""
    content = bytearray(file.read_bytes())
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(content))
        end = min(len(content), start + chance.randint(0, 12))
        piece = chance.choice([b"", chance.randbytes(4), bytes(content[start:end]) * 2, chance.choice(TOKENS), chance.choice(TOKENS)])
        content[start:end] = piece
    file.write_bytes(bytes(content))


def cut_off(file: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.choice([0, 1, len(content) // 2, max(0, len(content) - 1), chance.randint(0, len(content))])])


def replace_all(file: Path, chance: random.Random) -> None:
    """By something else altogether."""
    text = file.read_bytes()
    others = [
        *(b"", b"\n\n\n", b"null", b"[]", b"{}", b"0", b'"x"', b"[" * 100_000, b'{"a":' * 20_000, b"\0" * 1000, b"\xff\xfe" * 50),
        *(text.decode("utf-8", "replace").encode("utf-16"), text.decode("utf-8", "replace").encode("latin-1", "replace") + b"\xe9"),
        *(
            text * 2,
            chance.randbytes(500),
            pickle.dumps({"x": 1}),
            b"PK\x03\x04" + text[4:],
            b"x" * 2_000_000,
            b"a,b\n1,2\n",
            b"!!python/object:os.system x",
        ),
    ]
    file.write_bytes(chance.choice(others))


def change_lines(file: Path, chance: random.Random) -> None:
    """Lines left out, doubled, joined or in another order."""
    lines = file.read_bytes().splitlines(keepends=True) or [b""]
    place = chance.randrange(len(lines))
    kind = chance.randrange(5)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(place, lines[chance.randrange(len(lines))])
    elif kind == 2:
        chance.shuffle(lines)
    elif kind == 3:
        lines[place] = lines[place].rstrip(b"\n")
    else:
        lines = lines[:1]
    file.write_bytes(b"".join(lines))


def move(file: Path, chance: random.Random) -> None:
    """Something else lies in its place."""
    kind = chance.randrange(6)
    content = file.read_bytes()
    file.unlink()
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to(file.name)  # a loop
    elif kind == 3:
        file.symlink_to("nowhere")
    elif kind == 4:
        file.symlink_to("/dev/null")
    elif kind == 5:
        file.with_name("other").write_bytes(content)
        file.symlink_to("other")


def loop_folder(file: Path, chance: random.Random) -> None:
    """The folder that it lies in is gone, a file, or a symlink to itself."""
    folder = file.parent
    if folder.name == WORKING:
        return move(file, chance)
    shutil.rmtree(folder)
    kind = chance.randrange(4)
    if kind == 0:
        folder.symlink_to(folder.name)
    elif kind == 1:
        folder.write_bytes(b"x")
    elif kind == 2:
        folder.mkdir()
    return None


def change_value(file: Path, chance: random.Random) -> None:
    """A value of a JSON, JSONL or YAML file becomes another, or its name does; other files lose bytes."""
    text = file.read_text(encoding="utf-8", errors="surrogateescape")
    try:
        if file.suffix == ".yaml":
            file.write_text(yaml.dump(_changed(yaml.safe_load(text), chance)), encoding="utf-8", errors="surrogatepass")
        elif file.suffix == ".jsonl":
            lines = text.splitlines()
            place = chance.randrange(len(lines))
            lines[place] = json.dumps(_changed(json.loads(lines[place]), chance))
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif file.suffix == ".json":
            file.write_text(json.dumps(_changed(json.loads(text), chance)), encoding="utf-8")
        else:
            change_bytes(file, chance)
    except (ValueError, LookupError, RecursionError, yaml.YAMLError):  # spoilt before
        change_bytes(file, chance)


def _changed(value: Any, chance: random.Random) -> Any:
    """One node of a tree, at any depth, is left out, renamed or replaced."""
    nodes = list(_nodes(value))
    if not nodes:
        return chance.choice(VALUES)
    holder, key = chance.choice(nodes)
    kind = chance.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[chance.choice(["", "x", "é", "\ud800", "_id", "id", "text"])] = holder.pop(key)
    elif kind == 2:
        deep: Any = holder[key]
        for _ in range(chance.choice([1, 3, 300])):
            deep = [deep]
        holder[key] = deep
    elif kind == 3:
        holder[key] = holder[chance.choice(list(holder))] if isinstance(holder, dict) else holder[0]
    else:
        holder[key] = chance.choice(VALUES)
    return value


def _nodes(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else range(min(50, len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _nodes(value[key])


def change_tensors(file: Path, chance: random.Random) -> None:
    """Of a .safetensors or .cp file: weights that are missing, of another shape or type, not finite, huge or a pickle."""
    # Read, not mapped: the file is written again.
    stored = (
        safetensors.torch.load(file.read_bytes()) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)["model_dict"]
    )
    name = chance.choice(list(stored))
    value = stored[name]
    others: list[Any] = [
        *(
            torch.full_like(value, float("nan")),
            torch.full_like(value, float("inf")),
            value * 1e30,
            value[:1],
            value.reshape(-1),
            value.half(),
        ),
        *(torch.zeros_like(value), value.long(), torch.zeros(0), value[None]),
    ]
    stored[name] = chance.choice(others).contiguous()
    if chance.random() < 0.2:
        del stored[name]
    if chance.random() < 0.1:
        stored = {f"x.{key}": tensor for key, tensor in stored.items()}
    if file.suffix == ".safetensors" and chance.random() < 0.8:
        safetensors.torch.save_file(stored, file, metadata={"format": "pt"})
    else:
        torch.save(chance.choice([stored, {"model_dict": stored}, {"model_dict": [1]}, [stored], {"model_dict": {1: 2}}]), file)


def change_array(file: Path, chance: random.Random) -> None:
    """Of a .npy file: another shape, type or order, or values that are not finite."""
    array = np.load(file)
    spoilt = array.copy()
    if array.dtype.kind == "f":
        spoilt[chance.randrange(len(array))] = chance.choice([np.nan, np.inf, 0.0])
    others = [
        spoilt,
        spoilt,
        array.T,
        array[:-1],
        array.astype("f8") if array.dtype.kind == "f" else array.astype("U9"),
        array[:0],
        array.reshape(-1),
    ]
    np.save(file, chance.choice(others))
    if chance.random() < 0.1:
        np.save(file, np.array([{"x": 1}], dtype=object), allow_pickle=True)


def spoils_of(file: str) -> Sequence[Spoil]:
    """What can be done to a file; what fits its kind more often."""
    general: list[Spoil] = [change_bytes, cut_off, replace_all, move, loop_folder]
    suffix = Path(file).suffix
    if suffix in (".json", ".jsonl", ".yaml"):
        return [*general, *[change_value] * 5, change_lines]
    if suffix in (".safetensors", ".cp"):
        return [*general, *[change_tensors] * 5]
    if suffix == ".npy":
        return [*general, *[change_array] * 5]
    return [*general, *[change_bytes] * 2, *[change_lines] * 2]


def change_words(words: Sequence[str], options: Sequence[str], chance: random.Random) -> list[str]:
    """An option or argument left out, doubled or with another value, or one more."""
    found = list(words)
    for _ in range(chance.randint(1, 2)):
        kind = chance.randrange(6)
        place = chance.randrange(1, len(found)) if len(found) > 1 else 0
        if kind == 0 and place:
            del found[place]
        elif kind <= 2 and place:
            found[place] = chance.choice(OPTION_VALUES)
        else:
            found += [chance.choice(list(options)), chance.choice(OPTION_VALUES)][: chance.choice([1, 2, 2, 2])]
    return found
