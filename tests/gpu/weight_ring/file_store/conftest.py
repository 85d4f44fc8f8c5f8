"""A file of bundles, and the store that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import app.gpu.weight_files.file
from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_ring.file_store import FileStore
from tests.gpu.weight_ring.file_store.stored import MODEL, open_store


@pytest.fixture(autouse=True, params=["memory", "disk"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the file's bytes seem to be. What is in memory is used there, or copied by who waits; the rest is read by
    a thread.
    """
    monkeypatch.setattr(BundleFile, "is_cached", lambda *_: request.param == "memory")
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of the file of `MODEL`."""
    MODEL.write(tmp_path / "model.safetensors").close()
    return tmp_path / "model.safetensors"


@pytest.fixture
def store(path: Path) -> Iterator[FileStore]:
    store = open_store(path)
    yield store
    store.close()


@pytest.fixture
def exact_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has just been written counts as proven."""
    monkeypatch.setattr(app.gpu.weight_files.file, "_CLOCK_NS", -1)
