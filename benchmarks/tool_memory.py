"""Peak memory of `prepare`, `mine` and `encode` by the size of the collection, and of a dry run of `reproduce`.

    python benchmarks/tool_memory.py --millions 1 2 4 --json tool-memory.json

Passages are made up: 100 words as in DPR's Wikipedia (`--words`), drawn from 500,000 as words of a language are (Zipf), under whole
numbers as ids. Each command runs in a process of its own on a collection of each size. A line through the peaks of the sizes gives the
bound for 21 million passages: choose sizes at which caches are full, `prepare` has one of 128 MB. `encode` runs with a model of one layer
that is 16 wide, for which the stream of texts and the shards of vectors are what is held. `dry-run` is beside data of 300 MB in DPR's form.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WIKIPEDIA = 21.015324  # million passages
QUERIES = 500
VOCABULARY = 500_000
BLOCK = 10_000  # passages drawn at a time
SHARD = 10_000  # vectors in a file of encode
TOOLS = ("prepare", "mine", "encode", "dry-run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=TOOLS, help=f"of {', '.join(TOOLS)}; default: all")
    parser.add_argument("--millions", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="passages")
    parser.add_argument("--words", type=int, default=100, help="in a passage")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # tool and folder: in this process
    args = parser.parse_args()
    if args.one:
        run(args.one[0], Path(args.one[1]))
        return
    found: dict[str, list[dict[str, float]]] = {tool: [] for tool in args.tools}
    for millions in args.millions:
        with tempfile.TemporaryDirectory(prefix="tool-memory-") as folder:
            write_collection(Path(folder), round(millions * 1e6), args.words)
            write_dpr(Path(folder), 300)
            for tool in args.tools:
                if tool != "dry-run" or millions == args.millions[0]:
                    found[tool].append({"millions": millions, **measured(tool, Path(folder))})
                    print(tool, found[tool][-1], flush=True)
                    write(found, args.words, args.json)


def write(found: dict[str, list[dict[str, float]]], words: int, file: Path | None) -> None:
    """After every measurement: a large one may be stopped."""
    from contaccum.common.outputs import write_json
    from contaccum.common.provenance import provenance

    bounds = {tool: bound(rows) for tool, rows in found.items() if len(rows) > 1}
    if file:
        write_json(file, {"provenance": provenance(0), "words": words, "measured": found, "at_21_million": bounds})


def measured(tool: str, folder: Path) -> dict[str, float]:
    """Of a process of its own: the most it held, and of that what is its own (anonymous), not pages of files it has mapped."""
    started = time.monotonic()
    words = [sys.executable, __file__, "--one", tool, str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        own = 0
        while process.poll() is None:
            own = max(own, status_bytes(process.pid, "RssAnon"))
            time.sleep(0.05)
        said = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"{tool} ended with {process.returncode}")
    return {"peak_mb": json.loads(said.splitlines()[-1]) / 1e6, "own_mb": own / 1e6, "seconds": round(time.monotonic() - started, 1)}


def status_bytes(process: int | str, name: str) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def bound(rows: list[dict[str, float]]) -> dict[str, float]:
    """MB a million passages, and MB at Wikipedia's, of a line through the peaks."""
    sizes = [row["millions"] for row in rows]
    lines = {name: np.polyfit(sizes, [row[name] for row in rows], 1) for name in ("peak_mb", "own_mb")}
    slopes = {f"{name}_per_million": round(float(slope), 1) for name, (slope, _) in lines.items()}
    return slopes | {name: round(float(slope * WIKIPEDIA + start)) for name, (slope, start) in lines.items()}


# The data ----------------------------------------------------------------------------------------------------------------------


def texts(count: int, words: int, seed: int) -> Iterator[str]:
    draw = np.random.default_rng(seed)
    for begin in range(0, count, BLOCK):
        numbers = (draw.zipf(1.2, (min(BLOCK, count - begin), words)) - 1) % VOCABULARY
        for row in numbers.tolist():
            yield " ".join([f"w{number}" for number in row])


def write_collection(folder: Path, passages: int, words: int) -> None:
    """A BEIR folder, DPR's passages of the same texts, training rows and a small model."""
    from contaccum.towers.dual_encoder import dual_encoder
    from contaccum.towers.random_encoder import write_encoder

    beir = folder / "beir"
    (beir / "qrels").mkdir(parents=True)
    with open(beir / "corpus.jsonl", "w") as corpus, open(folder / "psgs.tsv", "w") as table:
        table.write("id\ttext\ttitle\n")
        for number, text in enumerate(texts(passages, words, 0), start=1):
            corpus.write(f'{{"_id": "{number}", "title": "", "text": "{text}"}}\n')
            table.write(f"{number}\t{text}\tt{number % 1000}\n")
    queries = list(texts(QUERIES, 10, 1))
    lines = [json.dumps({"_id": f"q{number}", "text": query}) + "\n" for number, query in enumerate(queries)]
    (beir / "queries.jsonl").write_text("".join(lines))
    judged = "".join(f"q{number}\t{1 + number * passages // QUERIES}\t1\n" for number in range(QUERIES))
    (beir / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    rows = [json.dumps({"query": query, "positive": query, "answers": [query.split()[0]]}) + "\n" for query in queries]
    (folder / "train.jsonl").write_text("".join(rows))
    write_encoder(queries, folder / "encoder", vocabulary=1000, width=16, layers=1, max_seq_length=16, seed=0)
    dual_encoder(str(folder / "encoder"), tied=True, pooling="mean", max_seq_length=16).save_pretrained(str(folder / "model"))


def write_dpr(folder: Path, megabytes: int) -> None:
    """Records as in biencoder-nq-train.json: each with 100 passages."""
    draw = texts(1000, 100, 2)
    passages = [{"title": "t", "text": text, "passage_id": str(number)} for number, text in enumerate(draw)]
    record = {"question": "q", "answers": ["a"], "positive_ctxs": passages[:1], "hard_negative_ctxs": passages[1:101]}
    text = json.dumps(record)
    (folder / "biencoder-nq-train.json").write_text("[" + ",".join([text] * (megabytes * 10**6 // len(text))) + "]")


# The tools ---------------------------------------------------------------------------------------------------------------------


def run(tool: str, folder: Path) -> None:
    """In this process, whose peak is printed."""
    output = folder / f"out-{tool}"
    if tool == "prepare":
        from contaccum.data.prepare import prepare

        prepare(folder / "beir", output)
    elif tool == "mine":
        from contaccum.data.mine import mine

        mine(folder / "train.jsonl", folder / "psgs.tsv", output)
    elif tool == "encode":
        from contaccum.retrieval.encode import encode

        encode(str(folder / "model"), folder / "psgs.tsv", output, shard_size=SHARD, progress=False)
    else:
        dry_run(folder)
    sys.stdout.flush()
    print(status_bytes("self", "VmHWM"))  # not getrusage: what it gives begins at the parent's size


def dry_run(folder: Path) -> Any:
    from contaccum.cli import app

    return app(["reproduce", "main", "--dataset", "nq", "--data", str(folder), "--scale", "paper", "--dry-run"], standalone_mode=False)


if __name__ == "__main__":
    main()
