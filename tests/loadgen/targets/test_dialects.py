"""Servers are recognised by what they answer, not by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI
from httpx_sse import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

import client
from loadgen.errors import LoadgenError
from loadgen.load.turn_clock import TurnClock
from loadgen.targets import OpenAITarget, TargetSpec
from loadgen.targets.dialects import LlamaCppDialect, OpenAIDialect
from loadgen.targets.llamacpp_completion import LlamaCppDecoder
from tests.loadgen.stubs import serving

CHUNKS: tuple[dict[str, Any], ...] = (
    {"index": 0, "content": " you", "tokens": [346], "stop": False, "tokens_predicted": 1, "tokens_evaluated": 4},
    {"index": 0, "content": " going", "tokens": [2045], "stop": False, "tokens_predicted": 2, "tokens_evaluated": 4},
    {
        "index": 0,
        "content": "",
        "tokens": [],
        "stop": True,
        "tokens_predicted": 2,
        "tokens_evaluated": 4,
        "stop_type": "limit",
        "timings": {"cache_n": 3, "prompt_n": 1, "predicted_n": 2},
    },
)
"""As llama.cpp's server wrote them, less what nobody needs here."""


def llamacpp_stub(asked: list[dict[str, Any]]) -> FastAPI:
    """The answers of llama.cpp's server, which takes any field: `asked` gets what it was asked."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "model", "owned_by": "llamacpp"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return {"tokens": list((await request.json()).get("content", "").encode())}

    @app.post("/completion")
    async def complete(request: Request) -> StreamingResponse:
        asked.append(await request.json())
        return StreamingResponse((f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS), media_type="text/event-stream")

    return app


def plain_stub(*, tells_ids: bool) -> FastAPI:
    """A server with vLLM's `/tokenize`, that refuses to tell ids unless `tells_ids`."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "model"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return {"tokens": list((await request.json())["prompt"].encode())}

    @app.post("/v1/completions")
    async def complete(request: Request) -> JSONResponse:
        refused = "return_token_ids" in await request.json() and not tells_ids
        return JSONResponse({"error": {"message": "unknown field"}}, 400 if refused else 200)

    return app


async def dialect_of(app: FastAPI) -> object:
    with serving(app) as url:
        target = OpenAITarget(TargetSpec("peer", url, "model"), "model")
        try:
            await target.prepare(1)
        finally:
            await target.close()
    return target.dialect


async def test_servers_are_told_apart() -> None:
    assert await dialect_of(llamacpp_stub([])) == LlamaCppDialect()
    assert await dialect_of(plain_stub(tells_ids=True)) == OpenAIDialect("model", {"return_token_ids": True})
    assert await dialect_of(plain_stub(tells_ids=False)) == OpenAIDialect("model")


async def test_a_server_without_a_tokenizer_cannot_be_measured() -> None:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "model"}]})
    with pytest.raises(LoadgenError, match=r"target peer has no /tokenize as vLLM or llama\.cpp have it"):
        await dialect_of(app)


async def test_a_conversation_with_llamacpp_is_exact() -> None:
    """The second turn sends the ids of the first's answer, as they were told."""
    asked: list[dict[str, Any]] = []
    with serving(llamacpp_stub(asked)) as url:
        target = OpenAITarget(TargetSpec("llamacpp", url, "model"), "model")
        await target.prepare(1)
        assert await target.tokenize("Hi", True) == tuple(b"Hi")
        agent, clock = target.new_agent(), TurnClock()
        cost = await agent.run_turn((1, 2), 2, clock)
        await agent.run_turn((3,), 2, TurnClock())
        await agent.close()
        await target.close()
    assert (cost.prompt_tokens, cost.completion_tokens, cost.cached_tokens) == (4, 2, 3)
    assert len(clock.token_times_s) == 2
    assert [body["prompt"] for body in asked] == [[1, 2], [1, 2, 346, 2045, 3]]
    assert all(body["n_predict"] == 2 and body["ignore_eos"] and body["stream"] for body in asked)


def feed(*chunks: dict[str, Any]) -> LlamaCppDecoder:
    decoder = LlamaCppDecoder()
    for chunk in chunks:
        decoder.feed(ServerSentEvent(data=json.dumps(chunk)))
    return decoder


def test_token_ids_are_told_or_not_but_never_some_of_them() -> None:
    """llama.cpp tells no id of a token that ends inside a character."""
    assert feed(*CHUNKS).token_ids == (346, 2045)
    decoder = feed(*CHUNKS[1:])
    assert decoder.token_ids == ()
    assert decoder.text == " going"


def test_a_completion_that_does_not_stop_is_broken() -> None:
    with pytest.raises(client.StreamBroken):
        feed(*CHUNKS[:-1]).cost()


def test_an_error_in_the_stream() -> None:
    error = {"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}
    with pytest.raises(client.APIError, match="Context size has been exceeded"):
        feed(CHUNKS[0], error)
