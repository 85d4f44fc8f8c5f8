"""Files that are dropped from the page cache are read from the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from loadgen.weights.page_cache import dropped

SIZE = 4 << 20


def is_cached(path: Path) -> bool:
    """Whether the file's last bytes could be read without waiting for the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.preadv(file, [bytearray(4096)], SIZE - 4096, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this file system does not tell what is cached: {error}")
    finally:
        os.close(file)
    return True


def test_a_file_is_cold_while_the_block_lasts_however_often_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    assert is_cached(path)
    with dropped([path]):
        assert not is_cached(path)
        path.read_bytes()
        deadline = time.monotonic() + 10
        while is_cached(path):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    path.read_bytes()
    time.sleep(0.1)
    assert is_cached(path)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), dropped([tmp_path / "weights"]):
        pass
