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
from app.cluster.moves import wire
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
"""A label, responses, and histories of `MAX_TOKENS`."""

HandOver = Callable[[], socket.socket]


@dataclass(frozen=True, slots=True)
class Offered:
    """What another server has offered, and this one takes, if the connection can be handed over."""

    said: str
    """What the other server is told."""
    begin: Callable[[socket.socket], None]
    """Has the engine use the connection."""
    lose: Callable[[], Awaitable[None]]
    """Forgets it: the connection has been lost."""


Way = Callable[[bytes], Awaitable[Offered]]
"""Takes note of what is offered at one path, and then goes from engine to engine. Raises the `DjinnError` that says why
not.
"""


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
        if scope["type"] != "lifespan":
            try:
                self._note_hop(scope)
            except DjinnError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        try:
            headers, body = await self._admit(scope, receive)
        except DjinnError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if (way := self._ways.get(scope["path"])) is not None:
            answer = await self._offer(way, scope, headers, body, send)
        else:
            answer = await self._step(scope["path"], headers, body)
        if answer is not None:
            await answer(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive) -> tuple[Mapping[str, str], bytes]:
        """The headers and the body of a request that a server of the cluster has signed. Raises `Unauthenticated`,
        `NotFound`, `TooLarge`, `MalformedRequest`. A stranger's body is not read.
        """
        path, headers = scope["path"], Headers(scope=scope)
        if path not in (*self._ways, COMMIT, ABORT, SETTLE) or scope["method"] != "POST":
            raise NotFound(f"{scope['method']} {path}: Not Found")
        if not is_request(self._key, self._here, path, headers):
            raise Unauthenticated(f"only servers of the cluster, with its key, ask {self._here} for this")
        most, body = MAX_OFFER_BYTES if path in self._ways else MAX_STEP_BYTES, bytearray()
        while True:
            part = await receive()
            if part["type"] != "http.request":
                raise MalformedRequest("the request did not come whole")
            body += part.get("body", b"")
            if len(body) > most:
                raise TooLarge(f"the body must be at most {most} bytes")
            if not part.get("more_body", False):
                break
        if not is_body(bytes(body), headers):
            raise Unauthenticated("the body differs from the signed one")
        return headers, bytes(body)

    async def _offer(
        self, way: Way, scope: Scope, headers: Mapping[str, str], body: bytes, send: Send
    ) -> Response | None:
        """None: the connection has been handed over."""
        hand_over: HandOver | None = scope["state"].get("hand_over")
        try:
            if hand_over is None:
                raise PeerMismatch("this server cannot hand connections over")
            offered = await way(body)
        except DjinnError as error:
            return self._answer(headers, 409, encode(Answer.refusing(error)))
        try:
            connection = hand_over()
            connection.send(self._switch(headers, offered.said))
        except OSError as error:
            logger.warning("a connection of another server was lost: %s", error)
            await offered.lose()
            return None
        offered.begin(connection)
        # For the logs: it goes nowhere.
        await send({"type": "http.response.start", "status": HTTPStatus.SWITCHING_PROTOCOLS, "headers": []})
        return None

    async def _session(self, body: bytes) -> Offered:
        """Take note of a session."""
        arrivals = self._arrivals
        arrival = await arrivals.offer(read_message(body, Offer))
        said = f"{arrivals.count} {arrival.word} {arrivals.journal}"
        return Offered(said, partial(arrivals.begin, arrival), partial(arrivals.lose, arrival))

    async def _step(self, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        arrivals = self._arrivals
        try:
            match path:
                case wire.COMMIT:
                    step = read_message(body, Step)
                    answer = await arrivals.commit(step.token, step.word)
                case wire.ABORT:
                    answer = await arrivals.abort(read_message(body, Step).token)
                case _:
                    answer = await arrivals.settle(read_message(body, Question))
        except NotDurable as error:
            return self._answer(headers, 503, encode(Answer.refusing(error)))
        except DjinnError as error:
            return self._answer(headers, 409, encode(Answer.refusing(error)))
        return self._answer(headers, 200, encode(answer))

    def _answer(self, headers: Mapping[str, str], status: int, body: bytes) -> Response:
        signed = {SIGNATURE: self._sign(headers, status, body)}
        return Response(body, status, signed, "application/vnd.msgpack")

    def _switch(self, headers: Mapping[str, str], text: str) -> bytes:
        """The answer to an offer that is taken note of. After it comes nothing."""
        said = text.encode()
        lines = [
            b"HTTP/1.1 101 Switching Protocols",
            b"connection: upgrade",
            b"upgrade: djinn-kv",
            b"djinn-seq: " + said,
            f"{SIGNATURE}: {self._sign(headers, HTTPStatus.SWITCHING_PROTOCOLS, said)}".encode(),
        ]
        return b"\r\n".join([*lines, b"", b""])

    def _sign(self, headers: Mapping[str, str], status: int, body: bytes) -> str:
        return sign_answer(self._key, headers, status, body)


def read_message(body: bytes, kind: type[Any]) -> Any:
    """A message of another server. Raises `PeerMismatch` for what is none."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerMismatch(f"the other server speaks another version: {error}") from error
