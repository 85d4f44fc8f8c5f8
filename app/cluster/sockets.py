"""WebSockets one hop on: messages pass both ways, each whole, until either side ends the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import CloseCode

from app.cluster.fleet import Replica
from app.cluster.hop import CONNECT_S, HOP_HEADER, Headers, Hops, end_to_end, forwarded, moved_to, target_bytes
from app.cluster.owners import Owner, Owners, path_of
from app.cluster.targets import RESPONSES, previous_response
from app.domain.errors import DjinnError, ReplicaAway, ReplicaLost, ReplicaMoving
from app.web.middleware import SESSION_HEADER, TOKEN_HEADER

PING_S = 5.0
"""Between two pings, and how long the answer to one may take."""
ANSWER_S = 10.0
"""How long a replica may take for its handshake."""
HANDSHAKE = (b"host", b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions")
"""Headers of the client's handshake. The next one has its own."""
NAMES = (SESSION_HEADER.lower().encode(), TOKEN_HEADER.encode())


class Sockets:
    """Used on the event loop only."""

    def __init__(self, app: ASGIApp, named: Callable[[Scope], Awaitable[Owner]], owners: Owners, hops: Hops) -> None:
        """`named` finds whom a connection is for by its headers. `app` serves those that are for this replica."""
        self._app = app
        self._named = named
        self._owners = owners
        self._hops = hops

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until either side ends it. Raises `DjinnError` before the handshake is answered."""
        if scope["path"] != RESPONSES:
            await self._app(scope, receive, send)
            return
        if not any(name in NAMES for name, _ in scope["headers"]):
            await self._serve_by_first_message(scope, receive, send)
            return
        owner = await self._named(scope)
        replica, began = owner.replica, await receive()
        if replica.name == self._hops.fleet.here:
            moved = await self._serve_here(scope, _behind([began], receive), send)
        else:
            try:
                connection = await self._connect(replica, scope)
            except InvalidStatus as refused:
                moved = moved_to(end_to_end(_raw(refused)))
                if moved is None:
                    await _deny(refused, send)
                    return
            else:
                await send({"type": "websocket.accept", "subprotocol": connection.subprotocol})
                await self._join(replica, connection, receive, send)
                return
        if moved is not None:
            replica, connection = await self._followed(owner, moved, scope)
            await send({"type": "websocket.accept", "subprotocol": connection.subprotocol})
            await self._join(replica, connection, receive, send)

    async def _serve_here(self, scope: Scope, receive: Receive, send: Send) -> str | None:
        """Serve it at this replica. If the session has moved, nothing is sent: returns where it is."""
        moved: str | None = None

        async def send_own(message: Message) -> None:
            nonlocal moved
            if message["type"] == "websocket.http.response.start":
                moved = moved_to(message["headers"])
            if moved is None:
                await send(message)

        await self._app(scope, receive, send_own)
        return moved

    async def _followed(self, owner: Owner, moved: str, scope: Scope) -> tuple[Replica, ClientConnection]:
        """Where the session is now, and a connection there."""
        home = self._hops.fleet.find(moved)
        if home is None or owner.key is None:
            raise ReplicaMoving("the session has moved: connect again")
        await self._owners.moved(owner.key, home.name)
        try:
            return home, await self._connect(self._hops.fleet.reachable(home.name), scope)
        except InvalidStatus as refused:
            raise ReplicaMoving("the session moves on: connect again") from refused

    async def _serve_by_first_message(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection that says in its first message whom it is for: a client that comes back names its last
        response there, and that has an owner.
        """
        before: list[Message] = [await receive()]
        await send({"type": "websocket.accept"})
        before.append(first := await receive())
        try:
            replica = await self._owner_of(first, scope)
            if replica.name != self._hops.fleet.here:
                connection = await self._connect(replica, scope)
                await connection.send(_content(first))
                await self._join(replica, connection, receive, send)
                return
        except InvalidStatus as refused:
            message = f"replica {replica.name} refused the connection with status {refused.response.status_code}"
            await _close(send, CloseCode.TRY_AGAIN_LATER, message)
            return
        except DjinnError as error:
            await _close(send, CloseCode.TRY_AGAIN_LATER, error.message)
            return

        async def send_accepted(message: Message) -> None:
            if message["type"] != "websocket.accept":
                await send(message)

        await self._app(scope, _behind(before, receive), send_accepted)

    async def _owner_of(self, first: Message, scope: Scope) -> Replica:
        """The replica that a connection with this first message is for. Raises `DjinnError`."""
        content = _content(first) if first["type"] == "websocket.receive" else b""
        previous = previous_response(content if isinstance(content, bytes) else content.encode())
        if previous is None:
            return (await self._named(scope)).replica
        if self._owners.has_response(previous):
            return self._hops.fleet.own
        # A first message can be sent to one replica alone: its former home says now whether it has moved on.
        owner = await self._owners.of_response(previous, scope)
        answer, _ = await self._hops.get(owner.replica, scope, path_of(previous), ANSWER_S)
        home = self._hops.fleet.find(answer.moved_to)
        if home is None or owner.key is None:
            return owner.replica
        await self._owners.moved(owner.key, home.name)
        return self._hops.fleet.reachable(home.name)

    async def _connect(self, replica: Replica, scope: Scope) -> ClientConnection:
        """Raises `ReplicaAway`, `ReplicaLost`, `InvalidStatus` with the answer of a replica that refuses."""
        host, port = replica.address
        given = dict(scope["headers"]).get(b"host", f"{host}:{port}".encode())
        headers = [each for each in forwarded(scope) if each[0] not in HANDSHAKE]
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        named += [("host", given.decode("latin-1")), (HOP_HEADER.decode(), self._hops.proof(replica.name).decode())]
        named = [(name, value) for name, value in named if name != "sec-websocket-protocol"]
        uri = f"ws://{given.decode('latin-1')}{target_bytes(scope).decode('latin-1')}"
        connecting = connect(
            uri,
            host=host,
            port=port,
            additional_headers=[each for each in named if each[0] != "host"],
            subprotocols=scope.get("subprotocols") or None,
            compression=None,
            user_agent_header=None,
            open_timeout=CONNECT_S + ANSWER_S,
            ping_interval=PING_S,
            ping_timeout=PING_S,
            close_timeout=CONNECT_S,
            max_size=None,
            proxy=None,
        )
        try:
            return await connecting
        except InvalidStatus:
            raise
        except (OSError, TimeoutError) as error:
            raise ReplicaAway(f"replica {replica.name} at {replica.url} cannot be reached: try again") from error
        except InvalidHandshake as error:
            raise ReplicaLost(f"replica {replica.name} has not answered the handshake: {error}") from error

    async def _join(self, replica: Replica, connection: ClientConnection, receive: Receive, send: Send) -> None:
        """Pass messages both ways until one side ends. If the replica is lost, the client is told to come again."""
        ways = [
            asyncio.create_task(_pass_up(receive, connection)),
            asyncio.create_task(self._pass_down(replica, connection, send)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ways:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            connection.transport.abort()

    async def _pass_down(self, replica: Replica, connection: ClientConnection, send: Send) -> None:
        try:
            async with self._hops.cut_if_lost(replica):
                while True:
                    message = await connection.recv()
                    await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
        except ConnectionClosed as closed:
            said = closed.rcvd
        except ReplicaLost:
            said = None
        if said is None:
            await _close(send, CloseCode.TRY_AGAIN_LATER, f"replica {replica.name} went away")
        else:
            await _close(send, said.code, said.reason)


def _behind(before: list[Message], receive: Receive) -> Receive:
    """Receives messages that have been received already, and then the next ones."""

    async def receive_again() -> Message:
        return before.pop(0) if before else await receive()

    return receive_again


async def _pass_up(receive: Receive, connection: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):  # which the other way tells the client
        while (message := await receive())["type"] == "websocket.receive":
            await connection.send(_content(message))
        await connection.close(_closable(message.get("code")))


def _content(message: Message) -> str | bytes:
    text: str | None = message.get("text")
    return text if text is not None else message.get("bytes") or b""


def _closable(code: Any) -> int:
    """The code as it may be sent (RFC 6455, 7.4): some are only said of an end without one."""
    return code if isinstance(code, int) and code not in (1005, 1006, 1015) and 1000 <= code < 5000 else 1000


async def _close(send: Send, code: int, reason: str) -> None:
    cut = reason.encode()[:120].decode(errors="ignore")  # RFC 6455, 5.5: 123 bytes
    with contextlib.suppress(RuntimeError):  # the client has gone already
        await send({"type": "websocket.close", "code": _closable(int(code)), "reason": cut})


def _raw(refused: InvalidStatus) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in refused.response.headers.raw_items()]


async def _deny(refused: InvalidStatus, send: Send) -> None:
    """Answer with what the replica has said in place of a WebSocket."""
    headers = [each for each in end_to_end(_raw(refused)) if each[0] != b"content-length"]
    await send({"type": "websocket.http.response.start", "status": refused.response.status_code, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": refused.response.body or b""})
