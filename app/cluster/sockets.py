"""WebSockets to another replica: whole messages pass both ways until either side ends the connection."""

import asyncio
import contextlib

from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import Close

from app.cluster.fleet import Replica
from app.cluster.hop import HOP_HEADER, SHUNNED_S, Hops, end_to_end, forwarded, target_bytes
from app.cluster.wires import CONNECT_S, limit_delivery
from app.domain.errors import ReplicaAway, ReplicaLost
from app.domain.text import header_text
from app.web.errors import TRY_AGAIN_LATER, closable, close_socket

PING_S = ANSWER_S = 5.0
"""Between two pings, and how long a replica may take for the answer to one, and for its handshake."""
NOT_PASSED = frozenset(
    b"host sec-websocket-key sec-websocket-version sec-websocket-extensions sec-websocket-protocol".split()
)
"""Headers of the client's handshake that the next handshake makes itself."""


async def pass_socket(hops: Hops, replica: Replica, scope: Scope, receive: Receive, send: Send) -> None:
    """Have the replica serve a WebSocket, or refuse it. Raises `ReplicaAway`, `ReplicaLost` before it has answered."""
    await receive()  # the handshake
    latin, target = "latin-1", target_bytes(scope).replace(b"#", b"%23")
    headers = [each for each in forwarded(scope) if each[0] not in NOT_PASSED]
    headers.append((HOP_HEADER, hops.proof(replica.name)))
    try:
        connection = await connect(
            replica.seen.url.replace("http", "ws", 1) + target.decode(latin),
            additional_headers=[(name.decode(latin), header_text(value.decode(latin))) for name, value in headers],
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
    except InvalidStatus as refused:
        answer = refused.response
        items = [(name.encode(latin), value.encode(latin)) for name, value in answer.headers.raw_items()]
        headers = [each for each in end_to_end(items) if each[0] != b"content-length"]
        await send({"type": "websocket.http.response.start", "status": answer.status_code, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": answer.body or b""})
        return
    except OSError as error:  # a timeout too
        replica.shun(SHUNNED_S)
        raise ReplicaAway(f"replica {replica.name} cannot be reached: try again") from error
    except InvalidHandshake as error:
        raise ReplicaLost(f"replica {replica.name} has not answered the handshake of a WebSocket as one") from error
    limit_delivery(connection.transport)
    ways = list[asyncio.Task[None]]()
    try:
        with hops.cutting(replica, connection.transport.abort):
            await send({"type": "websocket.accept", "subprotocol": connection.subprotocol})
            ways += map(asyncio.create_task, (_pass_up(connection, receive), _pass_down(connection, send)))
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in ways:
            task.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        connection.transport.abort()


async def _pass_up(connection: ClientConnection, receive: Receive) -> None:
    with contextlib.suppress(ConnectionClosed):  # which the other way tells the client
        while (message := await receive())["type"] == "websocket.receive":
            text: str | None = message.get("text")
            await connection.send(text if text is not None else message.get("bytes") or b"")
        await connection.close(closable(message.get("code")), message.get("reason") or "")


async def _pass_down(connection: ClientConnection, send: Send) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = await connection.recv()
            await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
    said = connection.protocol.close_rcvd or Close(TRY_AGAIN_LATER, "the replica went away")
    await close_socket(send, said.code, said.reason)
