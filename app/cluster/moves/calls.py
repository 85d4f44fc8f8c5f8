"""Requests to another server of the cluster. The connection of an offer becomes the session's: engine to engine."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus

import msgspec

from app.cluster.fleet import Replica
from app.cluster.key import SIGNATURE, ClusterKey, is_answer, sign_request
from app.cluster.moves.wire import OFFER, Answer, Offer, Question, Step, encode
from app.cluster.wires import Headers, Wires
from app.domain.errors import EngineRestarting, PeerAway, PeerStranger
from app.engine_process.executor import EngineExecutor

ANSWER_S = 30.0
"""The other server may have to wait for its disk."""
UPGRADE = {"connection": "upgrade", "upgrade": "djinn-kv"}
MAX_ANSWER_BYTES = 1 << 16


class PeerCalls:
    """Speaks with the other servers. Used on the event loop."""

    def __init__(self, key: ClusterKey, wires: Wires) -> None:
        self._key = key
        self._wires = wires

    async def ask(self, peer: Replica, path: str, message: Step | Question) -> Answer:
        """Take the next step of a move. Raises `PeerAway` if nothing certain comes back, `PeerStranger`."""
        status, said, _ = await self._exchange(peer, path, {}, encode(message))
        if status != HTTPStatus.OK:
            raise PeerAway(f"{peer.name} answers with status {status}")
        return msgspec.msgpack.decode(said, type=Answer)

    async def offer(self, peer: Replica, offer: Offer) -> tuple[socket.socket, int, str, str]:
        """Offer a session. Returns the connection, on which the other engine waits for it, and the other server's count
        of moves, its word for this one and the UUID of its journal. Raises what it refuses with, `PeerAway`,
        `PeerStranger`.
        """
        connection, said = await self.connect(peer, OFFER, encode(offer))
        count, word, journal = said.split(" ")
        return connection, int(count), word, journal

    async def connect(self, peer: Replica, path: str, body: bytes) -> tuple[socket.socket, str]:
        """Offer something that is to go from engine to engine. Returns the connection, which the other server hands to
        its engine, and what it says. Nothing comes on it before something is sent. Raises what the other server refuses
        with, `PeerAway`, `PeerStranger`.
        """
        status, said, connection = await self._exchange(peer, path, UPGRADE, body)
        if connection is None:
            raise msgspec.msgpack.decode(said, type=Answer).error or PeerAway(f"{peer.name} answers with {status}")
        return connection, said.decode()

    async def _exchange(
        self, peer: Replica, path: str, more: dict[str, str], body: bytes
    ) -> tuple[int, bytes, socket.socket | None]:
        """The answer's status and content, and for a 101 the connection: its content is in a header. Raises `PeerAway`,
        `PeerStranger`.
        """
        signed, (host, port) = sign_request(self._key, peer.name, path, body), peer.address
        fields = {"host": f"{host}:{port}", "content-length": str(len(body)), **signed, **more}
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        said, is_over, connection = b"", False, None
        try:
            async with asyncio.timeout(ANSWER_S):
                wire = await self._wires.take(peer.address)
                try:
                    status, found = await wire.ask(b"POST", path.encode(), headers, body)
                    if status == HTTPStatus.SWITCHING_PROTOCOLS:
                        said, is_over, connection = dict(found).get(b"djinn-seq", b""), True, wire.hand_over()
                    while not is_over:
                        part, is_over = await wire.part()
                        said += part
                        if len(said) > MAX_ANSWER_BYTES:
                            raise OSError("its answer is too long")
                finally:
                    self._wires.give_back(peer.address, wire)
        except OSError as error:  # a timeout too
            raise PeerAway(f"{peer.name} at {peer.url} does not answer: {str(error) or 'it takes too long'}") from error
        try:
            self._check(peer, signed, status, found, said)
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        return status, said, connection

    def _check(self, peer: Replica, request: dict[str, str], status: int, headers: Headers, body: bytes) -> None:
        signature = dict(headers).get(SIGNATURE.encode(), b"").decode("latin-1")
        # A server that has the key may be full, or have a bug.
        if not signature and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise PeerAway(f"{peer.name} at {peer.url} answers with status {status}")
        if not is_answer(self._key, request, status, body, signature):
            raise PeerStranger(
                f"{peer.name} at {peer.url} lacks the key of this cluster, or has another name: its answer with status "
                f"{status} is not signed"
            )


def give(executor: EngineExecutor, connection: socket.socket) -> int:
    """Give the engine the connection. Returns its number. Closes it on `EngineError` and `EngineRestarting`."""
    try:
        executor.check()
        return executor.engine.give(connection)
    except OSError as error:  # it is about to be known that the engine has died
        connection.close()
        raise EngineRestarting(f"a connection could not be handed to it: {error}") from error
    except BaseException:
        connection.close()
        raise
