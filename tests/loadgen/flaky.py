"""A door before a real server that fails as a cluster's front door does."""

from __future__ import annotations

import json
import time

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

REFUSED = "refused"
"""Nothing is done: 503 `replica_away`."""
UNANSWERED = "unanswered"
"""It is done, and then the answer is 502 `replica_lost`."""
CUT = "cut"
"""The same, of a turn that is done by half."""
MOVING = "moving"
"""Nothing is done: 409 `moving`."""
BUG = "bug"
"""500 `internal_error`, after which no client asks again."""
ERRORS = {REFUSED: (503, "replica_away"), MOVING: (409, "moving"), BUG: (500, "internal_error")}
"""Of requests that are not done."""
PASSED_HEADERS = ("content-type", "retry-after", "x-request-id")


class Flaky:
    """Passes requests to the server at `url`. The next requests for turns fail as `failures` says, in their order."""

    def __init__(self, url: str) -> None:
        self.failures: list[str] = []
        self.seen: list[tuple[str, float]] = []
        """The paths of all requests, and when they came."""
        self.url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        await (await self._answer(request))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path, content = request.url.path, await request.body()
        self.seen.append((path, time.perf_counter()))
        failure = self.failures.pop(0) if path.endswith("/generate") and self.failures else None
        if failure in ERRORS:
            return _error(*ERRORS[failure])
        if failure == CUT:
            body = json.loads(content)
            content = json.dumps({**body, "max_tokens": body["max_tokens"] // 2}).encode()
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            headers = {"content-type": request.headers.get("content-type", "application/json")}
            found = await http.request(request.method, path, content=content, headers=headers)
        if failure in (UNANSWERED, CUT):
            return _error(502, "replica_lost")
        kept = {name: found.headers[name] for name in PASSED_HEADERS if name in found.headers}
        return Response(found.content, found.status_code, kept)


def _error(status: int, code: str) -> Response:
    return JSONResponse({"error": {"message": code, "code": code}}, status)
