"""413 for a body over the limit, whether its length is declared or it comes in pieces, 415 for a compressed one."""

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.domain.errors import CompressedBody, TooLarge
from app.web.error_handlers import error_response

BODILESS = ("GET", "HEAD", "DELETE")
"""Methods whose routes read no body."""


class BodyLimitMiddleware:
    """Refuses a declared length at once and counts the rest as it arrives.

    `routes` have limits of their own, in bytes by method and path. Every other method of such a path has `max_bytes`.

    What a compressed body would come to cannot be told, and nothing here decompresses one.

    FastAPI's own `max_body_size` does the same, but answers a declared length with a plain-text body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, routes: Mapping[tuple[str, str], int]) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        max_bytes = self.routes.get((scope["method"], scope["path"]), self.max_bytes)
        message = f"the body must be at most {max_bytes} bytes"
        if scope["method"] in BODILESS:
            message = f"a {scope['method']} request takes no body"
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            error = CompressedBody(f"Content-Encoding {encoding}: send the body as it is", param="Content-Encoding")
            await error_response(error, scope)(scope, receive, send)
            return
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            await error_response(TooLarge(message), scope)(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > max_bytes:
                # An HTTPException, because FastAPI turns any other exception from reading a body into a 400.
                raise HTTPException(TooLarge.status, message)
            return part

        await self.app(scope, receive_counted, send)
