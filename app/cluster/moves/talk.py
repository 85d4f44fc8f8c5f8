"""What the servers of a cluster say to each other about sessions that move, as signed MessagePack over HTTP.

An offer asks for the connection itself. The answer 101 hands it over: from then on the two engines use it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.cluster.fleet import Replica
from app.cluster.hop import Hops
from app.cluster.key import DIGEST, SIGNATURE, is_answer, is_request, sign_answer, sign_request
from app.domain.errors import (
    DjinnError,
    EngineRestarting,
    MalformedRequest,
    Moving,
    NameTaken,
    NotDurable,
    NotFound,
    PeerAway,
    PeerFull,
    PeerMismatch,
    PeerStranger,
    ReplicaAway,
    ReplicaLost,
    TooLarge,
    Unauthenticated,
)
from app.domain.homes import Taken
from app.domain.values import MAX_LABEL_BYTES, ModelInfo, SessionId
from app.engine_process.executor import EngineExecutor
from app.journal.records import KeyedRecord, ResponseRecord, SessionRecord
from app.sessions.tool_waits import Waits
from app.web.errors import error_response

logger = logging.getLogger(__name__)
FORMAT = 6
"""The version of `Offer`, raised whenever the meaning of anything in it, in a snapshot or in a `Question` changes."""
PREFIX = "/v1/cluster/"
OFFER, SETTLE = f"{PREFIX}offer", f"{PREFIX}settle"
ANSWER_S = 30.0
"""The other server may have to wait for its disk."""
UPGRADE = {"connection": "upgrade", "upgrade": "djinn-kv"}
MAX_ANSWER_BYTES = MAX_QUESTION_BYTES = 1 << 16
MAX_RESPONSE_BYTES = 128 << 20
"""Of a session's responses, as JSON."""
MAX_OFFER_BYTES = MAX_LABEL_BYTES + MAX_RESPONSE_BYTES + (256 << 20)
"""Enough for a label, responses, and a history of `MAX_TOKENS`."""


def model_of(info: ModelInfo) -> dict[str, int | str]:
    """What two servers must have in common before their engines, which know more, are asked."""
    sizes = ("vocab_size", "num_layers", "hidden_size", "kv_heads", "head_dim", "dtype", "kv_dtype")
    return {name: getattr(info, name) for name in sizes}


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is to move from the server `source`, without its KV, which follows on the same connection.

    `history` has token ids as the journal has them, and `before` those before the turn that is paused (None: the
    session is idle). `label` is the `SessionSnapshot`, as a file has it. `responses` are as the journal has them. The
    last turn began at `prompt_tokens`. `keyed` is what requests with an `Idempotency-Key` have done in the session. The
    last two are of the paused turn's usage.
    """

    format: int = FORMAT
    source: str
    epoch: int
    model: dict[str, int | str]
    record: SessionRecord
    history: bytes
    before: bytes | None
    uncounted: int
    returns_at: float | None
    pause_expires_at: float | None
    label: str
    responses: list[ResponseRecord]
    waits: Waits | None
    prompt_tokens: int
    keyed: list[KeyedRecord]
    cached_tokens: int = 0
    tokens_recomputed: int = 0


class Question(msgspec.Struct, frozen=True):
    """Asks whether the session was taken with the move of that number. With the `word` of the answer to its offer it is
    taken now. Without, it never will be if it was not. `journal` is the UUID of the journal that the answer is in.
    """

    session: SessionId
    epoch: int
    seq: int
    journal: str
    word: str = ""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a question or a refused offer. `code` is that of the error for which it was not taken, if known."""

    taken: Taken = Taken.NO
    code: str | None = None
    message: str = ""

    @classmethod
    def refusing(cls, error: Exception) -> Answer:
        """An answer that says why something cannot come now, or cannot come at all."""
        if not isinstance(error, PeerMismatch | NameTaken | Moving):
            can_wait = isinstance(error, NotDurable) or (isinstance(error, DjinnError) and error.status in (429, 503))
            is_foreign = isinstance(error, msgspec.MsgspecError)
            why = "the other server speaks another version" if is_foreign else "it cannot be opened here"
            error = PeerFull(str(error)) if can_wait else PeerMismatch(f"{why}: {error}")
        return cls(code=error.code, message=error.message)

    @property
    def error(self) -> DjinnError | None:
        """The error for which the session was not taken, if that is known."""
        return None if self.code is None else REFUSALS.get(self.code, PeerMismatch)(self.message)


