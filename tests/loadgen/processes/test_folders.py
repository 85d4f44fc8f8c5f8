"""Where models and peers are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.settings import Settings
from loadgen.processes.folders import cache_folder, default_model, peers_folder


def test_they_are_where_the_server_keeps_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DJINN_CACHE_DIR", raising=False)
    assert cache_folder() == Settings().cache_dir
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path))
    assert cache_folder() == Settings().cache_dir == tmp_path
    assert default_model().parent == tmp_path / "models"
    assert peers_folder() == tmp_path / "peers"
