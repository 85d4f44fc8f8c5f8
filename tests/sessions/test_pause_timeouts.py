"""A pause that nobody ends is ended by its timeout."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from app.domain.breakpoints import OnTimeout, Until
from app.domain.values import SessionState
from app.messages import Paused
from app.routers.dependencies import Services
from tests.pausing import EACH_TOKEN, PROMPT, PROMPT_END, paused, read, whole
from tests.taking_turns import engine_tokens, until

BRIEF = 0.1


async def test_a_turn_that_nobody_resumes_goes_on_by_itself_stop_strings_and_all(services: Services) -> None:
    registry = services.sessions
    text = (await whole(registry, tokens=12)).text
    expected = await whole(registry, text[5:8], tokens=12)
    brief = replace(PROMPT_END, timeout_s=BRIEF)
    session, reader = await paused(registry, text[5:8], breakpoint=brief, tokens=12)
    registry.ends.release(session, reader.turn)
    await until(lambda: session.state is SessionState.IDLE)
    assert session.history[len(PROMPT) :].tolist() == expected.token_ids
    assert len(session.history) == await engine_tokens(registry, session)


async def test_a_turn_that_nobody_resumes_goes_on_to_its_next_pause_which_ends_too(services: Services) -> None:
    registry = services.sessions
    session, reader = await paused(registry, breakpoint=replace(EACH_TOKEN, timeout_s=BRIEF), tokens=5)
    registry.ends.release(session, reader.turn)
    await until(lambda: session.state is SessionState.IDLE)
    assert len(session.history) == len(PROMPT) + 5


async def test_a_pause_may_end_the_turn_when_its_time_is_over(services: Services) -> None:
    registry = services.sessions
    abort = replace(EACH_TOKEN, timeout_s=BRIEF, on_timeout=OnTimeout.ABORT)
    session, reader = await paused(registry, breakpoint=abort)
    await asyncio.wait_for(reader.turn.ended.wait(), 60)
    assert session.state is SessionState.IDLE
    assert len(session.history) == await engine_tokens(registry, session) == len(PROMPT) + 1


async def test_each_pause_has_its_own_time_and_one_made_by_until_that_of_the_one_before(services: Services) -> None:
    registry = services.sessions
    brief = replace(EACH_TOKEN, timeout_s=1.0, on_timeout=OnTimeout.ABORT, once=True)
    session, reader = await paused(registry, breakpoint=brief, tokens=5)
    assert session.breakpoints == {}
    for _ in range(3):
        await asyncio.sleep(0.4)
        assert session.pause is not None
        before = session.pause.expires_at
        registry.pauses.resume(session, Until(next_token=True))
        end = await read(reader)
        assert isinstance(end, Paused)
        assert end.checkpoint.breakpoint is None
        assert session.pause is not None
        assert session.pause.expires_at > before + 0.35
    await asyncio.wait_for(reader.turn.ended.wait(), 60)
    assert len(session.history) == len(PROMPT) + 4


async def test_a_forks_pause_has_a_time_of_its_own(services: Services) -> None:
    registry = services.sessions
    abort = replace(EACH_TOKEN, timeout_s=1.0, on_timeout=OnTimeout.ABORT)
    parent, _ = await paused(registry, breakpoint=abort)
    await asyncio.sleep(0.5)
    child = await registry.fork(parent)
    await until(lambda: parent.state is SessionState.IDLE)
    assert child.state is SessionState.PAUSED
    await until(lambda: child.state is SessionState.IDLE)