REFUSALS: dict[str, type[DjinnError]] = {each.code: each for each in (PeerFull, PeerMismatch, NameTaken, Moving)}
"""The errors with which another server refuses a session."""
encode = msgspec.msgpack.encode


async def ask(hops: Hops, peer: Replica, question: Question) -> Answer:
    """Whether the other server has the session. Raises as `connect`; `PeerAway`: nothing certain comes back."""
    status, said, _ = await _exchange(hops, peer, SETTLE, encode(question))
    if status != HTTPStatus.OK:
        raise PeerAway(f"{peer.name} answers with status {status}")
    return _read(peer, said)


async def connect(hops: Hops, peer: Replica, path: str, offer: msgspec.Struct) -> tuple[socket.socket, str]:
    """Offer something that is to go from engine to engine. Returns the connection, which the other server hands to its
    engine, and what that server says. Nothing arrives on it before something is sent. Raises the other server's
    refusal, `PeerAway`, `PeerStranger`, `PeerMismatch`.
    """
    status, said, connection = await _exchange(hops, peer, path, encode(offer))
    if connection is None:
        raise _read(peer, said).error or PeerAway(f"{peer.name} answers with {status}")
    return connection, said.decode("latin-1")


def _read(peer: Replica, said: bytes) -> Answer:
    """Raises `PeerMismatch` for what is no answer here."""
    try:
        return msgspec.msgpack.decode(said, type=Answer)
    except msgspec.MsgspecError as error:
        raise PeerMismatch(f"{peer.name} speaks another version: {error}") from error


async def _exchange(hops: Hops, peer: Replica, path: str, body: bytes) -> tuple[int, bytes, socket.socket | None]:
    """The answer's status and content, and for a 101 the connection: its content is in a header."""
    where, connection, signed = f"{peer.name} at {peer.seen.url}", None, sign_request(hops.key, peer.name, path, body)
    fields = {"content-length": str(len(body)), **signed, **({} if path == SETTLE else UPGRADE)}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    asked = hops.asking(peer, b"POST", path.encode(), headers, body)
    try:
        async with asyncio.timeout(ANSWER_S), asked as answer:
            status, found = answer.status, dict(answer.headers)
            if status == HTTPStatus.SWITCHING_PROTOCOLS:
                said, connection = found.get(b"djinn-seq", b""), answer.hand_over()
            else:
                said = await answer.read(MAX_ANSWER_BYTES)
    except (OSError, ReplicaAway, ReplicaLost) as error:  # a timeout too
        raise PeerAway(f"{where} does not answer: {str(error) or 'it takes too long'}") from error
    signature = found.get(SIGNATURE.encode(), b"").decode("latin-1")
    if is_answer(hops.key, signed, status, said, signature):
        return status, said, connection
    if connection is not None:
        connection.close()
    if not signature and status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # it may have the key, and be full
        raise PeerAway(f"{where} answers with status {status}")
    raise PeerStranger(
        f"{where} lacks the key of this cluster, or has another name: its answer with status {status} is not signed"
    )


def send(connection: socket.socket, said: bytes) -> socket.socket:
    """Say so little that it fits in the connection's buffer. Returns the connection. Closes it on `OSError`."""
    try:
        connection.send(said)
    except OSError:
        connection.close()
        raise
    return connection


