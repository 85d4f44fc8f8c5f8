"""What servers answer: dialects, streamed completions, calls of tools, and Prometheus' histograms."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from httpx_sse import ServerSentEvent
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

import client
from loadgen.errors import LoadgenError
from loadgen.load.clocks import TurnClock
from loadgen.load.workload import Signals
from loadgen.targets import OpenAITarget, TargetSpec, ToolTarget, connect
from loadgen.targets.base import WITH_SIGNALS, WITH_TOOLS
from loadgen.targets.djinn import Bucket, between, quantile, read_buckets
from loadgen.targets.openai import LlamaCppDecoder, LlamaCppDialect, OpenAIDialect
from loadgen.targets.tools import ToolCallDecoder
from tests.loadgen.stubs import serving
from tests.openai.conftest import MODEL
from tests.openai.reference import save_tiny_model
from tests.serving import serve

LAST: dict[str, Any] = {"content": "", "stop": True, "timings": {"cache_n": 3}}
CHUNKS: tuple[dict[str, Any], ...] = (
    {"content": " you", "tokens": [346], "stop": False, "tokens_predicted": 1, "tokens_evaluated": 4},
    {"content": " going", "tokens": [2045], "stop": False, "tokens_predicted": 2, "tokens_evaluated": 4},
    {**LAST, "tokens": [], "tokens_predicted": 2, "tokens_evaluated": 4},
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
    app.add_api_route("/v1/models", lambda: {"object": "list", "data": [{"id": "model"}]})
    app.add_api_route("/tokenize", lambda: {"tokens": [1, 2]}, methods=["POST"])

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


async def test_servers_are_told_apart_and_one_without_a_tokenizer_cannot_be_measured() -> None:
    assert await dialect_of(llamacpp_stub([])) == LlamaCppDialect()
    assert await dialect_of(plain_stub(tells_ids=True)) == OpenAIDialect("model", {"return_token_ids": True})
    assert await dialect_of(plain_stub(tells_ids=False)) == OpenAIDialect("model")
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


def feed(decoder: Any, *chunks: dict[str, Any]) -> list[bool]:
    """Whether each brings tokens."""
    return [decoder.feed(ServerSentEvent(data=json.dumps(chunk))) for chunk in chunks]


def test_token_ids_are_told_or_not_but_never_some_of_them() -> None:
    """llama.cpp tells no id of a token that ends inside a character."""
    decoder = LlamaCppDecoder()
    feed(decoder, *CHUNKS[1:])
    assert (decoder.token_ids, decoder.text) == ((), " going")


def test_a_completion_of_llamacpp_that_does_not_stop_is_broken_and_an_error_is_told() -> None:
    decoder = LlamaCppDecoder()
    feed(decoder, *CHUNKS[:-1])
    with pytest.raises(client.StreamBroken):
        decoder.cost()
    with pytest.raises(client.APIError, match="Context size has been exceeded"):
        feed(decoder, {"error": {"code": 500, "message": "Context size has been exceeded."}})


BOUNDS = [0.1, 0.2, 0.3, 0.4, 0.5]


def metrics(histogram: str, values: list[float]) -> str:
    registry = CollectorRegistry()
    made = Histogram(histogram, "For this test", ["kind"], buckets=BOUNDS, registry=registry)
    for index, value in enumerate(values):
        made.labels("even" if index % 2 else "odd").observe(value)
    return generate_latest(registry).decode()


def read(values: list[float]) -> list[Bucket]:
    buckets = read_buckets(metrics("signal_seconds", values), "signal_seconds")
    assert buckets is not None
    return buckets


def test_a_quantile_of_what_came_between_two_readings_is_right_to_within_a_bucket() -> None:
    values = [float(value) for value in np.random.default_rng(3).uniform(0, 0.5, 1000)]
    before = [0.45] * 100
    for share in (0.1, 0.5, 0.99):
        found = quantile(between(read(before), read(before + values)), share)
        assert found == pytest.approx(np.quantile(values, share), abs=0.02)


# Agents that call tools and know of nothing but OpenAI's API, on a real server.


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder, max_model_len=4096)
    with serve(model=str(folder), max_model_len=4096, bind_by_prefix=True) as url:
        yield url


async def test_its_session_waits_for_each_call_without_a_word(url: str) -> None:
    target = connect(TargetSpec.parse(f"a={url}#{MODEL}{WITH_TOOLS}"), Signals.ETA)
    assert isinstance(target, ToolTarget)
    assert target.spec.model == MODEL
    await target.prepare(1000)
    agent, costs = target.new_agent(), []
    for text in ("What is there?", "Something. ", "Nothing more."):
        clock = TurnClock()
        costs.append(await agent.run_turn(await target.tokenize(text, False), 90, clock))
        assert 0 < clock.token_times_s[0] <= clock.token_times_s[-1] <= clock.over_s
    await agent.close()
    await target.close()
    async with httpx.AsyncClient(base_url=url) as http:
        [session] = (await http.get("/v1/sessions")).json()["data"]
    assert session["phase"] == "io_wait"
    assert all(40 < cost.completion_tokens < 400 for cost in costs)  # bytes are tokens here
    assert not costs[0].cached_tokens
    for before, after in pairwise(costs):
        assert (after.cached_tokens or 0) > 0.9 * (before.prompt_tokens + before.completion_tokens)


async def test_with_signals_its_agents_say_when_they_come_back(url: str) -> None:
    target = connect(TargetSpec.parse(f"a={url}#{MODEL}{WITH_TOOLS}{WITH_SIGNALS}"), Signals.ETA)
    agent = target.new_agent()
    assert await agent.leave(5) is None  # no session yet
    cost = await agent.run_turn(await target.tokenize("What is that?", False), 90, TurnClock())
    assert cost.resume_ms is not None
    assert cost.resume_ms["prefill"] > 0
    assert await agent.leave(5) == "io_wait"
    assert await agent.come_back() is None  # the server knows
    await agent.close()
    await target.close()


def test_an_answer_that_is_no_call_is_an_error() -> None:
    decoder = ToolCallDecoder()
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    last = {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": usage}
    assert decoder.feed(ServerSentEvent(data=json.dumps({"choices": [{"delta": {"content": "No."}}]})))
    assert not decoder.feed(ServerSentEvent(data=json.dumps(last)))
    assert not decoder.feed(ServerSentEvent(data="[DONE]"))
    with pytest.raises(client.InvalidAnswer, match="ended with length instead of a call"):
        decoder.cost()
