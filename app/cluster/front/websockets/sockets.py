"""WebSockets through the front door: a handshake with a replica, then bytes as they come, both ways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

import h11
from starlette.types import Scope, Send
from websockets.frames import CloseCode

from app.cluster.fleet import Fleet, Replica
from app.cluster.front.heads import CLIENT, end_to_end, moved_to
from app.cluster.front.protocol import FrontProtocol
from app.cluster.front.routing.named import previous_response
from app.cluster.front.routing.owners import Owner, Owners
from app.cluster.front.routing.targets import RESPONSES
from app.cluster.front.websockets.ends import ClientEnd, ReplicaEnd, shake
from app.cluster.front.websockets.frames import BadFrame, FirstMessage, close_frame
from app.domain.errors import DjinnError, ReplicaLost, ReplicaMoving
from app.machine.budget import Share

LARGEST_DENIAL = 64 << 10
"""Bytes of an answer that a replica gives in place of a WebSocket."""

Head = h11.Response | h11.InformationalResponse


class Sockets:
    """Serves WebSockets. Used on the event loop only."""

    def __init__(
        self, named: Callable[[Scope], Awaitable[Owner]], owners: Owners, fleet: Fleet, max_message_bytes: int
    ) -> None:
        """`named` finds whom a connection is for by its headers."""
        self._named = named
        self._owners = owners
        self._fleet = fleet
        self._max_message_bytes = max_message_bytes

    async def serve(self, scope: Scope, send: Send) -> None:
        """Serve one connection until either side ends it. Raises `DjinnError` before the handshake is answered."""
        owner = await self._named(scope)
        replica = owner.replica
        head, end = await shake(replica, scope)
        try:
            if head.status_code == HTTPStatus.MISDIRECTED_REQUEST:
                end.close()
                replica = await self._follow(owner, head)
                head, end = await shake(replica, scope)
            if head.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                await self._join(scope, replica, head, end)
            else:
                await _deny(head, end, send)
        finally:
            end.close()

    async def _follow(self, owner: Owner, head: Head) -> Replica:
        moved = self._fleet.find(moved_to(head.headers))
        if moved is None or owner.key is None:
            raise ReplicaMoving("the session has moved: connect again")
        await self._owners.moved(owner.key, moved.name)
        return self._fleet.reachable(moved.name)

    async def _join(self, scope: Scope, replica: Replica, head: Head, end: ReplicaEnd) -> None:
        client: FrontProtocol = scope["state"][CLIENT]
        client_end = ClientEnd(client)
        try:
            client_end.write(_switching(head))
            if scope["path"] == RESPONSES:
                end = await self._choose(scope, replica, end, client_end)
            client_end.join(end)
            await client_end.is_over.wait()
        except BadFrame as error:
            client_end.write(close_frame(error.code, str(error)))
        except DjinnError as error:
            client_end.write(close_frame(CloseCode.TRY_AGAIN_LATER, error.message))
        finally:
            end.close()
            client_end.close()

    async def _choose(self, scope: Scope, replica: Replica, end: ReplicaEnd, client: ClientEnd) -> ReplicaEnd:
        """Read the first message: a client that comes back names its last response in it, and that has an owner. What
        was read is sent to whom it is for.

        Raises `BadFrame`, `BodiesFull`, and the errors of a connection to the owner.
        """
        share: Share = scope["state"]["share"]
        first = FirstMessage(self._max_message_bytes)
        end.pass_to(client)
        while first.content is None:
            data = await client.read()
            if not data:
                return end
            share.require(first.kept_bytes + len(data))
            if passing := first.take(data):
                end.write(passing)
        previous = previous_response(first.content)
        owner = replica if previous is None else await self._owners.followed(previous, scope)
        if owner is not replica:
            end.leave()
            head, end = await shake(owner, scope)
            if head.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
                end.close()
                raise ReplicaLost(f"replica {owner.name} refused the connection with status {head.status_code}")
        end.write(first.kept)
        share.shrink()
        return end


def _switching(head: Head) -> bytes:
    lines = [b"HTTP/1.1 101 Switching Protocols", b"connection: Upgrade", b"upgrade: websocket"]
    lines += [name + b": " + value for name, value in end_to_end(head.headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _deny(head: Head, end: ReplicaEnd, send: Send) -> None:
    """Answer with what the replica has said in place of a WebSocket."""
    content = b""
    while len(content) < LARGEST_DENIAL and (data := await end.read()):
        content += data
    headers = [(name, value) for name, value in end_to_end(head.headers) if name != b"content-length"]
    await send({"type": "websocket.http.response.start", "status": head.status_code, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": content})
