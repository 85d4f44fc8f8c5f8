"""Files that are read from the disk each time, whatever memory the machine has to spare."""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from loadgen.errors import NotAsMeant

PERIOD_S = 0.1
"""Less than a pass over weights takes that are worth streaming. Much less would drop what the system has just read
ahead for whoever reads next, who would wait for it twice.
"""
_LEFT_OVER = 0.1
"""Share of a file that may stay: what is on its way."""
_READ_BYTES = 1 << 20
_mincore = ctypes.CDLL(None, use_errno=True).mincore


@contextmanager
def dropped(paths: Sequence[Path]) -> Iterator[None]:
    """Keep the page cache empty of these files in the block. Afterwards they are in memory again, as far as there is
    room: who is measured next does not pay for it.

    Dropping them once would only make the first pass over them a cold one. Pages that a process has mapped stay as long
    as they are; those on their way from the disk, too. Raises OSError, and `NotAsMeant` if much of a file stays.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")).fileno() for path in paths]
        for file in files:
            os.fsync(file)  # what is not on the disk yet cannot be dropped
        over = threading.Event()
        dropping = threading.Thread(target=_drop_until, args=(files, over), name="page cache")
        try:
            _drop(files)
            for path, file in zip(paths, files, strict=True):
                _require_dropped(path, file)
            dropping.start()
            yield
        finally:
            over.set()
            if dropping.ident is not None:
                dropping.join()
            _read(files)


def _drop_until(files: Sequence[int], over: threading.Event) -> None:
    while not over.wait(PERIOD_S):
        _drop(files)


def _require_dropped(path: Path, file: int) -> None:
    size, stays = os.fstat(file).st_size, bytes_in_memory(file)
    if stays > size * _LEFT_OVER:
        raise NotAsMeant(f"{stays} of {size} bytes of {path} stay in memory: some process has them mapped")


def bytes_in_memory(file: int) -> int:
    """Of the open file, as the page cache has them. Asking brings none there."""
    size = os.fstat(file).st_size
    if not size:
        return 0
    seen = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with mmap.mmap(file, size, access=mmap.ACCESS_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if _mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(seen.ctypes.data)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int((seen & 1).sum()) * mmap.PAGESIZE


def _read(files: Sequence[int]) -> None:
    buffer = bytearray(_READ_BYTES)
    for file in files:
        place = 0
        while count := os.preadv(file, [buffer], place):
            place += count


def _drop(files: Sequence[int]) -> None:
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
