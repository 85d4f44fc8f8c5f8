"""How pauses end, and how breakpoints, steering and vectors are kept."""

import asyncio
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from app.domain.activations import UploadKind
from app.domain.breakpoints import (
    NEXT_BREAKPOINT,
    Action,
    Breakpoint,
    Edit,
    EditOp,
    OnTimeout,
    Pass,
    TensorData,
    Until,
    When,
)
from app.domain.errors import Draining, FieldOutOfRange, NotDurable, NotFound, WrongState
from app.domain.values import FinishReason, Phase, SessionState, StopRule, Tier
from app.exports.exports import export_session, import_session
from app.machine.budget import DiskRoom
from app.messages import Paused, TurnFinished
from app.routers.dependencies import Services
from app.sessions.lifecycle import drain
from app.sessions.registry import SessionRegistry
from app.sessions.uploads import MAX_UPLOADS, Uploads
from tests.file_sizes import largest_file
from tests.journal.building import held_up
from tests.pausing import EACH_TOKEN, PROMPT, PROMPT_END, assert_same, finish, paused, read, start, whole
from tests.serving import running_services
from tests.taking_turns import GREEDY, assert_nothing_is_held, engine_tokens, spooled, start_turn
from tests.waiting import until

BRIEF = 0.1


async def test_a_cancel_is_not_overtaken_by_a_resume_nor_the_other_way_round(registry: SessionRegistry) -> None:
    for resumed_first in (False, True):
        session, reader = await paused(registry, tokens=500)
        if resumed_first:
            registry.pauses.resume(session, NEXT_BREAKPOINT)
        registry.pauses.cancel(session, reader.turn)
        with pytest.raises(WrongState):
            registry.pauses.resume(session, NEXT_BREAKPOINT)
        await asyncio.wait_for(reader.turn.ended.wait(), 60)
        assert session.state is SessionState.IDLE
        assert len(session.history) == await engine_tokens(registry, session)
        again = start(registry, session, tokens=1)
        assert isinstance(await finish(registry, session, again), TurnFinished)


async def test_who_leaves_before_the_pause_ends_the_turn_but_not_who_leaves_at_it(registry: SessionRegistry) -> None:
    session = registry.create()
    await registry.whitebox.arm(session, PROMPT_END)
    reader = start(registry, session)
    registry.pauses.release(session, reader.turn)
    end = await read(reader)
    assert isinstance(end, TurnFinished)
    assert end.reason is FinishReason.CANCELLED
    session, reader = await paused(registry, breakpoint=PROMPT_END)
    registry.pauses.release(session, reader.turn)
    await registry.memory()
    assert session.state is SessionState.PAUSED


async def test_who_has_resumed_a_turn_ends_it_by_leaving_but_nobody_before(registry: SessionRegistry) -> None:
    session, reader = await paused(registry, breakpoint=PROMPT_END, tokens=900)
    registry.pauses.resume(session, NEXT_BREAKPOINT)
    registry.pauses.release(session, reader.turn)  # of whoever had started it
    await until(lambda: session.state is SessionState.RUNNING)
    registry.pauses.release(session, reader.turn)
    end = await read(reader)
    assert isinstance(end, TurnFinished)
    assert end.reason is FinishReason.CANCELLED


async def test_a_paused_session_that_is_closed_leaves_nothing(registry: SessionRegistry) -> None:
    session, reader = await paused(registry, breakpoint=replace(EACH_TOKEN, timeout_s=BRIEF))
    await registry.close(session)
    assert reader.turn.ended.is_set()
    with pytest.raises(NotFound):
        registry.table.get(session.id)
    await asyncio.sleep(2 * BRIEF)
    await assert_nothing_is_held(registry)


async def test_at_the_end_nobody_waits_for_a_paused_turn_or_one_that_pauses_then(registry: SessionRegistry) -> None:
    (at_rest, first), (going, second) = await paused(registry), await paused(registry, tokens=500)
    registry.pauses.resume(going, Until(end=True))
    late = registry.create()
    await registry.whitebox.arm(late, replace(EACH_TOKEN, when=When(position=len(PROMPT) + 3)))
    third = start(registry, late, tokens=500)
    draining = asyncio.create_task(drain(registry, timeout_s=30))
    await asyncio.wait_for(asyncio.gather(first.turn.ended.wait(), third.turn.ended.wait()), 60)
    with pytest.raises((Draining, WrongState)):
        registry.pauses.resume(at_rest, NEXT_BREAKPOINT)
    registry.pauses.cancel(going, second.turn)
    await asyncio.wait_for(draining, 60)
    assert {each.state for each in (at_rest, going, late)} == {SessionState.IDLE}
    end = await read(third)
    assert isinstance(end, TurnFinished)
    assert end.reason is FinishReason.SHUTDOWN