def give(executor: EngineExecutor, connection: socket.socket) -> int:
    """Give the engine the connection. Returns its number. Closes it on `EngineError` and `EngineRestarting`."""
    try:
        executor.check()
        return executor.engine.give(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):  # it is about to be known that the engine has died
            raise EngineRestarting(f"a connection could not be handed to it: {error}") from error
        raise


Take = Callable[[str], socket.socket]
"""Tells the other server something, and returns the connection for an engine. Raises `OSError` if it has been lost."""
Way = tuple[type[Any], Callable[[Any, Take], Awaitable[Answer | None]]]
"""What comes to a path, and what answers it, takes the connection, or raises an error to refuse it."""


class ClusterDoors:
    """Answers other servers, before any check of clients: their signature is their key. Passes on all the rest."""

    def __init__(self, app: ASGIApp, hops: Hops, ways: Mapping[str, Way]) -> None:
        """`ways` are what may be asked, by path."""
        self.app, self._hops, self._ways = app, hops, ways

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        app: ASGIApp | None = self.app
        try:
            if scope["type"] != "lifespan":
                self._hops.note(scope)
            if scope["type"] == "http" and scope["path"].startswith(PREFIX):
                app = await self._answered(scope, receive, send)
        except DjinnError as error:
            app = error_response(error, scope)
        if app is not None:
            await app(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """The signed answer; None if the connection was handed over, or lost. Raises what `_body` raises."""
        path, headers, status = scope["path"], Headers(scope=scope), HTTPStatus.OK
        body = await self._body(scope, headers, receive)
        kind, answer_to = self._ways[path]
        try:
            answer = await answer_to(msgspec.msgpack.decode(body, type=kind), partial(self._hand_over, scope, headers))
        except OSError as error:
            logger.warning("a connection of another server was lost: %s", error)
            return None
        except Exception as error:  # the other server may be of any version
            if not isinstance(error, DjinnError):
                logger.warning("another server is refused: %s", error)
            answer, status = Answer.refusing(error), HTTPStatus.CONFLICT
        if answer is None:  # for the logs: it goes nowhere
            await send({"type": "http.response.start", "status": HTTPStatus.SWITCHING_PROTOCOLS, "headers": []})
            return None
        content = encode(answer)
        signed = {SIGNATURE: sign_answer(self._hops.key, headers, status, content)}
        return Response(content, status, signed, "application/vnd.msgpack")

    async def _body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """The body of a request that a server of the cluster has signed. A stranger's is not read."""
        path, here, body = scope["path"], self._hops.fleet.here, bytearray()
        if path not in self._ways or scope["method"] != "POST":
            raise NotFound(f"{scope['method']} {path}: Not Found")
        if not is_request(self._hops.key, here, path, headers):
            raise Unauthenticated(f"only servers of the cluster, with its key, ask {here} for this")
        most = MAX_QUESTION_BYTES if path == SETTLE else MAX_OFFER_BYTES
        try:
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > most:
                    raise TooLarge(f"the body must be at most {most} bytes")
        except ClientDisconnect as error:
            raise MalformedRequest("the request did not come whole") from error
        if hashlib.sha256(body).hexdigest() != headers.get(DIGEST):
            raise Unauthenticated("the body differs from the signed one")
        return bytes(body)

    def _hand_over(self, scope: Scope, headers: Headers, said: str) -> socket.socket:
        """Answer 101, and return the connection. Raises `OSError` if it has been lost."""
        if (hand_over := scope["state"].get("hand_over")) is None:
            raise PeerMismatch("this server cannot hand connections over")
        signature = sign_answer(self._hops.key, headers, HTTPStatus.SWITCHING_PROTOCOLS, said.encode())
        lines = ["HTTP/1.1 101 Switching Protocols", "connection: upgrade", "upgrade: djinn-kv", f"djinn-seq: {said}"]
        return send(hand_over(), "\r\n".join([*lines, f"{SIGNATURE}: {signature}", "", ""]).encode())
