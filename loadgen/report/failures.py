"""Errors of one part of an experiment, written down so that the next part can run, and shown in the end."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.report.tables import Row, Table


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that could not be measured to its end. `kind` is the name of the error's class."""

    part: str
    kind: str
    message: str


class Findings(Protocol):
    """What was seen, which may have been ended early."""

    interrupted: bool


@contextmanager
def noting(part: str, failures: list[Failure]) -> Iterator[None]:
    """Write down an error of the block, and go on behind it."""
    try:
        yield
    except (DjinnError, LoadgenError, OSError) as error:
        failures.append(Failure(part, type(error).__name__, str(error)))


@contextmanager
def ending_early(findings: Findings) -> Iterator[None]:
    """Take a Ctrl-C for the end of the block: what was seen until then is a result."""
    try:
        yield
    except asyncio.CancelledError:
        findings.interrupted = True


def failure_table(failures: Sequence[Failure], *, interrupted: bool) -> Table:
    """What could not be measured, and how many times; without rows if all was."""
    found: list[Row] = [
        {"part": each.part, "error": each.kind, "message": each.message, "times": count}
        for each, count in Counter(failures).items()
    ]
    early = {"part": "the run", "error": "interrupted", "message": "what is shown is what was measured until then"}
    return Table("Not measured to the end", [*found, *([early] if interrupted else [])])