async def test_a_turn_that_nobody_resumes_goes_on_by_itself_stop_strings_and_all(registry: SessionRegistry) -> None:
    text = (await whole(registry, tokens=12)).text
    expected = await whole(registry, text[5:8], tokens=12)
    brief = replace(PROMPT_END, timeout_s=BRIEF)
    session, reader = await paused(registry, text[5:8], breakpoint=brief, tokens=12)
    registry.pauses.release(session, reader.turn)
    await until(lambda: session.state is SessionState.IDLE)
    assert session.history[len(PROMPT) :].tolist() == expected.token_ids
    assert len(session.history) == await engine_tokens(registry, session)


async def test_each_pause_has_its_own_time_and_one_made_by_until_the_last_ones(registry: SessionRegistry) -> None:
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


async def test_a_forks_pause_has_a_time_of_its_own(registry: SessionRegistry) -> None:
    abort = replace(EACH_TOKEN, timeout_s=1.0, on_timeout=OnTimeout.ABORT)
    parent, _ = await paused(registry, breakpoint=abort)
    await asyncio.sleep(0.5)
    child = await registry.fork(parent)
    await until(lambda: parent.state is SessionState.IDLE)
    assert child.state is SessionState.PAUSED
    await until(lambda: child.state is SessionState.IDLE)


@pytest.mark.parametrize("way", ["fork", "import"])
async def test_a_copy_that_nobody_waits_for_is_not_there_after_a_restart(tmp_path: Path, way: str) -> None:
    async with running_services(state_dir=tmp_path / "state") as services:
        registry = services.sessions
        parent, _ = await paused(registry)
        await export_session(registry, parent, spooled(tmp_path / "session"))
        for steps in range(6):  # at one of them the engine has just been told
            copy = registry.fork(parent) if way == "fork" else import_session(registry, tmp_path / "session")
            copying = asyncio.create_task(copy)
            for _ in range(steps):
                await asyncio.sleep(0)
            copying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await copying
        assert (await registry.memory()).sessions == 1
        assert registry.table.page(limit=9) == [parent]
    async with running_services(state_dir=tmp_path / "state") as services:
        assert [each.id for each in services.sessions.table.page(limit=9)] == [parent.id]


async def test_a_session_paused_in_its_prompt_can_be_exported_in_io_wait(
    registry: SessionRegistry, tmp_path: Path
) -> None:
    """Its KV on the host has blocks that only the paused pass has written to: they are not in the file."""
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


# How breakpoints, steering and vectors are kept.

STEER = Breakpoint("bp_steer", (1,), Action.EDIT, edits=(Edit(EditOp.SCALE, 0.5),))
WATCH = Breakpoint("bp_watch", (0, 1), Action.CAPTURE, When(in_pass=Pass.DECODE))


async def test_a_turn_that_cannot_pause_excludes_a_breakpoint_that_does(registry: SessionRegistry) -> None:
    session, rule = registry.create(), StopRule(max_tokens=900)
    turn = start_turn(registry, session, PROMPT, GREEDY, rule, pausable=False)
    with pytest.raises(WrongState):
        await registry.whitebox.arm(session, EACH_TOKEN)
    assert session.breakpoints == {}
    await registry.whitebox.arm(session, WATCH)
    registry.pauses.release(session, turn)
    await turn.ended.wait()
    await registry.whitebox.arm(session, EACH_TOKEN)
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
        await registry.whitebox.arm(session, each)
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
        await first.sessions.whitebox.arm(session, steer)
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
        with held_up(tmp_path):
            staying = asyncio.create_task(registry.whitebox.arm(session, WATCH))
            leaving = asyncio.create_task(registry.whitebox.arm(session, STEER))
            await asyncio.sleep(0.2)
            assert not staying.done()
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        await asyncio.wait_for(staying, 60)
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
        await registry.whitebox.arm(session, EACH_TOKEN)
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


async def test_an_owner_has_at_most_so_many_but_may_replace_them(registry: SessionRegistry, tmp_path: Path) -> None:
    vectors = Uploads(None, registry.executor, tmp_path, DiskRoom(tmp_path), 0)
    for index in range(MAX_UPLOADS):
        await vectors.put_vector("me", f"v{index}", vector(index))
    with pytest.raises(FieldOutOfRange, match="1000"):
        await vectors.put_vector("me", "one more", vector(0))
    await vectors.put_vector("me", "v0", vector(7))
    await vectors.put_vector("you", "v0", vector(8))
    assert vectors.get("me", UploadKind.VECTOR, "v0", TensorData) == vector(7)


async def test_a_vector_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    wide = TensorData("float32", (100_000,), bytes(400_000))
    async with running_services(state_dir=tmp_path) as services:
        with largest_file(200_000), pytest.raises(NotDurable):
            await services.uploads.put_vector("me", "calm", wide)
