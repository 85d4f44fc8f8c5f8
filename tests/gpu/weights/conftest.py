"""A file with the bundles of the `MODEL` of each module of tests."""

from pathlib import Path

import pytest

import app.gpu.weights.file


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.module.MODEL.write(tmp_path / "model.safetensors").close()
    return tmp_path / "model.safetensors"


@pytest.fixture
def exact_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has just been written counts as proven."""
    monkeypatch.setattr(app.gpu.weights.file, "_CLOCK_NS", -1)
