"""Breakpoints and vectors are kept for good or not at all, and go for good."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Pass, TensorData, When
from app.domain.errors import FieldOutOfRange, NotDurable, WrongState
from app.domain.values import SessionState, StopRule
from app.journal.journal import FILE_NAME
from app.messages import Paused, TurnFinished
from app.routers.dependencies import Services
from app.sessions.registry import SessionRegistry
from app.sessions.whitebox.vectors import MAX_VECTORS, Vectors
from tests.file_sizes import largest_file
from tests.pausing import EACH_TOKEN, PROMPT, paused, read, start
from tests.serving import running_services
from tests.taking_turns import GREEDY, start_turn

STEER = Breakpoint("bp_steer", (1,), Action.EDIT, edits=(Edit(EditOp.SCALE, 0.5),))
WATCH = Breakpoint("bp_watch", (0, 1), Action.CAPTURE, When(in_pass=Pass.DECODE))


async def test_a_turn_that_cannot_pause_excludes_a_breakpoint_that_does(
    registry: SessionRegistry,
) -> None:
    session, rule = registry.create(), StopRule(max_tokens=900)
    turn = start_turn(registry, session, PROMPT, GREEDY, rule, pausable=False)
    with pytest.raises(WrongState):
        await registry.breakpoints.arm(session, EACH_TOKEN)
    assert session.breakpoints == {}
    await registry.breakpoints.arm(session, WATCH)
    registry.ends.release(session, turn)
    await turn.ended.wait()
    await registry.breakpoints.arm(session, EACH_TOKEN)
    with pytest.raises(WrongState, match=f"/v1/sessions/{session.id}/generate"):
        start_turn(registry, session, PROMPT, GREEDY, rule, pausable=False)


async def test_one_that_acts_once_is_gone_for_good(tmp_path: Path) -> None:
    once = replace(EACH_TOKEN, once=True)
    async with running_services(state_dir=tmp_path) as services:
        session, _ = await paused(services.sessions, breakpoint=once)
        assert session.breakpoints == {}
    async with running_services(state_dir=tmp_path) as services:
        assert services.sessions.table.get(session.id).breakpoints == {}


async def two_turns(registry: SessionRegistry, *breakpoints: Breakpoint) -> list[int]:
    """What the second of two turns generates."""
    session = registry.create()
    for each in breakpoints:
        await registry.breakpoints.arm(session, each)
    for _ in range(2):
        reader = start(registry, session)
        assert isinstance(await read(reader), TurnFinished)
    return reader.token_ids


@pytest.mark.parametrize("every", [None, 2])
async def test_breakpoints_and_steering_are_there_after_a_restart(
    services: Services, tmp_path: Path, every: int | None
) -> None:
    steer = replace(STEER, when=When(every=every))
    steered, plain = await two_turns(services.sessions, steer), await two_turns(services.sessions)
    assert steered != plain
    async with running_services(state_dir=tmp_path) as first:
        session = first.sessions.create()
        await first.sessions.breakpoints.arm(session, steer)
        assert isinstance(await read(start(first.sessions, session)), TurnFinished)
    async with running_services(state_dir=tmp_path) as again:
        back = again.sessions.table.get(session.id)
        assert back.breakpoints == {steer.id: steer}
        assert back.interventions == session.interventions != ()
        reader = start(again.sessions, back)
        assert isinstance(await read(reader), TurnFinished)
    assert reader.token_ids == steered


async def test_arming_waits_for_the_journal_and_one_who_leaves_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    async with running_services(state_dir=tmp_path) as services:
        registry = services.sessions
        session, _ = await paused(registry)
        holder = sqlite3.connect(tmp_path / FILE_NAME)
        holder.execute("BEGIN IMMEDIATE")
        staying = asyncio.create_task(registry.breakpoints.arm(session, WATCH))
        leaving = asyncio.create_task(registry.breakpoints.arm(session, STEER))
        await asyncio.sleep(0.2)
        assert not staying.done()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        holder.rollback()
        holder.close()
        await asyncio.wait_for(staying, 10)
        assert list(session.breakpoints) == [EACH_TOKEN.id, WATCH.id]
    async with running_services(state_dir=tmp_path) as services:
        back = services.sessions.table.get(session.id)
        assert back.state is SessionState.IDLE
        assert list(back.breakpoints) == [EACH_TOKEN.id, WATCH.id]


async def test_a_paused_session_comes_back_idle_as_it_was_before_the_turn(tmp_path: Path) -> None:
    async with running_services(state_dir=tmp_path / "state") as services:
        registry = services.sessions
        session = registry.create()
        assert isinstance(await read(start(registry, session)), TurnFinished)
        before = session.history[:]
        await registry.breakpoints.arm(session, EACH_TOKEN)
        assert isinstance(await read(start(registry, session)), Paused)
        child = await registry.fork(session)
        shutil.copytree(tmp_path / "state", tmp_path / "left")  # what a kill would leave
    async with running_services(state_dir=tmp_path / "left") as services:
        for killed in (session, child):
            back = services.sessions.table.get(killed.id)
            assert back.state is SessionState.IDLE
            assert (back.history, back.breakpoints) == (before, {EACH_TOKEN.id: EACH_TOKEN})


def vector(value: float) -> TensorData:
    return TensorData("float32", (2,), struct.pack("<2f", value, 0.0))


async def test_an_owner_has_at_most_so_many_but_may_replace_them() -> None:
    vectors = Vectors(None)
    for index in range(MAX_VECTORS):
        await vectors.put("me", f"v{index}", vector(index))
    with pytest.raises(FieldOutOfRange, match="1000"):
        await vectors.put("me", "one more", vector(0))
    await vectors.put("me", "v0", vector(7))
    await vectors.put("you", "v0", vector(8))
    assert vectors.get("me", "v0") == vector(7)


async def test_a_vector_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    wide = TensorData("float32", (100_000,), bytes(400_000))
    async with running_services(state_dir=tmp_path) as services:
        with largest_file(200_000), pytest.raises(NotDurable):
            await services.vectors.put("me", "calm", wide)
