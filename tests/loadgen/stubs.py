"""Servers for tests of the load generator that are not Djinn, or stand before one: a real uvicorn in a thread."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.errors import error_response
from tests.serving import PromptServer


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a free port; yields its URL. What still runs at the end is cut off."""
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    with PromptServer(config).in_thread() as url:
        yield url


def openai_app(complete: Callable[[Request], Awaitable[Response]], *others: Route) -> Starlette:
    """A server with the model "stub" and vLLM's `/tokenize`, of which characters are tokens. `complete` answers the
    streamed completions.
    """

    async def models(_request: Request) -> Response:
        return JSONResponse({"data": [{"id": "stub"}]})

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"tokens": [ord(character) for character in (await request.json())["prompt"]]})

    async def completions(request: Request) -> Response:
        if not (await request.json()).get("stream"):
            return JSONResponse({"choices": [{"text": "a", "token_ids": [97]}]})
        return await complete(request)

    routes = [
        Route("/v1/models", models),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    return Starlette(routes=[*routes, *others])


REFUSED = "refused"
"""Nothing is done: 503 `replica_away`."""
UNANSWERED = "unanswered"
"""It is done, and then the answer is 502 `replica_lost`."""
CUT = "cut"
"""The same, of a turn that is done by half."""
MOVING = "moving"
"""Nothing is done: 409 `moving`."""
ERRORS = {REFUSED: (503, "replica_away"), MOVING: (409, "moving")}
"""Of requests that are not done."""
PASSED_HEADERS = ("content-type", "retry-after", "x-request-id")


class Flaky:
    """Fails as a cluster does, before a real server at `url`. `failures` are those of the next turns."""

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
            return error_response(*ERRORS[failure])
        if failure == CUT:
            body = json.loads(content)
            content = json.dumps({**body, "max_tokens": body["max_tokens"] // 2}).encode()
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            headers = {"content-type": request.headers.get("content-type", "application/json")}
            found = await http.request(request.method, path, content=content, headers=headers)
        if failure in (UNANSWERED, CUT):
            return error_response(502, "replica_lost")
        kept = {name: found.headers[name] for name in PASSED_HEADERS if name in found.headers}
        return Response(found.content, found.status_code, kept)
