"""Bodies of requests and answers: JSON read once, files in pieces, and nothing ignored that a client sends."""

import json
import string
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.domain.text import MAX_NESTING, has_more_values, is_nested_too_deep
from app.sessions.side_work import Lane, SideWork
from app.web.sse import ClientDisconnected

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


async def body_chunks(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises `ClientDisconnected` if it does not come whole."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as error:
        raise ClientDisconnected from error


async def whole_body(request: Request) -> bytes:
    """The body, which is in memory at once. Raises `ClientDisconnected` if it does not come whole."""
    return b"".join([chunk async for chunk in body_chunks(request)])


EMPTY_OBJECT = b"{}"
WHITESPACE = string.whitespace.encode()


async def refuse_unread(request: Request) -> None:
    """Raise `FieldOutOfRange` for query parameters and bodies that the route does not take. An empty `{}` is no body.

    The fields of those that it does take are checked by its own models. Dependencies take none.
    Raises `ClientDisconnected` if the body does not come whole.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    _check_query(request, takes_query=bool(route.dependant.query_params))
    takes_body = route.body_field is not None or "requestBody" in (route.openapi_extra or {})
    if not takes_body and not await _is_empty(request):
        raise FieldOutOfRange("body: this route takes none", param="body")


async def _is_empty(request: Request) -> bool:
    """Read the body to its end, and keep no more of it than the answer needs."""
    start = b""
    async for chunk in body_chunks(request):
        start = (start + chunk.translate(None, WHITESPACE))[: len(EMPTY_OBJECT) + 1]
    return start in (b"", EMPTY_OBJECT)


def _check_query(request: Request, *, takes_query: bool) -> None:
    counts = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in counts.items():
        if not takes_query:
            raise FieldOutOfRange(f"{name}: this route takes no query parameters", param=name)
        if count > 1:
            raise FieldOutOfRange(f"{name}: give it once, not {count} times", param=name)


def matched(scope: Mapping[str, Any]) -> Mapping[str, Any]:
    """An ASGI scope with the route that its path has, and the parameters in its path; as it is where there is none."""
    if "route" in scope or "app" not in scope:
        return scope
    for route in scope["app"].state.routes:
        match, found = route.matches(scope)
        if match is not Match.NONE:
            return {**scope, "route": route, **found}
    return scope
