"""413 for a body over the limit, whether its length is declared or it comes in pieces."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.error_handlers import error_response
from app.errors import TooLarge


class BodyLimitMiddleware:
    """Refuses a declared length at once and counts the rest as it arrives.

    FastAPI's own `max_body_size` does the same, but answers a declared length with a plain-text body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message = f"the body must be at most {self.max_bytes} bytes"
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            await error_response(TooLarge(message))(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self.max_bytes:
                # An HTTPException, because FastAPI turns any other exception from reading a body into a 400.
                raise HTTPException(TooLarge.status, message)
            return part

        await self.app(scope, receive_counted, send)
