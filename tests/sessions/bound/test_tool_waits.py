"""Sessions that wait for tools without a word of their clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bridge.turn import Turn
from app.domain.breakpoints import Action, Breakpoint
from app.domain.errors import WrongState
from app.domain.values import Phase, SessionState, StopRule
from app.routers.dependencies import Services
from app.sessions.bound.tool_waits import MAX_TOOLS, WINDOW, ToolTimes, ToolWaits
from app.sessions.session import Session
from tests.taking_turns import GREEDY, LONG, PROMPT, finish, start_turn


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40))
def test_nearly_all_waits_are_longer_than_is_expected(waits: list[float]) -> None:
    times = ToolTimes()
    for seconds in waits:
        times.note("search", seconds)
    expected = times.expect("search")
    assert expected is not None
    last = waits[-WINDOW:]
    assert min(last) <= expected <= max(last)
    assert sum(seconds >= expected for seconds in last) >= 0.8 * len(last)


def test_an_unknown_tool_has_no_expected_time_and_names_without_end_take_no_room() -> None:
    times = ToolTimes()
    assert times.expect("search") is None
    times.note("first", 1)
    for number in range(MAX_TOOLS):
        times.note(f"tool-{number}", 1)
    assert times.expect("first") is None
    assert times.expect("tool-0") == 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


def expected_ms(session: Session) -> float | None:
    """In how many ms the engine expects the session back."""
    assert session.phase is Phase.IO_WAIT
    return None if session.returns_at is None else 1000 * (session.returns_at - time.time())


def about(ms: float) -> Any:
    return pytest.approx(ms, abs=200)


async def answer(services: Services, session: Session) -> Turn:
    """A turn that has ended."""
    turn = start_turn(services.sessions, session, PROMPT, GREEDY, StopRule(max_tokens=4))
    await finish(turn)
    return turn


async def test_a_wait_ends_with_any_turn_but_one_that_is_refused(services: Services) -> None:
    registry = services.sessions
    session = registry.create()
    turn = await answer(services, session)
    services.tool_waits.begin(registry, session, turn, ["search"])
    assert expected_ms(session) is None
    await registry.breakpoints.arm(session, Breakpoint("bp_pause", (0,), Action.PAUSE))
    with pytest.raises(WrongState):
        start_turn(registry, session, PROMPT, GREEDY, LONG, pausable=False)
    await registry.breakpoints.disarm(session, "bp_pause")
    assert session.phase is Phase.IO_WAIT
    await asyncio.sleep(0.3)
    turn = await answer(services, session)
    services.tool_waits.begin(registry, session, turn, ["search"])
    found = expected_ms(session)
    assert found is not None
    assert found >= 250


async def test_an_answer_that_is_read_after_the_next_turn_parks_nothing(services: Services) -> None:
    session = services.sessions.create()
    late = await answer(services, session)
    last = await answer(services, session)
    services.tool_waits.begin(services.sessions, session, late, ["search"])
    phases = [session.phase]
    services.tool_waits.begin(services.sessions, session, last, ["search"])
    assert [*phases, session.phase] == [Phase.COMPUTE, Phase.IO_WAIT]


async def test_the_time_of_return_is_learned_by_session_and_tool(services: Services, clock: Clock) -> None:
    registry = services.sessions
    waits = ToolWaits(clock=clock)
    mine, other, strange = registry.create("me"), registry.create("me"), registry.create("you")
    turns = {session: await answer(services, session) for session in (mine, other, strange)}

    def wait(session: Session, seconds: float, *tools: str) -> float | None:
        waits.begin(registry, session, turns[session], tools)
        expected = expected_ms(session)
        clock.now += seconds
        waits.end(session)
        return expected

    assert [wait(mine, 12.0, "search"), wait(mine, 3.0, "add")] == [None, None]
    assert wait(mine, 1.0, "search") == about(12_000)
    assert wait(mine, 5.0, "search", "add") == about(3000), "the slower of 1 and 3"
    assert wait(other, 40.0, "search") == about(1000), "from the owner's other session"
    assert wait(other, 40.0, "search") == about(40_000), "its own is better"
    assert wait(strange, 1.0, "search") is None


async def test_a_session_that_is_busy_again_is_left_alone(services: Services) -> None:
    registry = services.sessions
    session = registry.create()
    turn = start_turn(registry, session, PROMPT, GREEDY, LONG)
    services.tool_waits.begin(registry, session, turn, ["search"])
    assert session.state is SessionState.QUEUED
    assert session.phase is Phase.COMPUTE
    registry.ends.release(session, turn)


async def test_what_was_learned_goes_with_the_session(services: Services, clock: Clock) -> None:
    registry = services.sessions
    here, there = ToolWaits(clock=clock), ToolWaits(clock=clock)
    session = registry.create("me")
    turn = await answer(services, session)
    assert here.export(session) is None
    here.begin(registry, session, turn, ["search"])
    clock.now += 7.0
    here.end(session)
    here.begin(registry, session, turn, ["search"])
    sent = here.export(session)
    assert sent is not None
    there.adopt(session, sent)
    clock.now += 9.0
    there.end(session)
    there.begin(registry, session, turn, ["search"])
    assert expected_ms(session) == about(7000)
    learned = there.export(session)
    assert learned is not None
    assert learned.times["search"] == pytest.approx([7.0, 9.0], abs=0.5)


async def test_a_session_that_leaves_is_told_nothing(services: Services) -> None:
    session = services.sessions.create()
    turn = await answer(services, session)
    session.leaving = True
    services.tool_waits.begin(services.sessions, session, turn, ["search"])
    assert session.phase is Phase.COMPUTE
