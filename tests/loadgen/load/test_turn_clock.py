"""A turn's clock starts when its first request goes out: what it takes to make it is no time of the server's."""

from __future__ import annotations

import time
from typing import Any

import pytest

import client
from client import edge, transport
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import Signals
from loadgen.targets import DjinnTarget, OpenAITarget, TargetSpec

MAKING_S = 0.2


@pytest.fixture
def slow_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests take long to make."""
    make = edge.to_request

    def make_slowly(*arguments: Any) -> Any:
        time.sleep(MAKING_S)
        return make(*arguments)

    monkeypatch.setattr(transport, "to_request", make_slowly)


@pytest.mark.usefixtures("slow_making")
async def test_making_a_request_is_not_on_the_clock(server_url: str) -> None:
    with client.Djinn(server_url) as djinn:
        [model] = djinn.models()
    target = OpenAITarget(TargetSpec("djinn", server_url, model.id), model.id)
    await target.prepare(1)
    agent = target.new_agent()
    for _ in range(2):  # with a new connection, and with one that is there
        clock, handed_over = TurnClock(), time.perf_counter()
        await agent.run_turn((1, 2), 2, clock)
        assert clock.started - handed_over > MAKING_S
    await agent.close()
    await target.close()


async def test_opening_a_session_is(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[float] = []
    send = transport.AsyncTransport.send

    async def send_and_note(self: transport.AsyncTransport, call: Any) -> Any:
        answer = await send(self, call)
        answered.append(time.perf_counter())
        return answer

    monkeypatch.setattr(transport.AsyncTransport, "send", send_and_note)
    target, clock = DjinnTarget(TargetSpec("djinn", server_url), Signals.NONE), TurnClock()
    agent = target.new_agent()
    await agent.run_turn((1, 2), 2, clock)
    await agent.close()
    await target.close()
    assert clock.started < answered[0] < clock.started + clock.token_times_s[0]
