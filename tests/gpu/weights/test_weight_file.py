"""The file of bundles: whole or not there, readable by anybody, and used only for what it was written for."""

import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

from app.domain.errors import FieldOutOfRange, WeightsLost
from app.gpu.weights.file import open_weight_file
from app.gpu.weights.layout import BundleLayout, WeightLayout, Write, sections_of
from app.gpu.weights.stores import FileStore
from app.model_store.install import StoreFull
from tests.gpu.weights.bundles import make_model, overwrite, same_bits

MODEL = make_model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights" / "model.safetensors"


def refuse(write: Write) -> None:
    raise AssertionError("written again")


def test_it_is_written_once_and_the_safetensors_library_reads_it(path: Path) -> None:
    MODEL.write(path).close()
    open_weight_file(path, MODEL.name, MODEL.layout, refuse).close()
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["model"] == "model-a"
        for index in range(len(MODEL.bundles)):
            assert MODEL.holds(index, file.get_tensor(f"bundle.{index}"))
        for index, table in enumerate(MODEL.tables):
            assert same_bits(file.get_tensor(f"table.{index}"), table)


def test_two_servers_that_start_together_write_it_once(path: Path) -> None:
    written, both = list[int](), threading.Barrier(2)

    def fill(write: Write) -> None:
        written.append(1)
        MODEL.fill(write)

    def start() -> None:
        both.wait()
        open_weight_file(path, MODEL.name, MODEL.layout, fill).close()

    servers = [threading.Thread(target=start) for _ in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    assert written == [1]


def _other(digit: re.Match[bytes]) -> bytes:
    return b"1" if digit[0] == b"0" else b"0"


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "of another version": (lambda file: file.replace(b'"version":"3"', b'"version":"0"'), "version 0"),
    "of something else": (lambda file: file.replace(b"djinn-weights", b"other-weights"), "not that of weights"),
    "with another header": (lambda file: file.replace(b'"dtype":"U8"', b'"dtype":"I8"', 1), "not as Djinn writes it"),
    "with another checksum": (lambda file: re.sub(rb'(?<="checksums":").', _other, file), "not as Djinn writes it"),
    "with another time": (lambda file: re.sub(rb'(?<="written":"0).', b"1", file), "not as Djinn writes it"),
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
        file = MODEL.write(path)
    assert reason in caplog.text
    file.check()
    file.close()
    assert _behind_header(path.read_bytes()) == _behind_header(whole)


def _behind_header(file: bytes) -> bytes:
    """The weights alone: the header has the time of the writing."""
    return file[8 + int.from_bytes(file[:8], "little") :]


@pytest.mark.parametrize(
    ("model", "wanted", "reason"),
    [
        ("model-b", MODEL.layout, "'model-a', not 'model-b'"),
        ("model-a", replace(MODEL.layout, bundles=[BundleLayout.of([torch.empty(8, 8)])] * 4), "laid out"),
        ("model-a", replace(MODEL.layout, tables=MODEL.layout.tables[:1]), "laid out"),
    ],
)
def test_a_file_for_something_else_is_written_anew(
    path: Path, model: str, wanted: WeightLayout, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(write: Write) -> None:
        for name, part in wanted.parts().items():
            write(name, [torch.ones(piece.shape, dtype=piece.dtype) for piece in part.pieces])

    MODEL.write(path).close()
    with caplog.at_level(logging.WARNING):
        open_weight_file(path, model, wanted, fill).close()
    assert reason in caplog.text
    open_weight_file(path, model, wanted, refuse).close()


def start(path: Path) -> FileStore:
    """As a server does."""
    return FileStore(open_weight_file(path, MODEL.name, MODEL.layout, refuse))


@pytest.mark.parametrize("name", MODEL.sections)
def test_damage_that_the_time_tells_of_is_found_at_a_start(path: Path, name: str) -> None:
    MODEL.write(path).close()
    written, section = path.stat().st_mtime, MODEL.sections[name]
    for place in {0, section.nbytes // 2, section.nbytes - 1} if section.nbytes else ():
        overwrite(path, section.offset + place)
        for _ in range(2):
            with pytest.raises(WeightsLost, match=re.escape(f"{name} of the weights in {path}")) as refused:
                start(path)
            assert refused.value.message.endswith(
                "Delete the file and start the server again: the server then writes it again"
            )
        overwrite(path, section.offset + place)
    os.utime(path, (written, written))
    start(path).close()


def names_beside(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


def test_a_conversion_that_fails_leaves_nothing_and_what_a_killed_one_leaves_is_not_used(path: Path) -> None:
    partial: dict[Path, bytes] = {}

    def fail_after_one(write: Write) -> None:
        write("bundle.0", MODEL.bundles[0])
        partial.update({each: each.read_bytes() for each in path.parent.iterdir() if each.suffix == ".partial"})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_weight_file(path, MODEL.name, MODEL.layout, fail_after_one)
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

    needed = sections_of(MODEL.name, MODEL.layout)[1]
    found = psutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found._replace(free=needed - 1))
    with pytest.raises(StoreFull, match=r"0\.0 MiB free, and this needs 0\.0 MiB"):
        open_weight_file(path, MODEL.name, MODEL.layout, refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found._replace(free=needed))
    monkeypatch.setattr(os, "fsync", fail)
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
