"""The access log: a line for each request, without anything that the request said."""

import logging
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from app.logs.about import method_of, route_of, session_of
from app.web.matching import matched
from app.web.middleware.answers import Answer

logger = logging.getLogger(__name__)


class AccessLogMiddleware:
    """Logs a line when a request is over: a stream's when it has ended, a WebSocket's when it has closed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        began, answer = time.perf_counter(), Answer()
        try:
            await self.app(scope, receive, answer.watched(send))
        finally:
            _log(scope, answer, (time.perf_counter() - began) * 1000)


def _log(scope: Scope, answer: Answer, duration_ms: float) -> None:
    about = matched(scope)
    fields = {
        "client": scope["client"][0] if scope.get("client") else None,
        "method": method_of(scope),
        "path": route_of(about),
        "status": answer.status,
        "duration_ms": round(duration_ms, 3),
    }
    logger.info(
        "%s %s %s %d %.1f ms",
        fields["client"] or "-",
        fields["method"] or "-",
        fields["path"] or "-",  # of no route
        answer.status,
        duration_ms,
        extra={"fields": fields, "session": session_of(about, answer.session)},
    )
