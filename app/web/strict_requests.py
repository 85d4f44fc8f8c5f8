"""Nothing that a client sends is ignored: what a route does not read, it refuses."""

import string
from collections import Counter

from fastapi import Request
from fastapi.routing import APIRoute

from app.domain.errors import FieldOutOfRange
from app.web.binary import body_chunks

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
