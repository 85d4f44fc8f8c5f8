"""Calls that belong to a session by the history that they continue, and sessions that wait for tools."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.breakpoints import Action, Breakpoint
from app.domain.errors import Moving, NameTaken, SessionLimit, WrongState
from app.domain.values import Phase, SessionState, StopRule
from app.engine_process.turn import Turn
from app.routers.dependencies import Services
from app.sessions.session import OF_RESPONSES, UNNAMED, Session
from app.sessions.tool_waits import ENOUGH, WINDOW, ToolWaits, expected_wait, note_wait
from tests.serving import running_services
from tests.taking_turns import GREEDY, LONG, PROMPT, finish, start_turn
from tests.tenants.tenant_files import Clock

EIGHT = StopRule(max_tokens=8, min_tokens=8)
HINT = {"client_session": "one"}


async def spoken(
    services: Services,
    context: list[int],
    *,
    name: str | None = None,
    owner: str = "me",
    turns: int = 1,
    said: dict[str, str] | None = None,
) -> Session:
    """A bound session whose first call, and `turns` of eight tokens, are over."""
    bound = services.bound_sessions
    async with AsyncExitStack() as call:
        if name is None:
            session = bound.open_unnamed(owner, call, metadata=said or {})
        else:
            session = bound.open("me", name, metadata=said or {})
        await finish(start_turn(services.sessions, session, context, GREEDY, EIGHT))
    for _ in range(turns - 1):
        await finish(start_turn(services.sessions, session, [], GREEDY, EIGHT))
    return session


def continued(services: Services, prompt: Iterable[int], owner: str = "me", **labels: str) -> Session | None:
    return services.bound_sessions.find_continued(owner, list(prompt), labels)


async def test_a_prompt_is_bound_to_the_longest_history_that_it_continues(services: Services) -> None:
    bound = services.bound_sessions
    system = list(range(3, 43))
    short = await spoken(services, [*system, 50])
    await spoken(services, [*system, 60])
    long = await spoken(services, [*short.history, 51])
    assert continued(services, [*short.history, 70]) is short
    assert continued(services, [*long.history, 70]) is long
    assert continued(services, [*long.history, 70], "you") is None
    assert continued(services, [*system, 50]) is short, "it has answered that"
    named = await spoken(services, [*long.history, 52], name="agent")
    assert continued(services, [*named.history, 70]) is not named
    theirs = bound.open("you", "agent", metadata={})
    assert [bound.find(owner, "agent") for owner in ("me", "you")] == [named, theirs]


async def test_of_equal_histories_that_with_the_calls_hints_is_continued(services: Services) -> None:
    context = list(range(3, 43))
    first, second = [await spoken(services, context, said={"client_session": name}) for name in ("one", "two")]
    assert first.history == second.history
    prompt = [*first.history, 70]
    assert [continued(services, prompt, client_session=name) for name in ("one", "two")] == [first, second]
    assert continued(services, prompt, client_session="three") in (first, second), "the history is what binds"
    assert continued(services, range(80, 120), **HINT) is None, "hints alone bind nothing"


async def test_a_conversation_takes_its_session_back_from_side_calls(services: Services) -> None:
    session = await spoken(services, list(range(3, 43)), said=HINT)
    history = session.history.tolist()
    for aside in (80, 81):
        assert continued(services, [*history, aside, aside], **HINT) is session
        prompt = [*history, aside, aside]
        await finish(start_turn(services.sessions, session, prompt, GREEDY, EIGHT, replace=True))
    assert continued(services, [*history, 70], client_session="two") is None, "a subagent's is another"
    assert continued(services, history[:45], **HINT) is None
    assert continued(services, [*history, 70], **HINT) is session


async def test_a_session_of_one_call_is_worth_no_more_than_a_cached_prefix(tmp_path: Path) -> None:
    async with running_services(state_dir=tmp_path) as services:
        once, twice = [await spoken(services, list(range(first, first + 40))) for first in (3, 60)]
        assert (await services.sessions.memory()).device.owned_bytes == 0
        assert continued(services, [*twice.history, 70]) is twice
        prompt = [*twice.history, 70]
        last = await finish(start_turn(services.sessions, twice, prompt, GREEDY, EIGHT, replace=True))
        assert (last.usage.cached_tokens, last.usage.tokens_recomputed) == (32, 0)
        async with AsyncExitStack() as call:
            parked = services.bound_sessions.open_unnamed("me", call, metadata={})
            turn = start_turn(services.sessions, parked, PROMPT, GREEDY, EIGHT)
            await finish(turn)
            services.sessions.wait_for_tools(parked, turn, ["search"])
        for session in (twice, parked):
            await services.sessions.keeper.settled(session)
        assert once.ephemeral
    async with running_services(state_dir=tmp_path) as services:
        assert [each.id for each in services.sessions.table] == [twice.id, parked.id]


async def test_only_so_many_sessions_of_one_call_stay(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.sessions.named.MOST_ONCE", 3)
    monkeypatch.setattr("app.sessions.named.MOST_ONCE_TOKENS", 100)
    continued_one = await spoken(services, list(range(3, 43)), turns=2)
    theirs = await spoken(services, [3, 4], owner="you")
    small = [await spoken(services, [3, 4, 5 + number]) for number in range(4)]
    left = [*[SessionState.CLOSED] * 2, *[SessionState.IDLE] * 2]
    assert [each.state for each in small] == left
    large = await spoken(services, list(range(3, 83)))
    assert [each.state for each in (*small, large)] == [*[SessionState.CLOSED] * 4, SessionState.IDLE]
    assert [each.state for each in (continued_one, theirs)] == [SessionState.IDLE] * 2


async def test_a_first_call_whose_client_goes_leaves_no_session(services: Services) -> None:
    async with AsyncExitStack() as call:
        session = services.bound_sessions.open_unnamed("me", call, metadata={})
        start_turn(services.sessions, session, PROMPT, GREEDY, LONG)
    assert session.state is SessionState.CLOSED


async def test_an_unnamed_session_gives_way_before_kept_responses() -> None:
    async with running_services(max_sessions=2) as services:
        kept = services.sessions.create("me", name=OF_RESPONSES)
        unnamed = await spoken(services, PROMPT)
        services.sessions.create("me")
        assert [each.state for each in (kept, unnamed)] == [SessionState.IDLE, SessionState.CLOSED]


async def test_a_prompt_that_only_begins_alike_is_not(services: Services) -> None:
    system = list(range(3, 43))
    session = await spoken(services, [*system, 50])
    context = session.prompt_tokens
    assert continued(services, [*system, 51, *range(60, 90)]) is None
    assert continued(services, session.history[: context - 1].tolist()) is None
    other_reply = [(token + 1) % 256 for token in session.history[context:]]
    assert continued(services, [*session.history[:context], *other_reply, 70]) is None


async def test_a_reply_that_comes_back_in_other_tokens_is_recognised(services: Services) -> None:
    session = await spoken(services, list(range(3, 43)))
    retold = [*session.history[:-2], 1, 1, 1, 1]
    assert continued(services, retold) is session


async def test_after_a_restart_a_session_is_not_a_strangers_with_the_same_system_prompt(tmp_path: Path) -> None:
    system = list(range(3, 43))
    async with running_services(state_dir=tmp_path) as services:
        before = await spoken(services, [*system, 50], turns=2)
        history = before.history.tolist()
        await services.sessions.keeper.settled(before)
    async with running_services(state_dir=tmp_path) as services:
        restored = services.sessions.table.get(before.id, "me")
        assert restored.history.tolist() == history
        assert continued(services, [*system, *range(60, 90)]) is None
        await finish(start_turn(services.sessions, restored, [70], GREEDY, StopRule(max_tokens=8, min_tokens=8)))
        assert continued(services, [*system, *range(60, 90)]) is None
        assert continued(services, [*restored.history, 71]) is restored


async def test_a_session_that_would_pause_is_not_found_until_its_breakpoint_is_gone(services: Services) -> None:
    whitebox = services.sessions.whitebox
    session = await spoken(services, list(range(3, 43)))
    pause = Breakpoint("bp_pause", (0,), Action.PAUSE)
    await whitebox.arm(session, pause)
    assert continued(services, [*session.history, 70]) is None
    await whitebox.disarm(session, pause.id)
    assert continued(services, [*session.history, 70]) is session


@pytest.mark.parametrize("phase", [Phase.IO_WAIT, Phase.READY])
async def test_an_agent_that_is_coming_back_gives_way_last(phase: Phase) -> None:
    async with running_services(max_sessions=3) as services:
        waiting, younger, gone = [await spoken(services, [3, 4, 5 + number]) for number in range(3)]
        services.sessions.set_phase(waiting, phase)
        services.sessions.set_phase(gone, Phase.IDLE)
        for left in ([waiting, gone], [waiting], []):
            services.sessions.create()
            assert [each for each in (waiting, younger, gone) if each.state is SessionState.IDLE] == left


async def test_a_session_stays_while_a_request_is_at_it_and_is_found_all_the_same() -> None:
    async with running_services(max_sessions=1) as services:
        session = await spoken(services, list(range(3, 43)))
        with services.sessions.table.using(session.id, "me"):
            with pytest.raises(SessionLimit):
                services.sessions.create()
            assert continued(services, [*session.history, 70]) is session
        services.sessions.create()
        assert session.state is SessionState.CLOSED


async def test_nobody_gives_way_unless_that_makes_room_enough() -> None:
    async with running_services(max_sessions=3) as services:
        named = services.bound_sessions.open("me", "agent", metadata={})
        call = AsyncExitStack()
        unnamed = [services.bound_sessions.open_unnamed("me", call, metadata={}) for _ in range(2)]
        with pytest.raises(SessionLimit):
            services.sessions.make_room(None, 3)
        assert [each.state for each in (named, *unnamed)] == [SessionState.IDLE] * 3
        services.sessions.make_room(None, 2)
        assert services.sessions.table.page("me", limit=9) == [named]


async def test_unnamed_sessions_from_before_a_restart_give_way_to_a_lower_limit(tmp_path: Path) -> None:
    async with running_services(state_dir=tmp_path) as services:
        for number in range(3):
            await spoken(services, [3, 4, 5 + number], turns=2)
        named = await spoken(services, [6, 7, 8], name="by-prefix-mine")
        await services.sessions.keeper.settled(named)
    async with running_services(state_dir=tmp_path, max_sessions=2) as services:
        created = services.sessions.create("me")
        with pytest.raises(SessionLimit):
            services.sessions.create("me")
        assert [each.id for each in services.sessions.table.page("me", limit=9)] == [named.id, created.id]
        assert continued(services, [*named.history, 70]) is None


async def test_a_name_that_is_on_its_way_here_opens_no_session(services: Services) -> None:
    bound = services.bound_sessions
    coming = Session(services.sessions.new_id(), "me", name="agent")
    with bound.expecting(coming):
        with pytest.raises(Moving):
            bound.find("me", "agent")
        assert bound.find("you", "agent") is None
        with pytest.raises(NameTaken), bound.expecting(coming):
            pass
    assert bound.find("me", "agent") is None
    opened = await spoken(services, [3, 4, 5], name="agent")
    with pytest.raises(NameTaken), bound.expecting(coming):
        pass
    services.sessions.drop(opened)
    with bound.expecting(coming), bound.expecting(replace(coming, name=UNNAMED)):
        pass


async def test_a_session_that_leaves_is_not_continued_and_gives_way_to_nobody() -> None:
    async with running_services(max_sessions=1) as services:
        session = await spoken(services, list(range(3, 43)))
        session.leaving = True
        assert continued(services, [*session.history, 70]) is None
        with pytest.raises(SessionLimit):
            services.bound_sessions.open_unnamed("me", AsyncExitStack(), metadata={})
        assert session.state is SessionState.IDLE


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40))
def test_nearly_all_waits_are_longer_than_is_expected(waits: list[float]) -> None:
    times: dict[str, list[float]] = {}
    for seconds in waits:
        note_wait(times, "search", seconds)
    expected = expected_wait(sorted(times["search"]))
    assert expected is not None
    last = waits[-WINDOW:]
    assert min(last) <= expected <= max(last)
    assert sum(seconds >= expected for seconds in last) >= 0.8 * len(last)


def expected_ms(session: Session) -> float | None:
    """In how many ms the engine expects the session back."""
    assert session.phase is Phase.IO_WAIT
    return None if session.returns_at is None else 1000 * (session.returns_at - time.time())


async def answer(services: Services, session: Session) -> Turn:
    turn = start_turn(services.sessions, session, PROMPT, GREEDY, StopRule(max_tokens=4))
    await finish(turn)
    return turn


async def test_a_wait_ends_with_any_turn_but_one_that_is_refused(services: Services) -> None:
    registry = services.sessions
    session = registry.create()
    turn = await answer(services, session)
    registry.wait_for_tools(session, turn, ["search"])
    assert expected_ms(session) is None
    await registry.whitebox.arm(session, Breakpoint("bp_pause", (0,), Action.PAUSE))
    with pytest.raises(WrongState):
        start_turn(registry, session, PROMPT, GREEDY, LONG, pausable=False)
    await registry.whitebox.disarm(session, "bp_pause")
    assert session.phase is Phase.IO_WAIT
    await asyncio.sleep(0.3)
    turn = await answer(services, session)
    registry.wait_for_tools(session, turn, ["search"])
    found = expected_ms(session)
    assert found is not None
    assert found >= 250


async def test_a_session_that_has_gone_on_or_leaves_is_not_parked(services: Services) -> None:
    session = services.sessions.create()
    late = await answer(services, session)

    def phase_after(turn: Turn) -> Phase:
        services.sessions.wait_for_tools(session, turn, ["search"])
        return session.phase

    running = start_turn(services.sessions, session, PROMPT, GREEDY, LONG)
    assert phase_after(running) is Phase.COMPUTE
    services.sessions.pauses.release(session, running)
    await finish(running)
    last = await answer(services, session)
    assert phase_after(late) is Phase.COMPUTE
    session.leaving = True
    assert phase_after(last) is Phase.COMPUTE
    session.leaving = False
    assert phase_after(last) is Phase.IO_WAIT


async def test_the_time_of_return_is_learned_by_session_and_tool(services: Services) -> None:
    clock = Clock()
    waits, day = ToolWaits(clock=clock, wall_clock=lambda: day.now), Clock()
    mine, other, strange = (services.sessions.create(owner) for owner in ("me", "me", "you"))

    def wait(session: Session, seconds: float, *tools: str) -> float | None:
        expected = expected_wait(waits.begin(session, tools))
        clock.now += seconds
        waits.end(session)
        return expected

    assert [wait(mine, 12.0, "search"), wait(mine, 3.0, "add")] == [None, None]
    assert wait(mine, 1.0, "search") == 12
    assert wait(mine, 5.0, "search", "add") == 3, "the slower of 1 and 3"
    assert wait(other, 40.0, "search") == 1, "from the owner's other session"
    assert wait(other, 40.0, "search") == 40, "its own is better"
    assert wait(strange, 1.0, "search") is None
    for _ in range(ENOUGH):
        wait(mine, 9.0, "approve")
    assert wait(other, 9.0, "approve") == 9
    for _ in range(ENOUGH):
        day.now = 12 * 3600.0
        wait(mine, 2000.0, "approve")
    late, early = (services.sessions.create("me") for _ in range(2))
    assert wait(late, 2000.0, "approve") == 2000
    day.now = 0.0
    assert wait(early, 9.0, "approve") == 9


async def test_what_was_learned_goes_with_the_session(services: Services) -> None:
    clock = Clock()
    here, there = ToolWaits(clock=clock), ToolWaits(clock=clock)
    session = services.sessions.create("me")
    assert here.export(session) is None
    here.begin(session, ["search"])
    clock.now += 7.0
    here.end(session)
    here.begin(session, ["search"])
    sent = here.export(session)
    assert sent is not None
    there.adopt(session, sent)
    clock.now += 9.0
    there.end(session)
    assert there.begin(session, ["search"]) == pytest.approx((7, 9), abs=0.5)
    learned = there.export(session)
    assert learned is not None
    assert learned.times["search"] == pytest.approx([7.0, 9.0], abs=0.5)
