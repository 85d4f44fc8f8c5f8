"""The file of bundles: whole or not there, readable by anybody, and used only for what it was written for."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

from app.domain.errors import FieldOutOfRange
from app.gpu.weights.conversion import open_bundle_file
from app.gpu.weights.file import BundleFile
from app.gpu.weights.fill import Writer
from app.gpu.weights.header import BundleContents, Section, file_bytes
from app.gpu.weights.layout import BundleLayout
from app.model_store.errors import StoreFull
from tests.gpu.weights.bundles import make_model, same_bits

MODEL = make_model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights" / "model.safetensors"


def refuse(writer: Writer) -> None:
    raise AssertionError("written again")


def test_it_is_written_once_and_the_safetensors_library_reads_it(path: Path) -> None:
    MODEL.write(path).close()
    open_bundle_file(path, MODEL.contents, refuse).close()
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["fingerprint"] == "model-a"
        for index in range(len(MODEL.bundles)):
            assert MODEL.holds(index, file.get_tensor(f"bundle.{index}"))
        for index, table in enumerate(MODEL.tables):
            assert same_bits(file.get_tensor(f"table.{index}"), table)


def test_two_servers_that_start_together_write_it_once(path: Path) -> None:
    written, both = list[int](), threading.Barrier(2)

    def fill(writer: Writer) -> None:
        written.append(1)
        MODEL.fill(writer)

    def start() -> None:
        both.wait()
        open_bundle_file(path, MODEL.contents, fill).close()

    servers = [threading.Thread(target=start) for _ in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    assert written == [1]


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "of another version": (lambda file: file.replace(b'"version":"2"', b'"version":"0"'), "version 0"),
    "of something else": (lambda file: file.replace(b"djinn-weights", b"other-weights"), "not that of weights"),
    "with another header": (lambda file: file.replace(b'"dtype":"U8"', b'"dtype":"I8"', 1), "not as Djinn writes it"),
    "shorter": (lambda file: file[:-1], "bytes"),
    "all zeros": (lambda file: bytes(len(file)), "length of its header"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILT.values(), ids=SPOILT)
def test_a_file_that_cannot_be_used_is_written_anew(
    path: Path, spoil: Callable[[bytes], bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    MODEL.write(path).close()
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    assert path.read_bytes() != whole
    with caplog.at_level(logging.WARNING):
        MODEL.write(path).close()
    assert reason in caplog.text
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (replace(MODEL.contents, fingerprint="model-b"), "'model-a', not 'model-b'"),
        (replace(MODEL.contents, dtype=torch.bfloat16), "float32, not bfloat16"),
        (replace(MODEL.contents, layouts=[BundleLayout.of([torch.empty(8, 8)])] * 4), "laid out"),
        (replace(MODEL.contents, tables=MODEL.contents.tables[:1]), "header"),
    ],
)
def test_a_file_for_something_else_is_written_anew(
    path: Path, wanted: BundleContents, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(writer: Writer) -> None:
        for index, layout in enumerate(wanted.layouts):
            writer.bundle(index, [torch.ones(piece.shape, dtype=piece.dtype) for piece in layout.pieces])
        for index, table in enumerate(wanted.tables):
            writer.table(index, torch.ones(table.shape, dtype=table.dtype))

    MODEL.write(path).close()
    with caplog.at_level(logging.WARNING):
        open_bundle_file(path, wanted, fill).close()
    assert reason in caplog.text
    open_bundle_file(path, wanted, refuse).close()


def names_beside(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


def test_a_conversion_that_fails_leaves_nothing_and_what_a_killed_one_leaves_is_not_used(path: Path) -> None:
    partial: dict[Path, bytes] = {}

    def fail_after_one(writer: Writer) -> None:
        writer.bundle(0, MODEL.bundles[0])
        partial.update({each: each.read_bytes() for each in path.parent.iterdir() if each.suffix == ".partial"})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_bundle_file(path, MODEL.contents, fail_after_one)
    assert names_beside(path) == [".model.safetensors.lock"]
    [(left, content)] = partial.items()
    left.write_bytes(content)
    MODEL.write(path).close()
    assert names_beside(path) == [".model.safetensors.lock", "model.safetensors"]


def test_a_disk_that_is_too_small_or_that_others_fill_meanwhile_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    needed = file_bytes(MODEL.contents)
    found = psutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found._replace(free=needed - 1))
    with pytest.raises(StoreFull, match=r"0\.0 MiB free, and this needs 0\.0 MiB"):
        open_bundle_file(path, MODEL.contents, refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found._replace(free=needed))
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreFull, match="is full"):
        MODEL.write(path)
    assert names_beside(path) == [".model.safetensors.lock"]
    monkeypatch.undo()
    MODEL.write(path).close()


def test_a_folder_that_cannot_be_made_is_the_cache_dirs_fault(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FieldOutOfRange, match="taken") as refused:
        MODEL.write(tmp_path / "taken" / "model.safetensors")
    assert refused.value.param == "cache_dir"


def drop(file: BundleFile, section: Section) -> bool:
    """Have the system forget the file's pages; returns whether it has those of the section. It does when nobody has to
    do with them any more.
    """
    os.fsync(file.fileno())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not file.is_cached(section):
            return True
        time.sleep(0.01)
    return False


def test_what_was_read_is_in_memory_until_the_system_drops_it(path: Path) -> None:
    file = MODEL.write(path)
    section = file.bundles[1]
    file.checksum(section)
    assert file.is_cached(section)
    if not drop(file, section):
        pytest.skip("the file system of temporary files keeps them in memory")
    time.sleep(0.05)
    assert not file.is_cached(section), "asking brings nothing there"
    file.checksum(section)
    assert file.is_cached(section)
    file.close()
