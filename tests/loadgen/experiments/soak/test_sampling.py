"""What a soak measures of a server's folder while the server uses it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from loadgen.experiments.soak.sampling import folder_bytes


def test_a_folder_that_vanishes_meanwhile_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "tmp"
    inner.mkdir()
    (inner / "upload").write_bytes(b"123")
    (tmp_path / "journal").write_bytes(b"12345")
    assert folder_bytes(tmp_path) == 8
    size = os.path.getsize

    def vanish(path: str) -> int:
        shutil.rmtree(inner, ignore_errors=True)
        return size(path)

    monkeypatch.setattr(os.path, "getsize", vanish)
    assert folder_bytes(tmp_path) == 5
