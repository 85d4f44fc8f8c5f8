"""A disk that is full, as a process sees it."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from app.machine import files


def free_on_disks(monkeypatch: pytest.MonkeyPatch, free_bytes: Callable[[], int]) -> None:
    """Every disk has so much room, as far as this process asks."""
    monkeypatch.setattr(files, "free_bytes", lambda folder: free_bytes())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes past `size` bytes of a file fail with `OSError`, in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
