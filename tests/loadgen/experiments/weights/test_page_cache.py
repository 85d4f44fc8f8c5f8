"""Files that are dropped from the page cache are read from the disk."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from loadgen.errors import NotAsMeant
from loadgen.experiments.weights.page_cache import bytes_in_memory, dropped

SIZE = 4 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if bytes_in_memory(file.fileno()):
            pytest.skip("this file system keeps all of its files in memory")
        file.read()
    return path


def in_memory(path: Path) -> int:
    with path.open("rb") as file:
        return bytes_in_memory(file.fileno())


def test_a_file_is_cold_while_the_block_lasts_however_often_it_is_read_and_warm_again_afterwards(path: Path) -> None:
    assert in_memory(path) == SIZE
    with dropped([path]):
        assert in_memory(path) == 0
        path.read_bytes()
        deadline = time.monotonic() + 10
        while in_memory(path):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert in_memory(path) == SIZE


def test_a_file_that_cannot_be_dropped_is_an_error(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]), "every page is touched"
        with pytest.raises(NotAsMeant, match="stay in memory: some process has them mapped"), dropped([path]):
            pass


def test_an_empty_file_has_nothing_to_drop(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with dropped([tmp_path / "empty"]):
        pass


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), dropped([tmp_path / "weights"]):
        pass
