"""Servers for tests of the load generator that are not Djinn: a real uvicorn in a thread. And a wait for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

START_TIMEOUT_S = 10
UNTIL_TIMEOUT_S = 60.0
CLOSING_S = 0.05


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` on a free port; yields its URL. What still runs at the end is cut off."""
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=asyncio.run, args=(_serve(server),), name="stub")
    thread.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        assert not thread.is_alive()


async def _serve(server: uvicorn.Server) -> None:
    """Serve to the end, and leave no connection open: uvicorn does not wait for those that it cuts off."""
    await server.serve()
    await asyncio.sleep(CLOSING_S)
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.sleep(0)  # a transport is closed a turn of the event loop later


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


async def until(happened: Callable[[], bool]) -> None:
    """Return when it has; fails if it takes too long."""
    deadline = time.monotonic() + UNTIL_TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
