"""JSON bodies: read once, and refused in the server's own words where they cannot be read."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from app.domain.errors import MalformedRequest
from app.domain.nesting import MAX_NESTING, has_more_values, is_nested_too_deep
from app.sessions.guards.side_work import Lane, SideWork

MAX_VALUES = 1 << 18
"""Values that a body may have, or twice as many as a context has tokens: reading them holds up all other clients."""
MAX_NAMES = 10_000
"""Names in one object: of those that no field has, each becomes an error of its own."""
LARGE_BYTES = 1 << 16
"""A body of so many bytes holds up others for a while: reading it is a tenant's side work."""
SHOWN_CHARACTERS = 20


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
        return json.loads(body.decode(), object_pairs_hook=_object)  # RFC 8259: UTF-8 and no other
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
