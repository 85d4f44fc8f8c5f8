"""What the system has in memory of a file of bundles."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from app.gpu.weights.bundle_file import BundleFile
from app.gpu.weights.bundle_header import Section
from tests.gpu.weights.bundles import make_model

MODEL = make_model()


def drop(file: BundleFile, section: Section) -> bool:
    """Have the system forget the file's pages; returns whether it has those of the section. It does when nobody has to
    do with them any more; asking for one makes it read that one again.
    """
    os.fsync(file.fileno())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not file.is_cached(section):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux says whether reading would wait for the disk")
def test_what_was_read_is_in_memory_until_the_system_drops_it(tmp_path: Path) -> None:
    file = MODEL.write(tmp_path / "model.safetensors")
    section = file.bundles[1]
    file.checksum(section)
    assert file.is_cached(section)
    if not drop(file, section):
        pytest.skip("the file system of temporary files keeps them in memory")
    file.checksum(section)
    assert file.is_cached(section)
    file.close()


def test_a_system_that_does_not_say_counts_as_one_that_has_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MODEL.write(tmp_path / "model.safetensors")
    monkeypatch.setattr("app.gpu.weights.bundle_file._ONLY_FROM_MEMORY", None)
    assert not file.is_cached(file.bundles[0])
    file.close()
