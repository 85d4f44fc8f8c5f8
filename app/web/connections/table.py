"""The open connections: counted, and told apart by whether a request is under way."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.metrics.connections import ConnectionMetrics, Ended, Refused
from app.web.connections.caps import Caps

RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: the kernel drops what the client has not read. It would keep that for minutes otherwise."""

GRACE_S = 0.05
"""For how long a connection does not give way: its request may be on its way to the server."""


@dataclass(slots=True, eq=False)
class Connection:
    """One connection. Times are of the event loop, in s."""

    origin: str
    transport: asyncio.Transport | None = None
    """None until the event loop has made it."""
    lingers: bool = True
    """Whether its client has a moment to read the last answer."""
    _unsent: int = 0
    _stalled_since: float = 0.0

    def stalled_s(self, now: float) -> float:
        """For how long the client has read nothing, in s, as far as a call now and then can tell. 0 if nothing waits
        for it.
        """
        unsent = 0 if self.transport is None else self.transport.get_write_buffer_size()
        if not self._unsent or unsent < self._unsent:
            self._stalled_since = now
        self._unsent = unsent
        return now - self._stalled_since

    def note_sent(self) -> None:
        """Note that the client has read all that waited for it."""
        self._unsent = 0

    def abort(self) -> None:
        """End it at once."""
        self.lingers = False
        if self.transport is not None:
            self.transport.abort()

    def reset(self) -> None:
        """End it at once, and drop what the client has not read."""
        if self.transport is not None:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.abort()


@dataclass(slots=True)
class _Crowd:
    """The connections of one origin, or of all."""

    open: set[Connection] = field(default_factory=set)
    waiting: dict[Connection, float] = field(default_factory=dict)
    """Those without a request under way, and since when, from the one that has waited for longest."""

    def giving_way(self, now: float) -> Connection | None:
        """The connection that may be closed for another."""
        connection, since = next(iter(self.waiting.items()), (None, now))
        return connection if now - since >= GRACE_S else None


class ConnectionTable:
    """Every open connection. Used on the event loop only."""

    def __init__(self, caps: Caps, metrics: ConnectionMetrics) -> None:
        self.caps = caps
        self._metrics = metrics
        self._all = _Crowd()
        self._origins: defaultdict[str, _Crowd] = defaultdict(_Crowd)

    def __iter__(self) -> Iterator[Connection]:
        """Those that are open now; they may close meanwhile."""
        return iter(list(self._all.open))

    def make_room(self, origin: str, now: float) -> Refused | None:
        """Make room for one more of that origin; returns why there is none.

        At a cap, the connection that has been without a request for longest gives way. A client that keeps one open
        between requests knows that servers close those.
        """
        cap = self.caps.of_origin(origin)
        if cap < self.caps.total and not self._shrink(self._origins.get(origin, _Crowd()), cap, now):
            return Refused.ADDRESS
        return None if self._shrink(self._all, self.caps.total, now) else Refused.TOTAL

    def open(self, origin: str) -> Connection:
        """Count one more."""
        connection = Connection(origin)
        for crowd in (self._all, self._origins[origin]):
            crowd.open.add(connection)
        self._metrics.open.inc()
        return connection

    def close(self, connection: Connection) -> None:
        """Count it no more. One that has given way is not counted already."""
        if connection not in self._all.open:
            return
        self.set_waiting(connection, None)
        own = self._origins[connection.origin]
        for crowd in (self._all, own):
            crowd.open.discard(connection)
        if not own.open:
            del self._origins[connection.origin]
        self._metrics.open.dec()

    def set_waiting(self, connection: Connection, since: float | None) -> None:
        """Note since when a connection has no request under way, in s; None if it has one. One that has none already
        keeps its place.
        """
        if connection not in self._all.open:
            return
        for crowd in (self._all, self._origins[connection.origin]):
            if since is None:
                crowd.waiting.pop(connection, None)
            else:
                crowd.waiting.setdefault(connection, since)

    def _shrink(self, crowd: _Crowd, cap: int, now: float) -> bool:
        """Whether there is room for one more below the cap, if need be because another gives way."""
        if len(crowd.open) < cap:
            return True
        if (connection := crowd.giving_way(now)) is None or connection.transport is None:
            return False
        self._metrics.count_ended(Ended.GAVE_WAY)
        connection.abort()
        # Its descriptor is free in a moment, its room must be at once.
        self.close(connection)
        return True
