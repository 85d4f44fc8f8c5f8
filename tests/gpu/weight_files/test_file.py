"""The file of bundles: whole or not there, readable by anybody, and used only for what it was written for."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

from app.domain.errors import FieldOutOfRange
from app.gpu.weight_files.conversion import open_bundle_file
from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_files.header import BundleContents, file_bytes
from app.gpu.weight_files.layout import BundleLayout
from app.gpu.weight_ring.fill import Writer
from app.model_store.errors import StoreFull
from tests.gpu.weight_files.bundles import Model, make_model, same_bits

MODEL = make_model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file will be."""
    return tmp_path / "weights" / "model.safetensors"


def refuse(writer: Writer) -> None:
    raise AssertionError("written again")


def test_the_safetensors_library_reads_it(path: Path) -> None:
    MODEL.write(path).close()
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["fingerprint"] == "model-a"
        for index in range(len(MODEL.bundles)):
            assert MODEL.holds(index, file.get_tensor(f"bundle.{index}"))
        for index, table in enumerate(MODEL.tables):
            assert same_bits(file.get_tensor(f"table.{index}"), table)


def test_every_bundle_and_table_begins_on_a_page(path: Path) -> None:
    MODEL.write(path).close()
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    assert start % 4096 == 0
    for name in ("bundle.0", "bundle.1", "bundle.3", "table.0", "table.1"):
        assert tensors[name]["data_offsets"][0] % 4096 == 0


def test_a_model_without_weights_has_a_file_too(path: Path) -> None:
    empty = Model([], [])
    empty.write(path).close()
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == []
    open_bundle_file(path, empty.contents, refuse).close()


def test_it_is_written_once(path: Path) -> None:
    MODEL.write(path).close()
    open_bundle_file(path, MODEL.contents, refuse).close()


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


def of_another_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version":"2"', b'"version":"0"'))


def of_something_else(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format":"djinn-weights"', b'"format":"other-weights"'))


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def without_end_of_header(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def all_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def with_another_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"bundle.0":{"dtype":"U8"', b'"bundle.0":{"dtype":"I8"'))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (of_another_version, "version 0"),
        (of_something_else, "not that of weights of Djinn"),
        (shorter, "bytes"),
        (longer, "bytes"),
        (without_end_of_header, "length of its header"),
        (empty, "length of its header"),
        (all_zeros, "length of its header"),
        (with_another_header, "not as Djinn writes it"),
    ],
)
def test_a_file_that_cannot_be_used_is_written_anew(
    path: Path, spoil: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    MODEL.write(path).close()
    whole = path.read_bytes()
    spoil(path)
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
        (replace(MODEL.contents, layouts=MODEL.contents.layouts[:-1]), "laid out"),
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


def fail_after_one(writer: Writer) -> None:
    writer.bundle(0, MODEL.bundles[0])
    raise KeyboardInterrupt


def test_a_conversion_that_fails_leaves_nothing(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        open_bundle_file(path, MODEL.contents, fail_after_one)
    assert [each.name for each in path.parent.iterdir()] == [".model.safetensors.lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from app.gpu.weight_files.conversion import open_bundle_file
from tests.gpu.weight_files.bundles import make_model
model = make_model()
def fill(writer):
    writer.bundle(0, model.bundles[0])
    os.kill(os.getpid(), signal.SIGKILL)
open_bundle_file(Path(sys.argv[1]), model.contents, fill)
"""


def test_a_conversion_that_is_killed_leaves_no_file_that_is_used(path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=Path(__file__).parents[3], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert any(each.name.endswith(".partial") for each in path.parent.iterdir())
    MODEL.write(path).close()
    assert sorted(each.name for each in path.parent.iterdir()) == [".model.safetensors.lock", "model.safetensors"]


def test_what_was_forgotten_or_does_not_fit_is_no_file(path: Path) -> None:
    def forget(writer: Writer) -> None:
        for index, tensors in enumerate(MODEL.bundles[:-1]):
            writer.bundle(index, tensors)

    with pytest.raises(ValueError, match=r"bundle\.3, table\.0, table\.1"):
        open_bundle_file(path, MODEL.contents, forget)
    with pytest.raises(ValueError, match="bundle 0 is not laid out"):
        open_bundle_file(path, MODEL.contents, lambda writer: writer.bundle(0, MODEL.bundles[1]))
    with pytest.raises(ValueError, match="table 1"):
        open_bundle_file(path, MODEL.contents, lambda writer: writer.table(1, MODEL.tables[0]))
    assert not path.exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = file_bytes(MODEL.contents)
    found = psutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found._replace(free=needed - 1))
    with pytest.raises(StoreFull, match=r"0\.0 MiB free, and this needs 0\.0 MiB"):
        open_bundle_file(path, MODEL.contents, refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found._replace(free=needed))
    MODEL.write(path).close()


def test_a_disk_that_others_fill_meanwhile_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreFull, match="is full"):
        MODEL.write(path)
    assert [each.name for each in path.parent.iterdir()] == [".model.safetensors.lock"]


def test_a_folder_that_cannot_be_made_is_the_cache_dirs_fault(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FieldOutOfRange, match="taken") as refused:
        MODEL.write(tmp_path / "taken" / "model.safetensors")
    assert refused.value.param == "cache_dir"


def test_every_cut_is_found(path: Path) -> None:
    MODEL.write(path).close()
    whole = path.read_bytes()
    for length in (*range(0, 4200, 61), *range(4200, len(whole), 4099), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(Exception, match=r"header|bytes"):
            BundleFile(path, MODEL.contents)
