"""Peers live in a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.peers.base import ServerSettings


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache/djinn/peers"


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(tmp_path / "models/tiny", "bfloat16", kv_tokens=20480, context_tokens=1728, cores=(0, 1))
