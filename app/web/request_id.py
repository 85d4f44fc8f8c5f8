"""`X-Request-Id` on every response: the client's own if it sent a sane one, else a new one.

Anthropic's API has it under another name; its paths answer with both.
"""

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.logs.about import REQUEST
from app.web.errors.bodies import MESSAGES_PATHS
from app.web.errors.handlers import REQUEST_ID_HEADER

MESSAGES_HEADER = "Request-Id"
ANSWERS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
"""The messages that have the headers of an answer."""
SESSION_HEADER = "X-Session-ID"
"""Names the session that an answer of the OpenAI routes is from."""
SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_request_id() -> str:
    """One that no other answer has."""
    return f"req_{secrets.token_hex(12)}"


class RequestIdMiddleware:
    """Sets `request.state.request_id` and the response header. Lines of the log name the request from here on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if SANE.fullmatch(given) else new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST.set(scope)  # the task is this request's alone

        async def send_with_id(message: Message) -> None:
            if message["type"] in ANSWERS:
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if scope["path"] in MESSAGES_PATHS:
                    headers[MESSAGES_HEADER] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)
