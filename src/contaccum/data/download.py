"""The public files of the paper's data sets: fetched whole, resumed where a transfer broke off, checked where a checksum is published.

Checksums: BEIR's list of data sets (md5), the hub's file pages (SHA-256). DPR publishes none.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from tqdm import tqdm

from contaccum.common.errors import DataError
from contaccum.common.outputs import whole_path

DPR = "https://dl.fbaipublicfiles.com/dpr"
HARD_NEGATIVES = "https://huggingface.co/datasets/sentence-transformers/msmarco-hard-negatives/resolve/main"
CHUNK_BYTES = 2**20
ATTEMPTS = 5  # without a byte of progress
TIMEOUT_SECONDS = 60
BACKOFF_SECONDS = 1.0


@dataclass(frozen=True)
class RemoteFile:
    """`checksum` is "md5:..." or "sha256:..."; `size` is for the reader, as published."""

    url: str
    checksum: str | None = None
    size: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


def _dpr(name: str, test: str) -> tuple[RemoteFile, ...]:
    retriever = f"{DPR}/data/retriever"
    train, dev = (RemoteFile(f"{retriever}/biencoder-{name}-{split}.json.gz") for split in ("train", "dev"))
    return train, dev, RemoteFile(f"{retriever}/{test}")


PASSAGES = RemoteFile(f"{DPR}/wikipedia_split/psgs_w100.tsv.gz")
FILES: dict[str, tuple[RemoteFile, ...]] = {
    "nq": _dpr("nq", "nq-test.qa.csv"),
    "trivia": _dpr("trivia", "trivia-test.qa.csv.gz"),
    "webq": _dpr("webquestions", "webquestions-test.qa.csv"),
    "trec": _dpr("curatedtrec", "curatedtrec-test.qa.csv"),
    "msmarco": (
        RemoteFile(
            "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/msmarco.zip",
            "md5:444067daf65d982533ea17ebd59501e4",
            "1.1 GB",
        ),
        RemoteFile(f"{HARD_NEGATIVES}/msmarco-hard-negatives.jsonl.gz", size="1.23 GB"),
        RemoteFile(
            f"{HARD_NEGATIVES}/cross-encoder-ms-marco-MiniLM-L-6-v2-scores.pkl.gz",
            "sha256:fb8df2743eae4d03ca5c93224fd93a84ac0304c6b2a6507439b33bdd1a61f0ad",
            "1.35 GB",
        ),
    ),
}


def files_of(name: str, passages: bool = False) -> tuple[RemoteFile, ...]:
    """The files of a data set; with `passages`, DPR's 21 million Wikipedia passages too."""
    if name not in FILES:
        raise ValueError(f"download {name!r}: use one of {', '.join(FILES)}")
    if passages and name == "msmarco":
        raise ValueError("--passages is for nq, trivia, webq and trec; MS MARCO's passages come with it")
    return (*FILES[name], PASSAGES) if passages else FILES[name]


def download(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Every file whole under `folder`, zip archives unpacked; what is there already is checked and kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [fetch(file, folder / file.name) for file in files]
    for path in paths:
        if path.suffix == ".zip":
            unpack_beir(path, folder)
    return paths


def fetch(file: RemoteFile, path: Path) -> Path:
    """`file` at `path`. It grows as `path`.part and is renamed when whole and right."""
    if path.exists():
        if wrong := _mismatch(path, file.checksum):
            raise DataError(f"{path} is not the published file ({wrong}); remove it and run this again")
        return path
    part = path.with_name(path.name + ".part")
    _transfer(file, part, path)
    if wrong := _mismatch(part, file.checksum):
        part.unlink()
        raise DataError(f"{file.url} arrived damaged ({wrong}) and was removed; run this again")
    os.replace(part, path)
    return path


def _transfer(file: RemoteFile, part: Path, path: Path) -> None:
    """Append to `part` until it is whole, going on where a connection broke."""
    failures = 0
    while True:
        before = _size(part)
        try:
            if _transfer_once(file, part):
                return
            reason = "the connection broke"
        except urllib.error.HTTPError as error:
            raise DataError(_by_hand(file, path, f"HTTP {error.code}, {error.reason}")) from error
        except (OSError, http.client.HTTPException) as error:
            if not before and not _size(part):
                raise DataError(_by_hand(file, path, str(getattr(error, "reason", "") or error))) from error
            reason = str(error)
        failures = 0 if _size(part) > before else failures + 1
        if failures == ATTEMPTS:
            raise DataError(f"{file.url}: {reason} after {_size(part):,} bytes; run this again to go on from there")
        time.sleep(failures * BACKOFF_SECONDS)


def _by_hand(file: RemoteFile, path: Path, reason: str) -> str:
    size = f" ({file.size})" if file.size else ""
    return f"cannot fetch {file.url}{size}: {' '.join(reason.split())}; fetch it elsewhere, put it at {path} and run this again"


def _transfer_once(file: RemoteFile, part: Path) -> bool:
    """One request for what is missing; whether `part` is now whole."""
    have = _size(part)
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            have = have if str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-") else 0
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else None
            with open(part, "ab" if have else "wb") as output:  # a server that knows no ranges sends all of it again
                _copy(response, output, file.name, have, total)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        return _after_416(error, part)
    return total is None or _size(part) == total


def _after_416(error: urllib.error.HTTPError, part: Path) -> bool:
    """Nothing is left to send: `part` is whole, or longer than the file is now and of no use."""
    if error.headers.get("Content-Range", "").rpartition("/")[2] == str(_size(part)):
        return True
    part.unlink()
    return False


def _copy(response: IO[bytes], output: IO[bytes], name: str, have: int, total: int | None) -> None:
    with tqdm(desc=name, total=total, initial=have, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        while chunk := response.read(CHUNK_BYTES):
            output.write(chunk)
            bar.update(len(chunk))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _mismatch(path: Path, checksum: str | None) -> str | None:
    """What is wrong with a file's checksum; None where it is right or none is published."""
    if checksum is None:
        return None
    algorithm, _, wanted = checksum.partition(":")
    with open(path, "rb") as file:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return None if digest.hexdigest() == wanted else f"{algorithm} {digest.hexdigest()} instead of {wanted}"


def unpack_beir(archive: Path, folder: Path) -> None:
    """corpus.jsonl, queries.jsonl and qrels/*.tsv of a BEIR archive, straight into `folder`; those already there are kept."""
    try:
        with zipfile.ZipFile(archive) as content:
            for member in content.namelist():
                name = PurePosixPath(*PurePosixPath(member).parts[1:])
                if str(name) in ("corpus.jsonl", "queries.jsonl") or (len(name.parts) == 2 and name.match("qrels/*.tsv")):
                    _extract(content, member, folder / name)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is not a whole zip archive ({error}); remove it and run this again") from error


def _extract(content: zipfile.ZipFile, member: str, path: Path) -> None:
    if path.exists():
        return
    with content.open(member) as source, whole_path(path) as part, open(part, "wb") as target:
        shutil.copyfileobj(source, target, CHUNK_BYTES)
