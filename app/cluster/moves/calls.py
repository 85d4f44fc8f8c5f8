"""Requests to another server of the cluster. A connection has one at a time; that of an offer becomes the session's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from http import HTTPStatus

import h11
import msgspec

from app.cluster.moves.connections import PeerConnections
from app.cluster.moves.key import ClusterKey
from app.cluster.moves.peers import Peer
from app.cluster.moves.signatures import SIGNATURE, is_answer, sign_request
from app.cluster.moves.wire import OFFER, Answer, Offer, Question, Step, encode
from app.domain.errors import PeerAway, PeerStranger

ANSWER_S = 30.0
"""The other server may have to wait for its disk."""
UPGRADE = {"connection": "upgrade", "upgrade": "djinn-kv"}
READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 16
HEAD_END = b"\r\n\r\n"


class PeerCalls:
    """Speaks with the other servers. Used on the event loop."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self._connections = PeerConnections()

    async def ask(self, peer: Peer, path: str, message: Step | Question) -> Answer:
        """Take the next step of a move. Raises `PeerAway` if nothing certain comes back, `PeerStranger`."""
        body = encode(message)
        headers = sign_request(self._key, peer.name, path, body)
        connection = await self._connections.take(peer)
        try:
            status, answer, signature, goes_on = await _exchange(peer, connection, path, headers, body)
        except BaseException:
            connection.close()
            raise
        if goes_on:
            self._connections.give(peer, connection)
        else:
            connection.close()
        self._check(peer, headers, status, answer, signature)
        if status != HTTPStatus.OK:
            raise PeerAway(f"{peer.name} answers with status {status}")
        return msgspec.msgpack.decode(answer, type=Answer)

    async def offer(self, peer: Peer, offer: Offer) -> tuple[socket.socket, int, str]:
        """Offer a session, and prepare for the next step. Returns the connection, on which the other engine waits for
        the session, and the other server's count of moves and its word for this one. Raises what it refuses with,
        `PeerAway`, `PeerStranger`.
        """
        connection, said = await self.connect(peer, OFFER, encode(offer))
        self._connections.prepare(peer)
        count, _, word = said.partition(" ")
        return connection, int(count), word

    async def connect(self, peer: Peer, path: str, body: bytes) -> tuple[socket.socket, str]:
        """Offer something that is to go from engine to engine. Returns the connection, which the other server hands to
        its engine, and what it says. Raises what it refuses with, `PeerAway`, `PeerStranger`.
        """
        headers = sign_request(self._key, peer.name, path, body)
        connection = await self._connections.take(peer)
        try:
            status, answer, signature, _ = await _exchange(peer, connection, path, headers | UPGRADE, body)
            self._check(peer, headers, status, answer, signature)
            if status != HTTPStatus.SWITCHING_PROTOCOLS:
                refused = msgspec.msgpack.decode(answer, type=Answer)
                raise refused.error or PeerAway(f"{peer.name} answers with status {status}")
            return connection, answer.decode()
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close what is kept for the next requests."""
        self._connections.close()

    def _check(self, peer: Peer, request: dict[str, str], status: int, body: bytes, signature: str) -> None:
        # A server that has the key may be full, or have a bug.
        if not signature and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise PeerAway(f"{peer.name} at {peer.url} answers with status {status}")
        if not is_answer(self._key, request, status, body, signature):
            raise PeerStranger(
                f"{peer.name} at {peer.url} lacks the key of this cluster, or has another name: its answer with status "
                f"{status} is not signed"
            )


async def _exchange(
    peer: Peer, connection: socket.socket, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, bytes, str, bool]:
    """The status, the body and the signature of the answer; that of 101 has its content in a header. What comes behind
    it is left to the engine. Last, whether the connection takes another request. Raises `PeerAway`.
    """
    loop, host = asyncio.get_running_loop(), ":".join(map(str, peer.address))
    h11_side = h11.Connection(h11.CLIENT)
    fields = {"host": host, "content-length": str(len(body)), **headers}
    request = h11.Request(method="POST", target=path, headers=list(fields.items()))
    out = [h11_side.send(request), h11_side.send(h11.Data(data=body)), h11_side.send(h11.EndOfMessage())]
    try:
        async with asyncio.timeout(ANSWER_S):
            await loop.sock_sendall(connection, b"".join(part or b"" for part in out))
            answer = await _read(loop, connection, h11_side)
            return *answer, h11_side.our_state is h11_side.their_state is h11.DONE
    except (OSError, TimeoutError, h11.RemoteProtocolError) as error:
        raise PeerAway(f"{peer.name} at {peer.url} has not answered: {str(error) or 'it takes too long'}") from error


async def _read(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, h11_side: h11.Connection
) -> tuple[int, bytes, str]:
    status, signature, body = 0, "", b""
    h11_side.receive_data(await _read_head(loop, connection))
    while True:
        event = h11_side.next_event()
        match event:
            case h11.NEED_DATA:
                h11_side.receive_data(await loop.sock_recv(connection, READ_BYTES))
            case h11.InformationalResponse(status_code=101):
                found = dict(event.headers)
                signature = found.get(SIGNATURE.encode(), b"").decode("latin-1")
                return HTTPStatus.SWITCHING_PROTOCOLS, found.get(b"djinn-seq", b""), signature
            case h11.Response():
                status = event.status_code
                signature = dict(event.headers).get(SIGNATURE.encode(), b"").decode("latin-1")
            case h11.Data():
                body += event.data
                if len(body) > MAX_ANSWER_BYTES:
                    raise OSError("its answer is too long")
            case h11.EndOfMessage():
                return status, body, signature
            case h11.ConnectionClosed():
                raise OSError("it has closed the connection")
            case _:
                continue


async def _read_head(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    """The head of the answer and not a byte more: behind a 101, the other engine may already be sending KV. Raises
    `OSError`.
    """
    head = b""
    while HEAD_END not in head:
        first = await loop.sock_recv(connection, 1)
        if not first or len(head) > MAX_ANSWER_BYTES:
            raise OSError("its answer has no end" if first else "it has closed the connection")
        head += first
        with contextlib.suppress(BlockingIOError):  # nothing more has come yet
            waiting = connection.recv(READ_BYTES, socket.MSG_PEEK)
            end = (head + waiting).find(HEAD_END)
            head += connection.recv(len(waiting) if end < 0 else end + len(HEAD_END) - len(head))
    return head
