"""Bodies of requests and answers: how large they may be and how much memory all take together, JSON read once, files in
pieces, and nothing ignored that a client sends.

One whose length is declared in two ways gets 400, and one for which there is no memory now 503. A WebSocket with a
message over the limit is closed.
"""

import asyncio
import gzip
import json
import string
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import BodiesFull, CompressedBody, DjinnError, FieldOutOfRange, MalformedRequest, TooLarge
from app.domain.text import MAX_NESTING, has_more_values, is_nested_too_deep
from app.machine.budget import Budget, Share, byte_budget
from app.sessions.side_work import Lane, SideWork
from app.web.connections import origin_of
from app.web.errors import close_socket, error_response
from app.web.openapi import is_open


def body_budget(max_bytes: int) -> Budget:
    """What the bodies of all requests may have together, in bytes. Its error is `BodiesFull`."""
    return byte_budget(max_bytes, "bodies of requests under way", BodiesFull, "client")


def client_of(scope: Mapping[str, Any]) -> str:
    """Who sends the request of an ASGI `scope`: its tenant, or where there are none its address."""
    owner: str | None = scope.get("state", {}).get("owner")
    if owner is not None:
        return f"tenant {owner}"
    host, _ = scope.get("client") or ("", 0)
    try:
        return origin_of(host)
    except ValueError:  # a proxy names it
        return f"host {host}"


BODILESS = ("GET", "HEAD", "DELETE")
"""Methods whose routes read no body."""
MESSAGE_TOO_BIG = 1009
"""The code with which a WebSocket is closed (RFC 6455, 7.4.1)."""


