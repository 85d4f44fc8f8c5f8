"""Requests to another server of the cluster. The connection of an offer becomes the session's: engine to engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import httpcore
import msgspec

from app.cluster.fleet import Replica
from app.cluster.key import SIGNATURE, ClusterKey, is_answer, sign_request
from app.cluster.moves.wire import OFFER, Answer, Offer, Question, Step, encode
from app.domain.errors import EngineRestarting, PeerAway, PeerStranger
from app.engine_process.executor import EngineExecutor

CONNECT_S = 5.0
ANSWER_S = 30.0
"""The other server may have to wait for its disk."""
IDLE_S, MOST_IDLE = 2.0, 4
"""How long connections are kept that nobody uses, and how many. The other server keeps them longer, so it closes none
as a step of a move comes: whether that was taken would have to be asked.
"""
UPGRADE = {"connection": "upgrade", "upgrade": "djinn-kv"}
MAX_ANSWER_BYTES = 1 << 16
HEAD_END = b"\r\n\r\n"
AWAY = (OSError, TimeoutError, httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)


class PeerCalls:
    """Speaks with the other servers. Used on the event loop."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None,
            max_keepalive_connections=MOST_IDLE,
            keepalive_expiry=IDLE_S,
            network_backend=_Sockets(),
        )

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
        its engine, and what it says. Raises what it refuses with, `PeerAway`, `PeerStranger`.
        """
        status, said, connection = await self._exchange(peer, path, UPGRADE, body)
        if connection is None:
            raise msgspec.msgpack.decode(said, type=Answer).error or PeerAway(f"{peer.name} answers with {status}")
        return connection, said.decode()

    async def close(self) -> None:
        """Close what is kept for the next requests."""
        await self._pool.aclose()

    async def _exchange(
        self, peer: Replica, path: str, more: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes, socket.socket | None]:
        """The status and the content of the answer; that of 101 has it in a header, and the connection with it: what
        comes behind it is left to the engine. Raises `PeerAway`, `PeerStranger`.
        """
        signed = sign_request(self._key, peer.name, path, body)
        host, port = peer.address
        headers = [("host", f"{host}:{port}"), ("content-length", str(len(body))), *signed.items(), *more.items()]
        connection = None
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                self._pool.stream(
                    "POST",
                    httpcore.URL(scheme=b"http", host=host.encode(), port=port, target=path.encode()),
                    headers=headers,
                    content=body,
                    extensions={"timeout": {"connect": CONNECT_S}},
                ) as answer,
            ):
                found, said = {name.lower(): value for name, value in answer.headers}, b""
                if answer.status == HTTPStatus.SWITCHING_PROTOCOLS:
                    said = found.get(b"djinn-seq", b"")
                    connection = answer.extensions["network_stream"].get_extra_info("handed over")
                else:
                    async for part in answer.aiter_stream():
                        said += part
                        if len(said) > MAX_ANSWER_BYTES:
                            raise OSError("its answer is too long")
        except AWAY as error:
            raise PeerAway(f"{peer.name} at {peer.url} does not answer: {str(error) or 'it takes too long'}") from error
        try:
            self._check(peer, signed, answer.status, said, found.get(SIGNATURE.encode(), b"").decode("latin-1"))
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        return answer.status, said, connection

    def _check(self, peer: Replica, request: dict[str, str], status: int, body: bytes, signature: str) -> None:
        # A server that has the key may be full, or have a bug.
        if not signature and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise PeerAway(f"{peer.name} at {peer.url} answers with status {status}")
        if not is_answer(self._key, request, status, body, signature):
            raise PeerStranger(
                f"{peer.name} at {peer.url} lacks the key of this cluster, or has another name: its answer with status "
                f"{status} is not signed"
            )


class _Sockets(httpcore.AsyncNetworkBackend):
    """Makes connections that can be handed over."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (as the client calls it)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises `OSError`, `TimeoutError`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(connection, address)
            except BaseException:
                connection.close()
                raise
        return _Socket(connection)


class _Socket(httpcore.AsyncNetworkStream):
    """Reads the head of an answer and not a byte more: behind a 101, the other engine may already be sending KV."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection
        self._unsent = b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Send it before the answer is read."""
        self._unsent += buffer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Raises `OSError`."""
        loop, connection, unsent = asyncio.get_running_loop(), self._connection, self._unsent
        assert connection is not None
        if not unsent:
            return await loop.sock_recv(connection, max_bytes)
        self._unsent = b""
        await loop.sock_sendall(connection, unsent)
        head = b""
        while HEAD_END not in head:
            first = await loop.sock_recv(connection, 1)
            if not first or len(head) > MAX_ANSWER_BYTES:
                raise OSError("its answer has no end" if first else "it has closed the connection")
            head += first
            with contextlib.suppress(BlockingIOError):  # nothing more has come yet
                waiting = connection.recv(max_bytes, socket.MSG_PEEK)
                end = (head + waiting).find(HEAD_END)
                head += connection.recv(len(waiting) if end < 0 else end + len(HEAD_END) - len(head))
        return head

    async def aclose(self) -> None:
        """Close it, unless it has been handed over."""
        if self._connection is not None:
            self._connection.close()

    def get_extra_info(self, info: str) -> Any:
        """What the pool asks, and the connection itself, which is the caller's from then on."""
        if info == "handed over":
            found, self._connection = self._connection, None
            return found
        if info != "is_readable" or self._connection is None:
            return None
        try:  # whether the other end has closed it, or said something that nobody has asked for
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


def give(executor: EngineExecutor, connection: socket.socket) -> int:
    """Give the engine the connection; returns its number. Raises `EngineError`, `EngineRestarting`, and closes it."""
    try:
        executor.check()
        return executor.engine.give(connection)
    except OSError as error:  # it is about to be known that the engine has died
        connection.close()
        raise EngineRestarting(f"a connection could not be handed to it: {error}") from error
    except BaseException:
        connection.close()
        raise
