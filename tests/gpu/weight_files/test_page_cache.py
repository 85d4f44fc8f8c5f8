"""What the system has in memory of a file of bundles."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from app.gpu.weight_files.file import BundleFile
from app.gpu.weight_files.header import Section
from app.gpu.weight_files.page_cache import Residency
from tests.gpu.weight_files.bundles import make_model

MODEL = make_model()


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


def test_what_was_read_is_in_memory_until_the_system_drops_it(tmp_path: Path) -> None:
    file = MODEL.write(tmp_path / "model.safetensors")
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


def test_what_has_a_hole_in_its_middle_is_not_in_memory(tmp_path: Path) -> None:
    nbytes, large = 9 << 20, tmp_path / "large"
    large.write_bytes(bytes(nbytes))
    with large.open("rb") as file, closing(Residency(file.fileno(), nbytes)) as residency:
        assert residency.holds(0, nbytes)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 2 << 20, 5 << 20, os.POSIX_FADV_DONTNEED)
        if residency.holds(4 << 20, 1 << 20):
            pytest.skip("the file system of temporary files keeps them in memory")
        assert residency.holds(0, 1 << 16)
        assert residency.holds(nbytes - 1, 1)
        assert not residency.holds(0, nbytes)


def test_a_system_that_does_not_say_counts_as_one_that_has_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MODEL.write(tmp_path / "model.safetensors")
    monkeypatch.setattr("app.gpu.weight_files.page_cache._mincore", None)
    assert not file.is_cached(file.bundles[0])
    file.close()
