"""Agents that call tools and know of nothing but OpenAI's API, on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from httpx_sse import ServerSentEvent

from client.errors import InvalidAnswer
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import Signals
from loadgen.targets import DjinnTarget, TargetSpec, ToolTarget, connect
from loadgen.targets.base import WITH_SIGNALS, WITH_TOOLS
from loadgen.targets.tools import ToolCallDecoder
from tests.loadgen.stubs import Flaky, serving
from tests.openai.conftest import MODEL
from tests.openai.reference import save_tiny_model
from tests.serving import serve


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
        assert len(clock.token_times_s) > 20
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
    with pytest.raises(InvalidAnswer, match="ended with length instead of a call"):
        decoder.cost()


async def test_a_turn_begins_when_its_first_request_goes_out_which_opens_its_session(url: str) -> None:
    """What this process takes to make the request is no time of the server's."""
    door, clock = Flaky(url), TurnClock()
    made = clock.started
    await asyncio.sleep(0.1)
    with serving(door) as address:
        target = DjinnTarget(TargetSpec("djinn", address), Signals.NONE)
        agent = target.new_agent()
        await agent.run_turn((1, 2), 2, clock)
        await agent.close()
        await target.close()
    [opened] = [at for path, at in door.seen if path == "/v1/sessions"]
    assert made + 0.1 <= clock.started <= opened < clock.started + clock.token_times_s[0]
