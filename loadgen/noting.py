"""Errors of one part of an experiment, written down so that the next part can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.whitebox.findings import Failure


@contextmanager
def noting(part: str, failures: list[Failure]) -> Iterator[None]:
    """Write down an error of the block, and go on behind it."""
    try:
        yield
    except (DjinnError, LoadgenError, OSError) as error:
        failures.append(Failure(part, type(error).__name__, str(error)))
