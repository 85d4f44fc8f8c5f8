"""Sessions that wait for tools without a word of their clients."""

from __future__ import annotations

import asyncio

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


@pytest.fixture
def told(services: Services, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """When the engine expects each session that waits, in ms."""
    times: list[float | None] = []
    set_phase = services.sessions.set_phase

    def note(session: Session, phase: Phase, resume_in_ms: float | None = None) -> None:
        times.append(resume_in_ms)
        set_phase(session, phase, resume_in_ms)

    monkeypatch.setattr(services.sessions, "set_phase", note)
    return times


async def answer(services: Services, session: Session) -> Turn:
    """A turn that has ended."""
    turn = start_turn(services.sessions, session, PROMPT, GREEDY, StopRule(max_tokens=4))
    await finish(turn)
    return turn


async def test_a_session_that_waits_for_a_tool_is_in_io_wait_until_its_next_turn(services: Services) -> None:
    session = services.sessions.create()
    turn = await answer(services, session)
    services.tool_waits.begin(services.sessions, session, turn, ["search"])
    waiting = session.phase
    await answer(services, session)
    assert (waiting, session.phase) == (Phase.IO_WAIT, Phase.COMPUTE)


async def test_any_turn_of_the_session_ends_its_wait(services: Services, told: list[float | None]) -> None:
    session = services.sessions.create()
    turn = await answer(services, session)
    for _ in range(2):
        services.tool_waits.begin(services.sessions, session, turn, ["search"])
        turn = await answer(services, session)
    unknown, expected = told
    assert unknown is None
    assert expected is not None


async def test_a_turn_that_is_refused_leaves_the_wait_as_it_is(services: Services, told: list[float | None]) -> None:
    registry = services.sessions
    session = registry.create()
    turn = await answer(services, session)
    services.tool_waits.begin(registry, session, turn, ["search"])
    await registry.breakpoints.arm(session, Breakpoint("bp_pause", (0,), Action.PAUSE))
    with pytest.raises(WrongState):
        start_turn(registry, session, PROMPT, GREEDY, LONG, pausable=False)
    await registry.breakpoints.disarm(session, "bp_pause")
    assert session.phase is Phase.IO_WAIT
    await asyncio.sleep(0.3)
    turn = await answer(services, session)
    services.tool_waits.begin(registry, session, turn, ["search"])
    assert told[-1] is not None
    assert told[-1] >= 300


async def test_an_answer_that_is_read_after_the_next_turn_parks_nothing(
    services: Services, told: list[float | None]
) -> None:
    session = services.sessions.create()
    late = await answer(services, session)
    last = await answer(services, session)
    services.tool_waits.begin(services.sessions, session, late, ["search"])
    assert told == []
    phases = [session.phase]
    services.tool_waits.begin(services.sessions, session, last, ["search"])
    assert [*phases, session.phase] == [Phase.COMPUTE, Phase.IO_WAIT]


async def test_the_time_of_return_is_learned_by_session_and_tool(
    services: Services, clock: Clock, told: list[float | None]
) -> None:
    registry = services.sessions
    waits = ToolWaits(clock=clock)
    mine, other, strange = registry.create("me"), registry.create("me"), registry.create("you")
    turns = {session: await answer(services, session) for session in (mine, other, strange)}

    def wait(session: Session, seconds: float, *tools: str) -> None:
        waits.begin(registry, session, turns[session], tools)
        clock.now += seconds
        waits.end(session)

    wait(mine, 12.0, "search")
    wait(mine, 3.0, "add")
    wait(mine, 1.0, "search")
    assert told == [None, None, 12000.0]
    wait(mine, 5.0, "search", "add")
    assert told[-1] == 3000.0  # the slower of 1 and 3
    wait(other, 40.0, "search")
    assert told[-1] == 1000.0  # from the owner's other session
    wait(other, 40.0, "search")
    assert told[-1] == 40000.0  # its own is better
    wait(strange, 1.0, "search")
    assert told[-1] is None


async def test_a_session_that_is_busy_again_is_left_alone(services: Services) -> None:
    registry = services.sessions
    session = registry.create()
    turn = start_turn(registry, session, PROMPT, GREEDY, LONG)
    services.tool_waits.begin(registry, session, turn, ["search"])
    assert session.state is SessionState.QUEUED
    assert session.phase is Phase.COMPUTE
    registry.ends.release(session, turn)


async def test_what_was_learned_goes_with_the_session(
    services: Services, clock: Clock, told: list[float | None]
) -> None:
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
    assert told == [None, 7000.0, 7000.0]
    learned = there.export(session)
    assert learned is not None
    assert learned.times["search"] == pytest.approx([7.0, 9.0], abs=0.5)


async def test_a_session_that_leaves_is_told_nothing(services: Services) -> None:
    session = services.sessions.create()
    turn = await answer(services, session)
    session.leaving = True
    services.tool_waits.begin(services.sessions, session, turn, ["search"])
    assert session.phase is Phase.COMPUTE
