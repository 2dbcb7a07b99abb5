"""Downloads: broken transfers go on where they broke, damaged files are refused, and what cannot be fetched is said."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from contaccum.common.errors import DataError
from contaccum.data import download
from contaccum.data.prepare import prepare
from contaccum.data.training_set import load_training_set
from data_files import beir_folder, dpr_record, out_folder

out = pytest.fixture(out_folder)


class RangeServer(ThreadingHTTPServer):
    """Serves `content`; sends at most `cut_after` bytes a response while `cuts` last; knows ranges or not."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), RangeHandler)
        self.content, self.cut_after, self.cuts, self.ranges, self.requests = content, 0, 0, True, list[str]()

    def file(self, name: str = "file.bin", **options: str) -> download.RemoteFile:
        return download.RemoteFile(f"http://127.0.0.1:{self.server_port}/{name}", **options)


class RangeHandler(BaseHTTPRequestHandler):
    server: RangeServer

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.requests.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        total = len(self.server.content)
        if self.path == "/missing":
            self.send_error(404)
            return
        if start >= total:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{total}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(total - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        body = self.server.content[start:]
        if self.server.cuts:
            self.server.cuts -= 1
            body = body[: self.server.cut_after]
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[RangeServer]:
    monkeypatch.setattr(download, "BACKOFF_SECONDS", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with RangeServer(bytes(range(256)) * 20_000) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def digest(content: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def test_an_interrupted_transfer_goes_on_where_it_broke(tmp_path: Path, server: RangeServer) -> None:
    server.cuts, server.cut_after = 3, 1_000_000
    (path,) = download.download([server.file(checksum=digest(server.content, "md5"))], tmp_path / "new")
    assert path.read_bytes() == server.content
    assert server.requests == ["", "bytes=1000000-", "bytes=2000000-", "bytes=3000000-"]
    assert [path.name for path in path.parent.iterdir()] == ["file.bin"]
    download.download([server.file()], tmp_path / "new")
    assert len(server.requests) == 4  # what is there is not fetched again


def test_a_later_run_goes_on_with_the_part(tmp_path: Path, server: RangeServer) -> None:
    server.cuts, server.cut_after = 2 + download.ATTEMPTS, 0
    (tmp_path / "file.bin.part").write_bytes(server.content[:1234])
    with pytest.raises(DataError, match="after 1,234 bytes; run this again"):
        download.fetch(server.file(), tmp_path / "file.bin")
    assert not (tmp_path / "file.bin").exists()
    server.cuts = 0
    assert download.fetch(server.file(), tmp_path / "file.bin").read_bytes() == server.content


@pytest.mark.parametrize("have", [0, 1234, 5_120_000, 6_000_000])
@pytest.mark.parametrize("ranges", [True, False])
def test_any_part_becomes_the_whole_file(tmp_path: Path, server: RangeServer, have: int, ranges: bool) -> None:
    server.ranges = ranges
    (tmp_path / "file.bin.part").write_bytes((server.content * 2)[:have])
    download.fetch(server.file(), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == server.content


def test_a_wrong_checksum_is_refused(tmp_path: Path, server: RangeServer) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(DataError, match=r"arrived damaged .sha256 .* instead of"):
        download.fetch(server.file(checksum=digest(b"other")), path)
    assert not list(tmp_path.iterdir())
    path.write_bytes(b"put there by hand")
    with pytest.raises(DataError, match="is not the published file"):
        download.fetch(server.file(checksum=digest(server.content)), path)


def test_without_a_network_it_says_what_to_put_where(tmp_path: Path, server: RangeServer) -> None:
    path = tmp_path / "missing"
    with pytest.raises(DataError, match=r"cannot fetch http.*/missing .9 GB.: HTTP 404.* put it at .*missing and run this again"):
        download.fetch(server.file("missing", size="9 GB"), path)
    closed = download.RemoteFile("http://127.0.0.1:9/file.bin")
    with pytest.raises(DataError, match=r"cannot fetch http://127.0.0.1:9/file.bin: .*refused; fetch it elsewhere, put it at") as caught:
        download.fetch(closed, path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_beir_archive_is_unpacked_beside_the_rest(tmp_path: Path, server: RangeServer, out: Path) -> None:
    folder = beir_folder(tmp_path / "made" / "msmarco")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("corpus.jsonl", "qrels/train.tsv"):
            archive.write(folder / name, f"msmarco/{name}")
        archive.writestr("msmarco/queries.jsonl", gzip.decompress((folder / "queries.jsonl.gz").read_bytes()))
        archive.writestr("msmarco/../../outside.jsonl", "x")
        archive.writestr("../corpus.jsonl/corpus.jsonl", "x")
    server.content = content.getvalue()
    download.download([server.file("msmarco.zip")], tmp_path / "in")
    assert sorted(str(path.relative_to(tmp_path / "in")) for path in (tmp_path / "in").rglob("*") if path.is_file()) == [
        "corpus.jsonl",
        "msmarco.zip",
        "qrels/train.tsv",
        "queries.jsonl",
    ]
    assert prepare(tmp_path / "in", out).splits["train"].rows == 3
    (tmp_path / "in" / "msmarco.zip").write_bytes(server.content[:200])
    with pytest.raises(DataError, match="not a whole zip archive"):
        download.download([server.file("msmarco.zip")], tmp_path / "in")


def test_every_data_set_has_its_files() -> None:
    for name in download.FILES:
        urls = [file.url for file in download.files_of(name, passages=name != "msmarco")]
        assert len(urls) == len(set(urls)) >= 3
        assert all(url.startswith("https://") for url in urls)
    with pytest.raises(ValueError, match="use one of nq, trivia, webq, trec, msmarco"):
        download.files_of("squad")


def test_the_command_downloads_then_prepares(tmp_path: Path, server: RangeServer, out: Path, monkeypatch) -> None:
    from contaccum.cli import app

    server.content = gzip.compress(json.dumps([dpr_record()]).encode())
    monkeypatch.setitem(download.FILES, "nq", (server.file("biencoder-nq-train.json.gz"),))
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "in"), "--download", "nq", "--output", str(out)])
    assert result.exit_code == 0, result.output
    assert len(load_training_set(out)) == 1
