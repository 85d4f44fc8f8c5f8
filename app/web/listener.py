"""Takes connections. asyncio's own way has no caps, and logs a traceback for each one that it cannot take."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from app.domain.errors import FieldOutOfRange, TooManyConnections
from app.domain.tasks import Tasks
from app.telemetry.metrics import ConnectionMetrics, Refused
from app.web.connections import ONCE_PER_MINUTE, Connection, ConnectionTable, Lingering, origin_of
from app.web.protocol import last_answer

logger = logging.getLogger(__name__)

logger.addFilter(ONCE_PER_MINUTE)

AT_ONCE = 64
"""Connections that are taken before anything else gets its turn."""
PAUSE_S = 0.1
"""Until the next try, when the system could give none."""
UNSENT_BYTES = 256 << 10
"""Of an answer that a client reads slowly, the kernel keeps no more than this, instead of some MB for each connection.
It is then soon clear whether a client reads slowly, or nothing.
"""
RETRY_AFTER_S = 1


class AcceptedSocket(socket.socket):
    """A connection's socket, which tells when it is to be closed. Its protocol cannot: a WebSocket gets another one."""

    on_close: Callable[[socket.socket], None]

    def close(self) -> None:
        """Hand it over to be closed."""
        if self.fileno() >= 0:
            self.on_close(socket.socket(self.family, self.type, self.proto, fileno=self.detach()))


@dataclass(eq=False)
class Listener:
    """Takes the connections of one bound socket, within the caps of `table`, from `start` to `close`."""

    _bound: socket.socket
    _table: ConnectionTable
    _metrics: ConnectionMetrics
    _make_protocol: Callable[[Connection], asyncio.Protocol]
    _opening: Tasks = field(default_factory=Tasks)
    _lingering: Lingering = field(default_factory=Lingering)
    _retry: asyncio.TimerHandle | None = None

    def start(self, backlog: int) -> None:
        """Listen. Call on the running event loop."""
        self._bound.setblocking(False)
        self._bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # connections inherit it
        self._bound.listen(backlog)
        self._watch()

    def close(self) -> None:
        """Take no more; those that are open stay."""
        if self._retry is not None:
            self._retry.cancel()
        asyncio.get_running_loop().remove_reader(self._bound)
        self._lingering.close()

    def _watch(self) -> None:
        self._retry = None
        asyncio.get_running_loop().add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, peer = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._take(accepted, peer[0])

    def _pause(self, error: OSError) -> None:
        """The system keeps saying that a connection is there: to try at once again would take all of a core."""
        logger.warning("connections cannot be taken: %s; they wait", error.strerror)
        self._metrics.refused.labels(Refused.SYSTEM).inc()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._bound)
        self._retry = loop.call_later(PAUSE_S, self._watch)

    def _take(self, accepted: socket.socket, peer: str) -> None:
        origin = origin_of(peer)
        if (cause := self._table.make_room(origin, asyncio.get_running_loop().time())) is not None:
            self._refuse(accepted, peer, cause)
            return
        connection = self._table.open(origin)
        own = AcceptedSocket(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        own.on_close = lambda ended: self._close(connection, ended)
        self._opening.start(self._open(own, connection))

    async def _open(self, accepted: AcceptedSocket, connection: Connection) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: self._make_protocol(connection), accepted)
        except OSError:  # the client has gone already
            accepted.close()

    def _refuse(self, accepted: socket.socket, peer: str, cause: Refused) -> None:
        self._metrics.refused.labels(cause).inc()
        caps = self._table.caps
        if cause is Refused.TOTAL:
            error = TooManyConnections(f"{caps.total} connections are open, each with a request: try again")
            logger.warning("connections are refused: %d are open, each with a request", caps.total)
        else:
            most = caps.of_origin(origin_of(peer))
            error = TooManyConnections(f"this address has {most} connections open, each with a request: try again")
            logger.warning("connections from %s are refused: it has %d open, each with a request", peer, most)
        accepted.setblocking(False)
        with contextlib.suppress(OSError):
            accepted.send(last_answer(error, f"retry-after: {RETRY_AFTER_S}"))
        self._lingering.take(accepted)

    def _close(self, connection: Connection, ended: socket.socket) -> None:
        """The connection counts no more, even if its client has a moment to read the answer."""
        self._table.close(connection)
        if connection.lingers:
            self._lingering.take(ended)
        else:
            ended.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port but does not listen yet. Raises `FieldOutOfRange` if the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, an answer of two writes waits
    # 40 ms for the client's delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # Other sockets that may reuse the address could bind it too until this one listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        bound.close()
        setting = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise FieldOutOfRange(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --{setting}", param=setting
        ) from error
    return bound
