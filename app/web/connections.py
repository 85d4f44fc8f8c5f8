"""Connections of clients: how many there may be, and how long each may keep the server waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from app.domain.errors import FieldOutOfRange
from app.settings import Settings
from app.telemetry.metrics import ConnectionMetrics, Ended, Refused

MOST_ORIGINS = 8192
"""Connections that a server has room for unless it is told otherwise: two for each session."""
OWN_SHARE = 4
"""One descriptor of so many is for files that the server opens itself."""
ADDRESS_SHARE = 2
"""One address has one connection of so many, unless the server is told otherwise."""

LOOPBACK = "loopback"
"""The origin of everything that runs on the server's own machine."""


@dataclass(frozen=True, slots=True)
class Caps:
    """How many connections may be open at once: all of them, those of one origin, those of `LOOPBACK`."""

    total: int
    per_origin: int
    loopback: int

    @classmethod
    def of(cls, settings: Settings, descriptors: int) -> Caps:
        """What the settings ask for, in a process with that limit of open descriptors.

        Raises `FieldOutOfRange` for more connections than the limit leaves room for.
        """
        room = descriptors - descriptors // OWN_SHARE
        total = min(MOST_ORIGINS, room) if settings.max_connections is None else settings.max_connections
        if total > room:
            raise FieldOutOfRange(
                f"max_connections must be at most {room}: the limit of open files (ulimit -n) is {descriptors}, and "
                "the server needs a quarter of them itself",
                param="max_connections",
            )
        if settings.max_connections_per_address is not None:
            return cls(total, settings.max_connections_per_address, settings.max_connections_per_address)
        return cls(total, max(1, total // ADDRESS_SHARE), total)

    def of_origin(self, origin: str) -> int:
        """How many the origin may have."""
        return self.loopback if origin == LOOPBACK else self.per_origin


def origin_of(peer: str) -> str:
    """What counts as one address: an IPv4 address, an IPv6 network of 64 bits, which one host has to itself, or
    `LOOPBACK`.
    """
    address: IPv4Address | IPv6Address = ip_address(peer)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return LOOPBACK
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((int(address), 64), strict=False))


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

        At a cap, the connection that has been without a request for longest is closed. A client that keeps one open
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
        """Whether there is room for one more below the cap, if need be after another was closed."""
        if len(crowd.open) < cap:
            return True
        if (connection := crowd.giving_way(now)) is None or connection.transport is None:
            return False
        self._metrics.ended.labels(Ended.GAVE_WAY).inc()
        connection.abort()
        # Its descriptor is free in a moment, its room must be at once.
        self.close(connection)
        return True


INTERVAL_S = 60.0


REFUSED_HANDSHAKE = "ASGI callable returned without completing handshake."
"""What uvicorn calls an error whenever a WebSocket is refused, also with a whole answer."""


class OncePerMinute(logging.Filter):
    """Lets each warning through once a minute, whatever its arguments are. Errors always pass, but for what is none."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[tuple[str, int], float] = {}
        """When the line of code that logs may do so again."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno != logging.WARNING:
            return record.msg != REFUSED_HANDSHAKE
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now < self._next.get(place, 0.0):
            return False
        self._next[place] = now + INTERVAL_S
        return True


ONCE_PER_MINUTE = OncePerMinute()


LINGER_S = 1.0
"""How long a connection stays for its client to read the answer and close it."""
MOST_LINGERING = 32
"""Connections that stay at once. One more, and the first of them is closed."""
READ_BYTES = 64 << 10
DROPPED_BYTES = 16 << 20
"""Of what a client still sends, so much is read and dropped. The rest waits until the connection is closed."""


class Lingering:
    """Keeps ended connections for a moment. Used on the event loop only."""

    def __init__(self) -> None:
        self._stays: dict[socket.socket, asyncio.TimerHandle] = {}
        """Those that stay, and the timer of their end."""
        self._dropped = Counter[socket.socket]()
        self._is_open = True

    def take(self, ended: socket.socket) -> None:
        """Tell the client that nothing more comes, and close `ended` when it has done so too, or a little later."""
        with contextlib.suppress(OSError):  # the client has gone already
            ended.shutdown(socket.SHUT_WR)
        if not self._is_open:
            ended.close()
            return
        if len(self._stays) >= MOST_LINGERING:
            self._let_go(next(iter(self._stays)))
        ended.setblocking(False)
        loop = asyncio.get_running_loop()
        self._stays[ended] = loop.call_later(LINGER_S, self._let_go, ended)
        loop.add_reader(ended, self._drop, ended)

    def close(self) -> None:
        """Let all of them go, and from now on each at once."""
        self._is_open = False
        for ended in list(self._stays):
            self._let_go(ended)

    def _drop(self, ended: socket.socket) -> None:
        """Drop what the client sends."""
        try:
            size = len(ended.recv(READ_BYTES))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        self._dropped[ended] += size
        if size == 0:
            self._let_go(ended)
        elif self._dropped[ended] >= DROPPED_BYTES:
            asyncio.get_running_loop().remove_reader(ended)

    def _let_go(self, ended: socket.socket) -> None:
        self._stays.pop(ended).cancel()
        del self._dropped[ended]
        asyncio.get_running_loop().remove_reader(ended)
        ended.close()


FULL_BYTES = 256
"""A piece of so many bytes is not small: to take its content costs as much as to find its ends."""
BURST = 1024
"""Empty pieces that may come at once: they hold up all others for about 10 ms."""
PER_S = 256.0
"""Empty pieces that may come each second for ever."""


class SmallPieces:
    """Counts the small pieces of one connection. A piece counts for the part of `FULL_BYTES` that it lacks."""

    def __init__(self) -> None:
        self._count = 0.0
        self._counted_at = 0.0

    def take(self, size: int, now: float) -> bool:
        """Count a piece of `size` bytes at `now`, in s of a monotonic clock. False if there are too many."""
        passed = (now - self._counted_at) * PER_S
        self._count = max(0.0, self._count - passed) + max(0.0, 1 - size / FULL_BYTES)
        self._counted_at = now
        return self._count <= BURST
