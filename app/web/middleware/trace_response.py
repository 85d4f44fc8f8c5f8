"""`traceresponse` on answers: the span of the turn that was asked for.

The header is in the editors' draft of W3C Trace Context. The recommendation has none for answers, and keeps
`traceparent` for requests.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.traces.base import TRACE_RESPONSE
from app.web.request_id import ANSWERS


class TraceResponseMiddleware:
    """Writes the header where the request has begun a turn, or resumed one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        async def send_with_span(message: Message) -> None:
            if message["type"] in ANSWERS and TRACE_RESPONSE in scope["state"]:
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[TRACE_RESPONSE] = scope["state"][TRACE_RESPONSE]
            await send(message)

        await self.app(scope, receive, send_with_span)
