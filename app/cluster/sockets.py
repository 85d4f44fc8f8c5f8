"""WebSockets to another replica: whole messages pass both ways until either side ends the connection."""

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
from app.cluster.hop import HOP_HEADER, Hops, end_to_end, forwarded, moved_to, target_bytes
from app.cluster.owners import RESPONSES, Owner, Owners, path_of, previous_response
from app.cluster.wires import CONNECT_S
from app.domain.errors import DjinnError, ReplicaAway, ReplicaLost, ReplicaMoving
from app.domain.text import header_text
from app.web.middleware import SESSION_HEADER, TOKEN_HEADER

PING_S = 5.0
"""Between two pings, and how long the answer to one may take."""
ANSWER_S = 10.0
"""How long a replica may take for its handshake."""
NOT_PASSED = frozenset(
    b"host sec-websocket-key sec-websocket-version sec-websocket-extensions sec-websocket-protocol".split()
)
"""Headers of the client's handshake that the next handshake makes itself."""
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
        """Serve one connection until either side ends it. Raises `DjinnError` before the handshake is answered.

        If the headers name nothing, the handshake is accepted at once: the first message may name a response, which has
        an owner.
        """
        if scope["path"] != RESPONSES:
            await self._app(scope, receive, send)
            return
        before, is_open = [await receive()], not any(name in NAMES for name, _ in scope["headers"])
        try:
            if is_open:
                await send({"type": "websocket.accept"})
                before.append(await receive())
            owner = await self._owner(scope, before[1] if is_open else None)
            await self._serve_at(owner, scope, before, receive, send)
        except DjinnError as error:
            if not is_open:
                raise
            await _close(send, CloseCode.TRY_AGAIN_LATER, error.message)

    async def _owner(self, scope: Scope, first: Message | None) -> Owner:
        """Who has what the headers name, or the first message. Raises `DjinnError`."""
        content = b"" if first is None or first["type"] != "websocket.receive" else _content(first)
        previous = previous_response(content if isinstance(content, bytes) else content.encode())
        if previous is None:
            return await self._named(scope)
        owner = await self._owners.of_response(previous, scope)
        if owner.seek is None:  # it is here
            return owner
        # A first message goes to one replica alone, so the owner says before whether the session has moved on.
        told = await self._hops.get([owner.replica], scope, path_of(previous), ANSWER_S)
        moved = next((moved_to(answer.headers) for answer, _ in told.values()), None)
        return owner if moved is None else await self._moved(owner, moved)

    async def _moved(self, owner: Owner, name: str) -> Owner:
        """The owner after a move to the replica `name`. If that replica has left, all are asked who has the session.
        Raises `ReplicaAway`, `ReplicaMoving`.
        """
        home = self._hops.fleet.find(name)
        if home is None and owner.seek is not None:
            home = await owner.seek()
        if home is None or home is owner.replica or owner.key is None:
            raise ReplicaMoving("the session moves on: connect again")
        await self._owners.moved(owner.key, home.name)
        return Owner(self._hops.fleet.reachable(home.name), owner.key)

    async def _serve_at(
        self, owner: Owner, scope: Scope, before: list[Message], receive: Receive, send: Send, *, follows: bool = True
    ) -> None:
        """Serve it at that owner; if it `follows`, also where the session has moved. `before` are messages that were
        received already: the handshake, and the first message if the handshake was answered.
        """
        is_open = len(before) > 1
        moved: str | None = None

        async def receive_again() -> Message:
            return before.pop(0) if before else await receive()

        async def send_once(message: Message) -> None:
            nonlocal moved
            if message["type"] == "websocket.http.response.start":
                moved = moved_to(message["headers"])
            if moved is None and not (is_open and message["type"] == "websocket.accept"):
                await send(message)

        if owner.replica is self._hops.fleet.own:
            await self._app(scope, receive_again, send_once)
        else:
            try:
                connection = await self._connect(owner.replica, scope)
            except InvalidStatus as refused:
                if is_open:
                    raise ReplicaMoving("the session is refused there: connect again") from None
                answer, latin = refused.response, "latin-1"
                items = [(name.encode(latin), value.encode(latin)) for name, value in answer.headers.raw_items()]
                headers = [each for each in end_to_end(items) if each[0] != b"content-length"]
                start = {"type": "websocket.http.response.start", "status": answer.status_code, "headers": headers}
                await send_once(start)
                await send_once({"type": "websocket.http.response.body", "body": answer.body or b""})
            else:
                await send_once({"type": "websocket.accept", "subprotocol": connection.subprotocol})
                del before[:1]  # the handshake, unless this replica has read it
                await self._join(owner.replica, connection, receive_again, send)
        if moved is not None:
            if not follows:
                raise ReplicaMoving("the session moves on: connect again")
            await self._serve_at(await self._moved(owner, moved), scope, before, receive, send, follows=False)

    async def _connect(self, replica: Replica, scope: Scope) -> ClientConnection:
        """Raises `ReplicaAway`, `ReplicaLost`, `InvalidStatus` with the answer of a replica that refuses."""
        host, port = replica.address
        given = dict(scope["headers"]).get(b"host", f"{host}:{port}".encode()).decode("latin-1")
        headers = [each for each in forwarded(scope) if each[0] not in NOT_PASSED]
        headers.append((HOP_HEADER, self._hops.proof(replica.name)))
        try:
            return await connect(
                f"ws://{given}{target_bytes(scope).decode('latin-1')}",
                host=host,
                port=port,
                additional_headers=[
                    (name.decode("latin-1"), header_text(value.decode("latin-1"))) for name, value in headers
                ],
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
        except InvalidStatus:
            raise
        except OSError as error:  # a timeout too
            raise ReplicaAway(f"replica {replica.name} cannot be reached: try again") from error
        except InvalidHandshake as error:
            raise ReplicaLost(f"replica {replica.name} has not answered the handshake: {error}") from error

    async def _join(self, replica: Replica, connection: ClientConnection, receive: Receive, send: Send) -> None:
        """Pass messages both ways until one side ends. If the replica is lost, the client is told to come again."""

        async def pass_up() -> None:
            with contextlib.suppress(ConnectionClosed):  # which the other way tells the client
                while (message := await receive())["type"] == "websocket.receive":
                    await connection.send(_content(message))
                await connection.close(_closable(message.get("code")))

        async def pass_down() -> None:
            try:
                while True:
                    message = await connection.recv()
                    await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
            except ConnectionClosed as closed:
                said = closed.rcvd
            if said is None:
                await _close(send, CloseCode.TRY_AGAIN_LATER, "the replica went away")
            else:
                await _close(send, said.code, said.reason)

        ways = [asyncio.create_task(pass_up()), asyncio.create_task(pass_down())]
        try:
            with self._hops.cutting(replica, connection.transport.abort):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ways:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            connection.transport.abort()


def _content(message: Message) -> str | bytes:
    text: str | None = message.get("text")
    return text if text is not None else message.get("bytes") or b""


def _closable(code: Any) -> int:
    """A code that may be sent (RFC 6455, 7.4). Some codes only describe a connection that ended without one."""
    return code if isinstance(code, int) and code not in (1005, 1006, 1015) and 1000 <= code < 5000 else 1000


async def _close(send: Send, code: int, reason: str) -> None:
    cut = reason.encode()[:120].decode(errors="ignore")  # RFC 6455, 5.5: 123 bytes
    with contextlib.suppress(RuntimeError):  # the client has gone already
        await send({"type": "websocket.close", "code": _closable(int(code)), "reason": cut})
