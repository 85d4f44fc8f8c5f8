"""What other servers of the cluster ask of this one, before any gate for clients: their signature is their key."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.cluster.key import SIGNATURE, ClusterKey, is_body, is_request, sign_answer
from app.cluster.moves.arrivals import Arrivals
from app.cluster.moves.bindings import MAX_RESPONSE_BYTES
from app.cluster.moves.wire import ABORT, COMMIT, OFFER, PREFIX, SETTLE, Answer, Offer, Question, Step, encode
from app.domain.errors import (
    DjinnError,
    MalformedRequest,
    NotDurable,
    NotFound,
    PeerMismatch,
    TooLarge,
    Unauthenticated,
)
from app.domain.values import MAX_LABEL_BYTES
from app.web.errors import error_response

logger = logging.getLogger(__name__)

MAX_STEP_BYTES = 1 << 16
MAX_OFFER_BYTES = MAX_LABEL_BYTES + MAX_RESPONSE_BYTES + (256 << 20)
"""Enough for a label, responses, and a history of `MAX_TOKENS`."""


@dataclass(frozen=True, slots=True)
class Offered:
    """An offer that this server takes, if the connection can be handed over."""

    said: str
    """What the other server is told."""
    begin: Callable[[socket.socket], None]
    """Has the engine use the connection."""
    lose: Callable[[], Awaitable[None]]
    """Forgets it: the connection has been lost."""


Way = Callable[[bytes], Awaitable[Offered]]
"""Accepts what is offered at one path, and then goes from engine to engine. Raises a `DjinnError` to refuse."""


class ClusterDoors:
    """Answers requests of other servers, and passes on all others."""

    def __init__(
        self,
        app: ASGIApp,
        here: str,
        key: ClusterKey,
        note_hop: Callable[[Scope], None],
        arrivals: Arrivals,
        ways: Mapping[str, Way],
    ) -> None:
        """`here` is the server's own name. `note_hop` notes of a request whether another server has sent it on for a
        client, and raises the `DjinnError` of one that only says so. `ways` are those of other things than sessions, by
        path.
        """
        self.app = app
        self._here = here
        self._note_hop = note_hop
        self._key = key
        self._arrivals = arrivals
        self._ways: Mapping[str, Way] = {OFFER: self._session, **ways}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        try:
            if scope["type"] != "lifespan":
                self._note_hop(scope)
            if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
                app: ASGIApp | None = self.app
            else:
                app = await self._answered(scope, await self._admit(scope, receive), send)
        except DjinnError as error:
            app = error_response(error, scope)
        if app is not None:
            await app(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        """The body of a request that a server of the cluster has signed. Raises `Unauthenticated`, `NotFound`,
        `TooLarge`, `MalformedRequest`. A stranger's body is not read.
        """
        path, headers = scope["path"], Headers(scope=scope)
        if path not in (*self._ways, COMMIT, ABORT, SETTLE) or scope["method"] != "POST":
            raise NotFound(f"{scope['method']} {path}: Not Found")
        if not is_request(self._key, self._here, path, headers):
            raise Unauthenticated(f"only servers of the cluster, with its key, ask {self._here} for this")
        most, body, is_whole = MAX_OFFER_BYTES if path in self._ways else MAX_STEP_BYTES, bytearray(), False
        while not is_whole:
            part = await receive()
            if part["type"] != "http.request":
                raise MalformedRequest("the request did not come whole")
            body += part.get("body", b"")
            if len(body) > most:
                raise TooLarge(f"the body must be at most {most} bytes")
            is_whole = not part.get("more_body", False)
        if not is_body(bytes(body), headers):
            raise Unauthenticated("the body differs from the signed one")
        return bytes(body)

    async def _answered(self, scope: Scope, body: bytes, send: Send) -> Response | None:
        """The signed answer. None: the connection has been handed over, or lost."""
        path, headers, status = scope["path"], Headers(scope=scope), HTTPStatus.OK
        try:
            if (way := self._ways.get(path)) is not None:
                await self._offer(way, scope, headers, body, send)
                return None
            answer = await self._step(path, body)
        except DjinnError as error:
            answer = Answer.refusing(error)
            status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, NotDurable) else HTTPStatus.CONFLICT
        content = encode(answer)
        signed = {SIGNATURE: sign_answer(self._key, headers, status, content)}
        return Response(content, status, signed, "application/vnd.msgpack")

    async def _offer(self, way: Way, scope: Scope, headers: Mapping[str, str], body: bytes, send: Send) -> None:
        """Take what is offered, and the connection with it. Raises the `DjinnError` that refuses it."""
        hand_over: Callable[[], socket.socket] | None = scope["state"].get("hand_over")
        if hand_over is None:
            raise PeerMismatch("this server cannot hand connections over")
        offered = await way(body)
        said, status = offered.said.encode(), HTTPStatus.SWITCHING_PROTOCOLS
        signature = sign_answer(self._key, headers, status, said).encode()
        lines = [b"connection: upgrade", b"upgrade: djinn-kv", b"djinn-seq: " + said]
        lines.append(SIGNATURE.encode() + b": " + signature)
        try:
            connection = hand_over()
            connection.send(b"\r\n".join([b"HTTP/1.1 101 Switching Protocols", *lines, b"", b""]))
        except OSError as error:
            logger.warning("a connection of another server was lost: %s", error)
            await offered.lose()
            return
        offered.begin(connection)
        # For the logs: it goes nowhere.
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def _session(self, body: bytes) -> Offered:
        """Accept a session."""
        arrivals = self._arrivals
        arrival = await arrivals.offer(read_message(body, Offer))
        return Offered(arrivals.said(arrival), partial(arrivals.begin, arrival), partial(arrivals.lose, arrival))

    async def _step(self, path: str, body: bytes) -> Answer:
        if path == SETTLE:
            return await self._arrivals.settle(read_message(body, Question))
        step: Step = read_message(body, Step)
        if path == COMMIT:
            return await self._arrivals.commit(step.token, step.word)
        return await self._arrivals.abort(step.token)


def read_message(body: bytes, kind: type[Any]) -> Any:
    """Decode a message of another server. Raises `PeerMismatch` if it is malformed."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerMismatch(f"the other server speaks another version: {error}") from error
