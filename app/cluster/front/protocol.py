"""Connections of clients, as servers have them, through which bytes can pass as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11

from app.cluster.front.heads import CLIENT
from app.web.connections import Connection, ConnectionTable
from app.web.protocol import HttpProtocol


class FrontProtocol(HttpProtocol):
    """One connection of a client."""

    def __init__(
        self,
        connection: Connection,
        table: ConnectionTable,
        on_upgrade: Callable[[FrontProtocol, dict[str, Any]], None],
        **uvicorn: Any,
    ) -> None:
        """`on_upgrade` takes over a connection that asks for a WebSocket, with the scope of its request."""
        super().__init__(connection, table, **uvicorn)
        self.app_state = {**self.app_state, CLIENT: self}
        self.on_writable: Callable[[], None] | None = None
        """Called whenever the client has read all that was sent, while an answer passes."""
        self._on_upgrade = on_upgrade

    @property
    def takes_chunks(self) -> bool:
        """Whether an answer in chunks may pass as it is: old clients know none, and HEAD has no body."""
        return self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD"

    def pass_on(self, data: bytes) -> bool:
        """Send a part of a chunked answer whose head is sent. False if the client must read first: `on_writable` tells
        when it has.
        """
        if not self.transport.is_closing():
            self.transport.write(self.conn.take_held() + data)
        return not self.flow.write_paused

    def resume_writing(self) -> None:
        """Go on: the client has read everything."""
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        super().connection_lost(exc)
        if self.on_writable is not None:
            self.on_writable()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over. What comes behind the request waits."""
        if not isinstance(self.conn.next_event(), h11.EndOfMessage):
            self.conn.complaint = "a handshake has no body"
            self.send_400_response(self.conn.complaint)
            return
        self.connections.discard(self)
        self._on_upgrade(self, {**self.scope, "type": "websocket"})

    @property
    def unread(self) -> bytes:
        """What came behind the head of the last request, as it came."""
        return self.conn.trailing_data[0]

    def hand_to(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Have `protocol` take what comes from now on. Returns where it writes."""
        self.transport.set_protocol(protocol)
        self._follow()
        return self.transport
