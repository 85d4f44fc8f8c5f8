"""Files that are read from the disk each time, whatever memory the machine has to spare."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PERIOD_S = 0.1
"""Less than a pass over weights takes that are worth streaming. Much less would drop what the system has just read
ahead for whoever reads next, who would wait for it twice.
"""


@contextmanager
def dropped(paths: Sequence[Path]) -> Iterator[None]:
    """Keep the page cache empty of these files in the block.

    Dropping them once would only make the first pass over them a cold one. Pages that a process has mapped stay as long
    as they are; those on their way from the disk, too. Raises OSError.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")).fileno() for path in paths]
        for file in files:
            os.fsync(file)  # what is not on the disk yet cannot be dropped
        _drop(files)
        over = threading.Event()
        dropping = threading.Thread(target=_drop_until, args=(files, over), name="page cache")
        dropping.start()
        try:
            yield
        finally:
            over.set()
            dropping.join()


def _drop_until(files: Sequence[int], over: threading.Event) -> None:
    while not over.wait(PERIOD_S):
        _drop(files)


def _drop(files: Sequence[int]) -> None:
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
