"""New sessions, by creation, fork or import: how many there may be, and who gives up on them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from app.bridge.turn import Turn
from app.domain.errors import Busy, WrongState
from app.domain.values import StopRule
from app.exports.exports import export_session, import_session
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from tests.serving import running_services
from tests.taking_turns import GREEDY, LONG, PROMPT, assert_nothing_is_held, finish, spooled, start_turn


async def test_sessions_that_open_at_the_same_time_count_towards_max_sessions() -> None:
    async with running_services(max_sessions=2) as services:
        registry = services.sessions
        parent = registry.create()
        for openings in (
            (registry.fork(parent), registry.fork(parent)),
            (registry.create_guaranteed(), registry.create_guaranteed()),
        ):
            first, second = await asyncio.gather(*openings, return_exceptions=True)
            assert isinstance(first, Session)
            assert isinstance(second, Busy)
            assert {session.id for session in registry.table.page(limit=9)} == {parent.id, first.id}
            await registry.close(first)


async def test_a_fork_that_fails_leaves_nothing_behind(registry: SessionRegistry) -> None:
    parent = registry.create()
    forking = asyncio.create_task(registry.fork(parent))
    await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert registry.table.page(limit=9) == [parent]
    await assert_nothing_is_held(registry)


async def test_an_import_that_nobody_waits_for_leaves_nothing_behind(registry: SessionRegistry, tmp_path: Path) -> None:
    session = registry.create()
    await finish(start_turn(registry, session, PROMPT, GREEDY, StopRule(max_tokens=4)))
    await export_session(registry, session, spooled(tmp_path / "session"))
    (tmp_path / "damaged").write_bytes(b"no session")
    for path in (tmp_path / "session", tmp_path / "damaged"):
        importing = asyncio.create_task(import_session(registry, path))
        await asyncio.sleep(0)
        importing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await importing
    await registry.close(session)
    assert registry.table.page(limit=9) == []
    await asyncio.sleep(0.2)
    assert (await registry.memory()).sessions == 0
    await assert_nothing_is_held(registry)


async def test_an_export_that_a_turn_overtakes_is_refused(registry: SessionRegistry, tmp_path: Path) -> None:
    """The file would have a history that its label does not speak of."""
    session = registry.create()
    await finish(start_turn(registry, session, PROMPT, GREEDY, StopRule(max_tokens=3)))
    exporting = asyncio.create_task(export_session(registry, session, spooled(tmp_path / "overtaken")))
    await asyncio.sleep(0)
    turn = start_turn(registry, session, [5], GREEDY, StopRule(max_tokens=3))
    with pytest.raises(WrongState, match=r"history .* has changed meanwhile"):
        await exporting
    await finish(turn)
    exported = await export_session(registry, session, spooled(tmp_path / "again"))
    assert exported.tokens == len(session.history)


async def test_a_guaranteed_session_that_nobody_waits_for_leaves_nothing_behind(registry: SessionRegistry) -> None:
    for _ in range(9):  # more than could be promised at once
        creating = asyncio.create_task(registry.create_guaranteed())
        await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
    assert registry.table.page(limit=9) == []
    assert (await registry.create_guaranteed()).residency == "guaranteed"


@pytest.mark.parametrize(("max_running", "max_queue"), [(1, 5), (4, 3)])
async def test_as_many_turns_are_taken_as_may_run_and_wait(max_running: int, max_queue: int) -> None:
    """However many of them come before the engine has looked at the first."""
    async with running_services(max_running=max_running, max_queue=max_queue) as services:
        registry = services.sessions
        taken: list[tuple[Session, Turn]] = []
        for session in [registry.create() for _ in range(10)]:
            with contextlib.suppress(Busy):
                taken.append((session, start_turn(registry, session, PROMPT, GREEDY, LONG)))
        assert len(taken) == max_running + max_queue
        await anext(taken[0][1])
        with pytest.raises(Busy, match="queue is full"):
            start_turn(registry, registry.create(), PROMPT, GREEDY, LONG)
        other = registry.create("other")
        await finish(start_turn(registry, other, PROMPT, GREEDY, StopRule(max_tokens=1)))
        registry.ends.release(*taken[0])
        await finish(taken[0][1])
        late = registry.create()
        taken[0] = late, start_turn(registry, late, PROMPT, GREEDY, LONG)
        for session, turn in taken:
            registry.ends.release(session, turn)
            await finish(turn)
