"""One line of the doctor's report."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """`warning`: it works, but figures that are taken here will mislead. `error`: it does not work."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """remedy: what to do about it, None where there is nothing to do."""

    name: str
    status: Status
    summary: str
    remedy: str | None = None


def ok(name: str, summary: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Status.OK, summary)


def warning(name: str, summary: str, remedy: str) -> Finding:
    """It works, but not as it could."""
    return Finding(name, Status.WARNING, summary, remedy)


def error(name: str, summary: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(name, Status.ERROR, summary, remedy)
