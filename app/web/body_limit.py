"""How large bodies may be, and how much memory all of them take together.

One whose length is declared in two ways gets 400, and one for which there is no memory now 503.

A WebSocket with a message over the limit is closed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import BodiesFull, CompressedBody, DjinnError, MalformedRequest, TooLarge
from app.machine.budget import Budget, Share
from app.machine.files import size
from app.web.connections import origin_of
from app.web.errors import error_response


def body_budget(max_bytes: int) -> Budget:
    """What the bodies of all requests may have together, in bytes. Its error is `BodiesFull`."""

    def refuse(taken: int, own: int, needed: int) -> BodiesFull:
        whose = f", {size(own)} of it by this client, who leaves others as much" if own else ""
        return BodiesFull(
            f"bodies of requests under way take {size(taken)} of the {size(max_bytes)} that they may have{whose}; "
            f"this one needs {size(needed)}"
        )

    return Budget(max_bytes, refuse)


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


class BodyLimitMiddleware:
    """Refuses a declared length at once and counts the rest as it arrives.

    `routes` have limits of their own, by method and path: what they return for a request's scope, in bytes. Every other
    method of such a path has `max_bytes`. Bodies of those routes are not in memory; all others have a part of the
    `budget` from when their length is known until their request is over: for as long, they are. So has a message of a
    WebSocket from when it comes until the application asks for the next.

    What a compressed body would come to cannot be told, and nothing here decompresses one.

    FastAPI's own `max_body_size` does the same, but answers a declared length with a plain-text body.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        routes: Mapping[tuple[str, str], Callable[[Scope], int]],
        budget: Budget,
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.routes = routes
        self.budget = budget

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
        share = Share(self.budget, client_of(scope)) if own_limit is None else None
        try:
            _check(headers, max_bytes, message)
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

        try:
            await self.app(scope, receive_counted, send)
        finally:
            if share is not None:
                share.shrink()

    async def _serve_messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket. Its protocol has a message while it comes, and asks for its part of the budget."""
        share = scope["state"]["share"] = Share(self.budget, client_of(scope))
        try:
            await self.app(scope, self._limited(receive, send), send)
        finally:
            share.shrink()

    def _limited(self, receive: Receive, send: Send) -> Receive:
        """Receives messages of a WebSocket. To the application, one over the limit is the end of the connection."""

        async def receive_limited() -> Message:
            message = await receive()
            content = message.get("text") or message.get("bytes") or b""
            if len(content if isinstance(content, bytes) else content.encode()) <= self.max_bytes:
                return message
            reason = f"a message must be at most {self.max_bytes} bytes"
            await send({"type": "websocket.close", "code": MESSAGE_TOO_BIG, "reason": reason})
            return {"type": "websocket.disconnect", "code": MESSAGE_TOO_BIG, "reason": reason}

        return receive_limited


def _check(headers: Headers, max_bytes: int, too_large: str) -> None:
    """Refuse the headers of a body before it comes. Raises `CompressedBody`, `MalformedRequest`, `TooLarge`."""
    encoding = headers.get("content-encoding", "identity")
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
