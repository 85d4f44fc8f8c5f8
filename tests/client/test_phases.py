"""What a session says it does."""

from __future__ import annotations

import asyncio

import pytest

import client
from client import Djinn


@pytest.mark.parametrize("resume_in_ms", [None, 20])
def test_around_a_tool_call_the_phase_is_io_wait_and_then_ready(djinn: Djinn, resume_in_ms: float | None) -> None:
    with djinn.sessions.create() as session:
        session.generate(token_ids=[7] * 40, max_tokens=1)
        with session.io_wait(resume_in_ms=resume_in_ms) as change:
            assert change.phase == session.refresh().phase == "io_wait"
            assert change.moving is None or change.moving.bytes > 0
        assert session.refresh().phase == "ready"
        turn = session.generate(token_ids=[8], max_tokens=1)
        assert (session.refresh().phase, turn.usage.tokens_recomputed) == ("compute", 0)


def test_a_tool_that_fails_leaves_the_session_ready(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        with pytest.raises(ZeroDivisionError), session.io_wait(resume_in_ms=60_000):
            raise ZeroDivisionError
        assert session.refresh().phase == "ready"


async def test_a_tool_call_that_is_cancelled_leaves_the_session_ready(server_url: str) -> None:
    async with client.AsyncDjinn(server_url, timeout=30) as djinn, await djinn.sessions.create() as session:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), session.io_wait():
                await asyncio.sleep(60)
        assert (await session.refresh()).phase == "ready"


def test_the_tools_own_error_comes_before_that_of_the_signal(djinn: Djinn) -> None:
    def close_and_fail(session: client.Session) -> None:
        session.close()
        raise ZeroDivisionError

    session = djinn.sessions.create()
    with pytest.raises(ZeroDivisionError), session.io_wait():
        close_and_fail(session)
    session = djinn.sessions.create()
    with pytest.raises(client.NotFound), session.io_wait():
        session.close()


def test_phases_that_are_refused(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        with pytest.raises(client.Unprocessable) as unprocessable:
            session.set_phase("ready", resume_in_ms=5)
        assert unprocessable.value.param == "resume_in_ms"
        with session.stream(prompt="x", max_tokens=400, ignore_eos=True) as stream:
            next(iter(stream))
            with pytest.raises(client.Conflict, match="running"), session.io_wait():
                pytest.fail("a session with a turn in it waits for something else")
