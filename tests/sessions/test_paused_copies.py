"""Forks and files of paused sessions are paused in the same place, and go on in the same way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.domain.breakpoints import NEXT_BREAKPOINT
from app.domain.values import FinishReason, Phase, SessionState, Tier
from app.exports.exports import export_session, import_session
from app.routers.dependencies import Services
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from tests.exports.spooling import spooled
from tests.pausing import (
    EACH_TOKEN,
    PROMPT_END,
    TOKENS,
    assert_nobody_waits,
    assert_same,
    finish,
    paused,
    read,
    start,
    whole,
)
from tests.serving import running_services
from tests.taking_turns import assert_nothing_is_held, until


async def test_a_fork_of_a_paused_session_is_paused_in_the_same_place(services: Services) -> None:
    registry = services.sessions
    expected = await whole(registry, logprobs=1)
    parent, reader = await paused(registry, logprobs=1)
    registry.pauses.resume(parent, NEXT_BREAKPOINT)
    await read(reader)
    child = await registry.fork(parent)
    assert parent.pause is not None
    assert child.pause is not None
    assert child.pause.info == parent.pause.info
    assert (child.history, child.breakpoints, child.metadata) == (parent.history, parent.breakpoints, {"a": "b"})
    child_reader = child.reader
    assert child_reader is not None
    assert (child_reader.text, child_reader.token_ids) == (reader.text, expected.token_ids[:2])
    for session in (parent, child):
        end = await finish(registry, session, registry.pauses.resume(session, NEXT_BREAKPOINT))
        assert end.usage.completion_tokens == TOKENS
        await registry.close(session)
    assert_same(reader, expected)
    assert_same(child_reader, expected)
    await assert_nothing_is_held(registry)


async def test_a_fork_has_not_waited_for_what_its_parent_waited_for(services: Services) -> None:
    registry = services.sessions
    parent = registry.create()
    await read(start(registry, parent))
    registry.set_phase(parent, Phase.IO_WAIT)
    await until(lambda: parent.kv.tier is Tier.HOST)
    await registry.breakpoints.arm(parent, EACH_TOKEN)
    await read(start(registry, parent))
    child = await registry.fork(parent)
    await finish(registry, child, registry.pauses.resume(child, NEXT_BREAKPOINT))
    assert parent.usage.restore_ms > 0
    assert child.usage.restore_ms == 0


async def test_a_fork_that_nobody_waits_for_leaves_nothing_behind(services: Services) -> None:
    registry = services.sessions
    parent, _ = await paused(registry)
    forking = asyncio.create_task(registry.fork(parent))
    await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert registry.table.page(limit=9) == [parent]
    await registry.close(parent)
    await assert_nothing_is_held(registry)
    assert_nobody_waits(registry)


async def copy(registry: SessionRegistry, session: Session, path: Path, way: str) -> Session:
    """A fork of a paused session, or what comes of its file."""
    return await (registry.fork(session) if way == "fork" else import_session(registry, path))


@pytest.mark.parametrize("way", ["fork", "import"])
async def test_a_copy_that_nobody_waits_for_is_not_there_after_a_restart(tmp_path: Path, way: str) -> None:
    async with running_services(state_dir=tmp_path / "state") as services:
        registry = services.sessions
        parent, _ = await paused(registry)
        await export_session(registry, parent, spooled(tmp_path / "session"))
        for steps in range(6):  # at one of them the engine has just been told
            copying = asyncio.create_task(copy(registry, parent, tmp_path / "session", way))
            for _ in range(steps):
                await asyncio.sleep(0)
            copying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await copying
        await registry.memory()
        assert registry.table.page(limit=9) == [parent]
    async with running_services(state_dir=tmp_path / "state") as services:
        assert [each.id for each in services.sessions.table.page(limit=9)] == [parent.id]


async def test_a_paused_session_goes_on_where_its_file_is_taken(services: Services, tmp_path: Path) -> None:
    registry = services.sessions
    expected = await whole(registry, logprobs=1)
    session, _ = await paused(registry, "never said", logprobs=1)
    await export_session(registry, session, spooled(tmp_path / "session"))
    await registry.close(session)
    back = await import_session(registry, tmp_path / "session")
    assert back.state is SessionState.PAUSED
    assert back.breakpoints == {EACH_TOKEN.id: EACH_TOKEN}
    assert back.pause is not None
    reader = registry.pauses.resume(back, NEXT_BREAKPOINT)
    assert reader.token_ids == expected.token_ids[:1]
    end = await finish(registry, back, reader)
    assert end.reason is FinishReason.LENGTH
    assert_same(reader, expected)
    assert_nobody_waits(registry)


async def test_a_session_paused_in_its_prompt_is_taken_away_while_it_waits(services: Services, tmp_path: Path) -> None:
    """Its KV on the host has blocks that only the paused pass has written to: they are not in the file."""
    registry = services.sessions
    expected = await whole(registry, logprobs=1)
    session, _ = await paused(registry, breakpoint=PROMPT_END, logprobs=1)
    registry.set_phase(session, Phase.IO_WAIT)
    await until(lambda: session.kv.tier is Tier.HOST)
    await export_session(registry, session, spooled(tmp_path / "session"))
    await registry.close(session)
    back = await import_session(registry, tmp_path / "session")
    reader = registry.pauses.resume(back, NEXT_BREAKPOINT)
    await finish(registry, back, reader)
    assert_same(reader, expected)


async def test_an_idle_sessions_file_brings_no_turn(services: Services, tmp_path: Path) -> None:
    registry = services.sessions
    session = registry.create()
    await registry.breakpoints.arm(session, EACH_TOKEN)
    await export_session(registry, session, spooled(tmp_path / "session"))
    back = await import_session(registry, tmp_path / "session")
    assert back.state is SessionState.IDLE
    assert back.breakpoints == {EACH_TOKEN.id: EACH_TOKEN}
    assert_nobody_waits(registry)
