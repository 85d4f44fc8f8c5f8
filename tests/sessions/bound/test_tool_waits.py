"""Sessions that wait for tools without a word of their clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def waits(services: Services, clock: Clock) -> ToolWaits:
    return ToolWaits(services.sessions, clock=clock)


async def test_a_session_that_waits_for_a_tool_is_in_io_wait_until_its_next_turn(
    services: Services, waits: ToolWaits
) -> None:
    registry = services.sessions
    session = registry.create()
    await finish(start_turn(registry, session, PROMPT, GREEDY, StopRule(max_tokens=4)))
    waits.begin(session, ["search"])
    waiting = session.phase
    waits.end(session)
    await finish(start_turn(registry, session, PROMPT, GREEDY, StopRule(max_tokens=4)))
    assert (waiting, session.phase) == (Phase.IO_WAIT, Phase.COMPUTE)


async def test_the_time_of_return_is_learned_by_session_and_tool(
    services: Services, waits: ToolWaits, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = services.sessions
    told: list[float | None] = []
    set_phase = registry.set_phase

    def note(session: Session, phase: Phase, resume_in_ms: float | None = None) -> None:
        told.append(resume_in_ms)
        set_phase(session, phase, resume_in_ms)

    monkeypatch.setattr(registry, "set_phase", note)
    mine, other, strange = registry.create("me"), registry.create("me"), registry.create("you")

    def wait(session: Session, seconds: float, *tools: str) -> None:
        waits.begin(session, tools)
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


async def test_a_session_that_is_busy_again_is_left_alone(services: Services, waits: ToolWaits) -> None:
    registry = services.sessions
    session = registry.create()
    turn = start_turn(registry, session, PROMPT, GREEDY, LONG)
    waits.begin(session, ["search"])
    assert session.state is SessionState.QUEUED
    assert session.phase is Phase.COMPUTE
    registry.ends.release(session, turn)
