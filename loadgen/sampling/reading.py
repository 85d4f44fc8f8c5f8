"""What a server tells of itself at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loadgen.load.records import ServerTotals


@dataclass(frozen=True, slots=True)
class Reading:
    """Gauges and totals of a server; their meaning is that of `Sample` and `ServerTotals`."""

    sessions: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    totals: ServerTotals = field(default_factory=ServerTotals)


class Reader(Protocol):
    """Asks one kind of server."""

    async def read(self) -> Reading | None:
        """What the server tells now; None if it tells nothing. Raises `client.DjinnError`."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...
