"""Turns that end otherwise than by themselves: cancelled, left, closed, read slowly, overtaken, broken."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from app.bridge.turn import Turn
from app.domain.values import SamplingParams, StopRule, Ticket
from app.main import load_app
from app.messages import Paused, TurnFinished
from app.routers.dependencies import Services
from app.routers.turn_answer import turn_events
from app.sessions.guards.side_work import Lane
from app.text.generation import TextChunk
from app.text.turn_reader import TextRule, TurnReader
from tests.errors import assert_error
from tests.routers.generating import PROMPT, streaming, wait_until_idle
from tests.serving import tiny_settings
from tests.taking_turns import start_turn


def test_cancel_ends_the_stream_and_keeps_what_was_generated(http: httpx.Client, session: str) -> None:
    with streaming(http, session, **PROMPT, max_tokens=900) as stream:
        next(stream)
        cancelled = http.post(f"{session}/cancel").json()
        assert cancelled["state"] == "idle"
        *_, last = stream
    turn = last.json()
    assert last.event == "finished"
    assert turn["finish_reason"] == "cancelled"
    assert cancelled["tokens"] == 4 + len(turn["token_ids"]) < 904


def test_a_client_that_leaves_a_stream_cancels_its_turn(http: httpx.Client, session: str) -> None:
    with streaming(http, session, **PROMPT, max_tokens=1000) as stream:
        next(stream)
    assert wait_until_idle(http, session)["tokens"] < 1004


def test_a_client_that_leaves_a_whole_answer_cancels_its_turn(http: httpx.Client, session: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post(f"{session}/generate", json={**PROMPT, "max_tokens": 1000}, timeout=0.05)
    assert wait_until_idle(http, session)["tokens"] < 1004


def test_a_session_that_is_closed_ends_its_stream(http: httpx.Client, session: str) -> None:
    with streaming(http, session, **PROMPT, max_tokens=900) as stream:
        next(stream)
        assert http.delete(session).status_code == 204
        *_, last = stream
    assert last.json()["finish_reason"] == "cancelled"


def test_a_slow_reader_loses_nothing(http: httpx.Client, session: str) -> None:
    with streaming(http, session, **PROMPT, max_tokens=300, logprobs=20) as stream:
        events = [next(stream)]
        wait_until_idle(http, session)
        events += list(stream)
    last = events.pop().json()
    assert [token for event in events for token in event.json()["token_ids"]] == last["token_ids"]
    assert len(last["token_ids"]) == 300


async def test_a_turn_is_refused_if_the_history_changes_while_its_text_waits_to_be_encoded() -> None:
    app = load_app(tiny_settings())
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), AsyncExitStack() as ends:
        services: Services = app.state.services
        http = await ends.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
        path = f"/v1/sessions/{(session := services.sessions.create()).id}/generate"
        async with AsyncExitStack() as places:
            for _ in range(max(1, (os.cpu_count() or 1) // 2)):
                await places.enter_async_context(services.side_work.turn(None, Lane.TEXT))
            late = asyncio.create_task(http.post(path, json={"prompt": "late", "max_tokens": 1}))
            await asyncio.sleep(0.1)
            other = start_turn(services.sessions, session, [5, 6], SamplingParams(seed=0), StopRule(max_tokens=1))
            await other.ended.wait()
        assert "changed" in assert_error(await late, 409, "wrong_state")
        assert len(session.history) == 3


async def test_a_bug_in_a_stream_is_an_error_event_and_a_log_entry(
    caplog: pytest.LogCaptureFixture, services: Services
) -> None:
    class Broken(TurnReader):
        async def __aiter__(self) -> AsyncIterator[TextChunk | Paused | TurnFinished]:
            yield TextChunk("a", (1,))
            raise RuntimeError("the password is swordfish")

    session = services.sessions.create()
    reader = Broken(Turn(Ticket(0)), services.tokens, TextRule(), lambda keep: None, lambda: asyncio.sleep(0))
    *_, last = [event async for event in turn_events(session, reader)]
    assert last.startswith(b"event: error\n")
    assert b"internal_error" in last
    assert b"swordfish" not in last
    assert "swordfish" in caplog.text
