"""A server with known delays: `python -m loadgen.selfcheck.stub`.

It speaks as much of OpenAI's protocol as the load generator needs. Every event of a completion has a fixed time after
the arrival of its request, so that one that is late does not push back those that follow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "stub"
READY_LINE = "the stub listens on port "


class Stub:
    """Answers with the first token after `ttft_s` and each further one `gap_s` later.

    `first_s` and `gaps_s` are what it really did: when it handed over each event, without the way through its socket.
    """

    def __init__(self, ttft_s: float, gap_s: float) -> None:
        self._ttft_s = ttft_s
        self._gap_s = gap_s
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []

    def app(self) -> Starlette:
        """The server."""
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/done", self.done),
            ]
        )

    async def models(self, _request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"data": [{"id": MODEL}]})

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: a token per character."""
        return JSONResponse({"tokens": [ord(character) for character in (await request.json())["prompt"]]})

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        arrived = time.perf_counter()
        body = await request.json()
        if not body.get("stream"):
            return JSONResponse({"choices": [{"text": "a", "token_ids": [97]}]})
        return StreamingResponse(self._events(arrived, body), media_type="text/event-stream")

    async def done(self, _request: Request) -> Response:
        """`GET /done`: what it really did."""
        return JSONResponse({"first_s": self.first_s, "gaps_s": self.gaps_s})

    async def _events(self, arrived: float, body: dict[str, Any]) -> AsyncIterator[bytes]:
        tokens = body["max_tokens"]
        event = _event({"choices": [{"index": 0, "text": " token", "token_ids": [97], "finish_reason": None}]})
        last = arrived
        for number in range(tokens):
            await asyncio.sleep(arrived + self._ttft_s + number * self._gap_s - time.perf_counter())
            now = time.perf_counter()
            (self.gaps_s if number else self.first_s).append(now - last)
            last = now
            yield event
        yield _event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}})
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    return b"data: " + json.dumps(head | content).encode() + b"\n\n"


class _Announced(uvicorn.Server):
    """Prints its port once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        print(f"{READY_LINE}{self.servers[0].sockets[0].getsockname()[1]}", flush=True)


def main() -> int:
    """Serve on a free port of the loopback address until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.selfcheck.stub", description=__doc__)
    parser.add_argument("--ttft", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--gap", type=float, required=True, metavar="SECONDS")
    options = parser.parse_args()
    app = Stub(options.ttft, options.gap).app()
    _Announced(uvicorn.Config(app, port=0, log_level="warning", access_log=False)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
