"""The two ends of a WebSocket's pipe: what comes at one goes out at the other, and a slow reader is waited for."""

from __future__ import annotations

import asyncio

import h11
from starlette.types import Scope
from websockets.frames import CloseCode

from app.cluster.fleet import Replica
from app.cluster.front.heads import forwarded, target_bytes
from app.cluster.front.protocol import FrontProtocol
from app.cluster.front.upstream.connection import READ_BYTES
from app.cluster.front.upstream.pool import connect
from app.cluster.front.websockets.frames import close_frame
from app.domain.errors import ReplicaLost

HANDSHAKE_S = 30.0
"""How long a replica may take to answer a handshake."""


class End(asyncio.Protocol):
    """One end. Until it is joined to another, what comes waits for `read`, and no more is taken."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        """Set when either end has closed."""
        self._transport: asyncio.Transport | None = None
        self._other: End | None = None
        self._came = b""
        self._news = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's sockets have it
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self._other is not None:
            self._other.write(data)
            return
        self._came += data
        self._hold(True)
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended, and with it the other one."""
        self.is_over.set()
        self._news.set()
        if self._other is not None:
            self._other.close()

    def pause_writing(self) -> None:
        """Its reader is slow: the other end waits."""
        if self._other is not None:
            self._other._hold(True)

    def resume_writing(self) -> None:
        """Its reader has read all."""
        if self._other is not None:
            self._other._hold(False)

    def write(self, data: bytes) -> None:
        """Send it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """End it, when what was written is sent."""
        self.is_over.set()
        if self._transport is not None:
            self._transport.close()

    async def read(self) -> bytes:
        """What has come, or comes next. Empty: the connection has ended."""
        while not self._came and not self.is_over.is_set():
            self._hold(False)
            self._news.clear()
            await self._news.wait()
        came, self._came = self._came, b""
        return came

    def pass_to(self, other: End) -> None:
        """From now on, what comes here goes out there."""
        self._other = other
        came, self._came = self._came, b""
        if came:
            other.write(came)
        self._hold(False)

    def leave(self) -> None:
        """End it, and leave the other end as it is."""
        self._other = None
        self.close()

    def join(self, other: End) -> None:
        """Pass both ways from now on."""
        self.pass_to(other)
        other.pass_to(self)

    def _hold(self, is_held: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or transport.is_reading() is not is_held:
            return
        if is_held:
            transport.pause_reading()
        else:
            transport.resume_reading()


class ReplicaEnd(End):
    """The end at a replica."""


class ClientEnd(End):
    """The end at a client, on a connection that has spoken HTTP so far."""

    def __init__(self, client: FrontProtocol) -> None:
        super().__init__()
        self._came = client.unread
        self._connections = client.connections
        self._connections.add(self)  # type: ignore[arg-type]  # uvicorn asks for a shutdown alone
        self.connection_made(client.hand_to(self))
        if client.transport.is_closing():
            self.is_over.set()

    def shutdown(self) -> None:
        """The front door ends: tell the client, and close."""
        self.write(close_frame(CloseCode.SERVICE_RESTART, "the server is shutting down"))
        self.close()

    def close(self) -> None:
        """End it, when what was written is sent."""
        self._connections.discard(self)
        super().close()

    def connection_lost(self, error: Exception | None) -> None:
        """The client has gone."""
        self._connections.discard(self)
        super().connection_lost(error)


async def shake(replica: Replica, scope: Scope) -> tuple[h11.Response | h11.InformationalResponse, ReplicaEnd]:
    """Send a client's handshake to the replica. Returns the head of the answer, and what comes behind it.

    Raises `ReplicaAway` and `ReplicaLost`.
    """
    end = await connect(replica, ReplicaEnd)
    wire = h11.Connection(h11.CLIENT)
    headers = forwarded(scope, f"{replica.host}:{replica.port}")
    upgrade = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
    try:
        end.write(
            wire.send(h11.Request(method=b"GET", target=target_bytes(scope), headers=[*headers, *upgrade])) or b""
        )
        async with asyncio.timeout(HANDSHAKE_S):
            return await _answer(wire, end), end
    except (h11.ProtocolError, TimeoutError, EOFError) as error:
        end.close()
        raise ReplicaLost(f"replica {replica.name} did not answer the handshake: {error}") from error
    except BaseException:
        end.close()
        raise


async def _answer(wire: h11.Connection, end: End) -> h11.Response | h11.InformationalResponse:
    """The head of the answer; what came behind it is the end's again."""
    while True:
        event = wire.next_event()
        if isinstance(event, h11.Response | h11.InformationalResponse):
            end._came = wire.trailing_data[0] + end._came
            return event
        data = await end.read()
        if not data:
            raise EOFError("the connection ended")
        wire.receive_data(data)
