"""A file with the bundles of the `MODEL` of each module of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import app.gpu.weights.file
from app.gpu.weights.file import WeightFile


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.module.MODEL.write(tmp_path / "model.safetensors").close()
    return tmp_path / "model.safetensors"


@pytest.fixture(params=["memory", "disk"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the file's bytes seem to be. What is in memory is used there, or copied by who waits; the rest is read by
    a thread.
    """
    monkeypatch.setattr(WeightFile, "is_cached", lambda *_: request.param == "memory")
    return str(request.param)


@pytest.fixture
def exact_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has just been written counts as proven."""
    monkeypatch.setattr(app.gpu.weights.file, "_CLOCK_NS", -1)