@dataclass
class BodyLimitMiddleware:
    """Refuses a declared length at once and counts the rest as it arrives.

    `routes` have limits of their own, by method and path: what they return for a request's scope, in bytes. Every other
    method of such a path has `max_bytes`. Bodies of those routes are not in memory; all others have a part of the
    `budget` from when their length is known until their request is over: for as long, they are. So has a message of a
    WebSocket from when it comes until the application asks for the next.

    A body in gzip or zstd is what it holds, and counted as that too. A route with a limit of its own takes none.

    FastAPI's own `max_body_size` does the same, but answers a declared length with a plain-text body.
    """

    app: ASGIApp
    max_bytes: int
    routes: Mapping[tuple[str, str], Callable[[Scope], int]]
    budget: Budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "websocket":
            await self._serve_messages(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        own_limit = self.routes.get((scope["method"], scope["path"]))
        max_bytes = self.max_bytes if own_limit is None else own_limit(scope)
        message = f"the body must be at most {max_bytes} bytes"
        if scope["method"] in BODILESS:
            message = f"a {scope['method']} request takes no body"
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity").lower()
        is_packed = own_limit is None and encoding in UNPACKED
        share = Share(self.budget, client_of(scope)) if own_limit is None else None
        try:
            _check(headers, max_bytes, message, encoding="identity" if is_packed else encoding)
            if share is not None:
                share.require(_declared(headers))
        except DjinnError as refusal:
            await error_response(refusal, scope)(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > max_bytes:
                # An HTTPException, because FastAPI turns any other exception from reading a body into a 400.
                raise HTTPException(TooLarge.status, message)
            if share is not None:
                share.require(received)
            return part

        taken: Receive = receive_counted
        if is_packed:
            left = [pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")]
            scope["headers"] = [*left, (b"transfer-encoding", b"chunked")]
            taken = _unpacking(receive_counted, encoding, max_bytes, share)
        try:
            await self.app(scope, taken, send)
        finally:
            if share is not None:
                share.shrink()

    async def _serve_messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket. Its protocol has a message while it comes, and asks for its part of the budget. To the
        application, a message over the limit is the end of the connection.
        """
        share = scope["state"]["share"] = Share(self.budget, client_of(scope))

        async def receive_limited() -> Message:
            message = await receive()
            content = message.get("text") or message.get("bytes") or b""
            if len(content if isinstance(content, bytes) else content.encode()) <= self.max_bytes:
                return message
            reason = f"a message must be at most {self.max_bytes} bytes"
            await close_socket(send, MESSAGE_TOO_BIG, reason)
            return {"type": "websocket.disconnect", "code": MESSAGE_TOO_BIG, "reason": reason}

        try:
            await self.app(scope, receive_limited, send)
        finally:
            share.shrink()


PIECE_BYTES = 1 << 20
"""Of a body that is unpacked at a time: others have a turn between two."""
ZSTD_BYTES = 256
"""Of zstd, at a time: four may stand for 128 KiB, and its library gives no less than all."""
MAX_WINDOW = 8 << 20
"""What zstd may look back (RFC 8878, 3.1.1.1.2 asks for so much)."""


def _gunzipped(content: bytes) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=BytesIO(content)) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _of_zstd(content: bytes) -> Iterator[bytes]:
    import zstandard  # the stages of `make gpu-check` have none

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    frame = decompressor.decompressobj()
    try:
        for start in range(0, len(content), ZSTD_BYTES):
            rest = content[start : start + ZSTD_BYTES]
            while rest:
                frame = decompressor.decompressobj() if frame.eof else frame
                if piece := frame.decompress(rest):
                    yield piece
                rest = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise EOFError from error
    if not frame.eof:
        raise EOFError


UNPACKED = {"gzip": _gunzipped, "zstd": _of_zstd}
"""By their name in `Content-Encoding`, how bodies are unpacked."""


def _unpacking(receive: Receive, encoding: str, max_bytes: int, share: Share | None) -> Receive:
    """Receives what a packed body holds: of a small one that may be gigabytes, which nobody ever has in memory."""
    pieces: Iterator[bytes] | None = None
    unpacked = 0

    async def receive_unpacked() -> Message:
        nonlocal pieces, unpacked
        if pieces is None:
            content, more = b"", True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                content += message.get("body", b"")
                more = message.get("more_body", False)
            pieces = UNPACKED[encoding](content)
        await asyncio.sleep(0)
        try:
            piece = next(pieces, b"")
        except (OSError, EOFError, zlib.error):
            raise HTTPException(MalformedRequest.status, f"the body is not {encoding}, as it says") from None
        unpacked += len(piece)
        if unpacked > max_bytes:
            raise HTTPException(TooLarge.status, f"the body must be at most {max_bytes} bytes when it is unpacked")
        if share is not None:
            share.require(unpacked)
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    return receive_unpacked


def _check(headers: Headers, max_bytes: int, too_large: str, *, encoding: str) -> None:
    """Refuse the headers of a body before it comes. Raises `CompressedBody`, `MalformedRequest`, `TooLarge`."""
    if encoding != "identity":
        raise CompressedBody(f"Content-Encoding {encoding}: send the body as it is", param="Content-Encoding")
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy may believe the one, and this server the other: what is left over would be a second request.
        raise MalformedRequest("a body has Content-Length or Transfer-Encoding, not both", param="Content-Length")
    if _declared(headers) > max_bytes:
        raise TooLarge(too_large)


def _declared(headers: Headers) -> int:
    """The length that the headers tell; 0: they tell none."""
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


MAX_VALUES = 1 << 18
"""Values that a body may have, or twice as many as a context has tokens: reading them holds up all other clients."""
MAX_NAMES = 10_000
"""Names in one object: each that no field has becomes a separate error."""
LARGE_BYTES = 1 << 16
"""A body of so many bytes holds up others for a while: reading it is a tenant's side work."""
SHOWN_CHARACTERS = 20
BYTE_ORDER_MARK = "\ufeff"
"""Some clients of Windows begin each text with it."""


class JsonRoute(APIRoute):
    """A route that reads its JSON body with `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler, with another way to read JSON."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        services = self.app.state.services
        return await read_in_turn(await self.body(), services.info.max_model_len, services.side_work, self.state.owner)


async def read_in_turn(body: bytes, max_model_len: int, side_work: SideWork, owner: str | None) -> Any:
    """`read_json` of a tenant's body: a large one has its turn among the work that is done for the tenant."""
    if len(body) < LARGE_BYTES:
        return read_json(body, max_model_len)
    async with side_work.turn(owner, Lane.TEXT) as piece:
        began = time.thread_time()
        try:
            return read_json(body, max_model_len)
        finally:
            piece.seconds = time.thread_time() - began


def read_json(body: bytes, max_model_len: int) -> Any:
    """The value that `body` is the text of. NaN and infinities are numbers here: the fields themselves refuse them.

    Raises `MalformedRequest` for everything that JSON or this server does not have, for more values than a request
    needs whose context has `max_model_len` tokens, and for a name that an object gives twice.
    """
    most = max(MAX_VALUES, 2 * max_model_len)
    if has_more_values(body, most):
        raise MalformedRequest(f"the body has too many values: at most {most}, lists and objects included")
    if is_nested_too_deep(body):
        raise MalformedRequest(f"the body is nested too deep: at most {MAX_NESTING} levels")
    try:
        text = body.decode().removeprefix(BYTE_ORDER_MARK)  # RFC 8259, 8.1: UTF-8 and no other
        return json.loads(text, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise MalformedRequest(f"invalid UTF-8 in the body: {where}") from None
    except json.JSONDecodeError as error:
        shown = error.doc[error.pos : error.pos + SHOWN_CHARACTERS]
        found = f"unexpected {shown!r}" if shown else "it ends too early,"
        where = f"line {error.lineno}, column {error.colno}"
        raise MalformedRequest(f"invalid JSON in the body: {found} at {where}") from None
    except ValueError:
        digits = sys.get_int_max_str_digits()
        raise MalformedRequest(f"the body has an integer that is too long: at most {digits} digits") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        raise MalformedRequest(f"an object in the body has {len(pairs)} names: at most {MAX_NAMES}")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise MalformedRequest(f"an object in the body gives {twice} more than once")
    return found


OCTET_STREAM = "application/octet-stream"
"""The type of files that every client knows."""
SAFETENSORS = "application/vnd.safetensors"
"""The same files under their own name."""
PART_BYTES = 1 << 20
FILE: dict[str, Any] = {OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}}}
"""The documented `content` of such a body."""
FILE_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": FILE}}
"""The `openapi_extra` of a route that takes one."""


def file_type(request: Request) -> str:
    """The media type of an answer that is a safetensors file: its own if `Accept` names that."""
    return SAFETENSORS if SAFETENSORS in accepted_types(request) else OCTET_STREAM


class LargeAnswer(Response):
    """Sends its body in parts, each once the client has read most of those before. So it is over when little is left in
    memory, or when the connection is gone.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = memoryview(self.body)
        for first in range(0, len(content), PART_BYTES):
            part = bytes(content[first : first + PART_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def file_response(request: Request, content: bytes) -> Response:
    """An answer that is a safetensors file."""
    return LargeAnswer(content, media_type=file_type(request))


def accepted_types(request: Request) -> set[str]:
    """The media types that `Accept` names, in lower case."""
    accepted = ",".join(request.headers.getlist("accept"))
    return {part.partition(";")[0].strip().lower() for part in accepted.split(",")}


EMPTY_OBJECT = b"{}"
WHITESPACE = string.whitespace.encode()


async def refuse_unread(request: Request) -> None:
    """Raise `FieldOutOfRange` for query parameters and bodies that the route does not take. An empty `{}` is no body.

    The fields of those that it does take are checked by its own models. Dependencies take none. Probes and browsers may
    add a query to what is open to anybody.
    Raises `ClientDisconnect` if the body does not come whole.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    query = () if is_open(route.path) else request.query_params.multi_items()
    for name, count in Counter(name for name, _ in query).items():
        if not route.dependant.query_params:
            raise FieldOutOfRange(f"{name}: this route takes no query parameters", param=name)
        if count > 1:
            raise FieldOutOfRange(f"{name}: give it once, not {count} times", param=name)
    takes_body = route.body_field is not None or "requestBody" in (route.openapi_extra or {})
    if takes_body:
        return
    start = b""
    async for chunk in request.stream():  # to its end, of which no more is kept than is looked at
        start = (start + chunk.translate(None, WHITESPACE))[: len(EMPTY_OBJECT) + 1]
    if start not in (b"", EMPTY_OBJECT):
        raise FieldOutOfRange("body: this route takes none", param="body")


def matched(scope: Mapping[str, Any]) -> Mapping[str, Any]:
    """An ASGI scope with the route that its path has, and the parameters in its path; as it is where there is none."""
    if "route" in scope or "app" not in scope:
        return scope
    for route in scope["app"].state.routes:
        match, found = route.matches(scope)
        if match is not Match.NONE:
            return {**scope, "route": route, **found}
    return scope
