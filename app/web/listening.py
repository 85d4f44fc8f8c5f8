"""uvicorn with limits for connections: what every server here has, whatever it serves."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from app.metrics.connections import ConnectionMetrics
from app.settings import Settings
from app.web.connections.caps import Caps
from app.web.connections.listener import Listener
from app.web.connections.protocol import Deadlines, HttpProtocol
from app.web.connections.quiet import ONCE_PER_MINUTE
from app.web.connections.table import Connection, ConnectionTable
from app.web.connections.watch import watch
from app.web.connections.websocket import WebSocketProtocol
from app.web.ending import ANSWERS_S

ECHO_S = 0.5
"""Linux tells a process of its parent's end, where it has asked for SIGTERM then, once for each thread of the parent
(prctl(2), PR_SET_PDEATHSIG). What comes so soon after the first is no second signal.
"""
KEEP_ALIVE_TIMEOUT_S = 75
"""Agents come back after a tool has run: uvicorn's 5 s would close their pooled connections under them."""


class ListeningServer(uvicorn.Server):
    """Serves `app` on one bound socket, within the caps and deadlines of the settings."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: ConnectionMetrics, caps: Caps) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                log_config=None,  # its lines have the form of all others
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
                timeout_graceful_shutdown=ANSWERS_S,
                ws=WebSocketProtocol,
                ws_max_size=int(settings.max_request_bytes),
                # A message of 8 kB would come to one of 8 MiB.
                ws_per_message_deflate=False,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(ONCE_PER_MINUTE)
        self.table = ConnectionTable(caps, metrics)
        self._metrics = metrics
        self._deadlines = Deadlines.of(settings)
        self._listener: Listener | None = None
        self._watching: asyncio.Task[None] | None = None
        self._told_at = 0.0
        """When a first signal came."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, on the one of `sockets`."""
        assert sockets is not None
        (bound,) = sockets
        # Connections inherit it: without it those of a server that was killed keep the port for a minute.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup([])
        if self.started:
            self._listener = Listener(bound, self.table, self._metrics, self.speak)
            self._listener.start(self.config.backlog)
            self._watching = asyncio.create_task(watch(self.table, self._deadlines, self._metrics))
            self.has_started(_url(bound))

    def has_started(self, url: str) -> None:
        """Called when it listens at `url`."""

    def speak(self, connection: Connection) -> HttpProtocol:
        """The protocol of a new connection."""
        return HttpProtocol(
            connection,
            self.table,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    def close_port(self) -> None:
        """Take no more connections; those that are open stay. A second call does nothing."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give answers under way their time, then close."""
        self.close_port()
        await super().shutdown(sockets)
        if self._watching is not None:
            self._watching.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, leave at the second. Unlike uvicorn's own, the process has an exit status."""
        now = time.monotonic()
        if not self.should_exit:
            self._told_at = now
        elif sig != signal.SIGTERM or now - self._told_at >= ECHO_S:
            self.end_at_once()
        self.should_exit = True

    def end_at_once(self) -> None:
        """Leave, whatever is under way."""
        self.should_exit = self.force_exit = True
        # Every request that ends here would be a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
