"""Sessions without HTTP: how they open, their turns, their end, and that nothing stays behind."""

import asyncio
import contextlib
import logging
import os
import random
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from app.domain.errors import Busy, Draining, FieldOutOfRange, NotFound, WrongState
from app.domain.memory_map import SessionMemory
from app.domain.values import FinishReason, Grammar, GrammarKind, ModelInfo, SamplingParams, SessionState, StopRule
from app.engine_process.turn import Turn
from app.exports.exports import export_session
from app.journal.journal import Journal
from app.routers.dependencies import Services
from app.sessions import lifecycle
from app.sessions.capacity import Load, _Steps
from app.sessions.lifecycle import drain
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.side_work import Lane
from tests.bridge.engines import DyingEngine, app_of
from tests.conftest import ServeWith
from tests.serving import running_services
from tests.taking_turns import GREEDY, LONG, PROMPT, assert_nothing_is_held, engine_tokens, finish, spooled, start_turn
from tests.waiting import until, wait_until


async def test_a_second_turn_at_the_same_time_is_refused(registry: SessionRegistry) -> None:
    session = registry.create()
    turn = start_turn(registry, session, PROMPT, GREEDY, LONG)
    with pytest.raises(WrongState, match="queued"):
        start_turn(registry, session, PROMPT, GREEDY, LONG)
    await anext(turn)
    for refused in (registry.fork(session), registry.rewind(session, 0)):
        with pytest.raises(WrongState, match="running"):
            await refused
    registry.pauses.release(session, turn)


async def test_a_grammar_that_is_compiled_does_not_wait_for_one_that_is_not(registry: SessionRegistry) -> None:

    async def compile_grammar(text: str) -> None:
        sampling = SamplingParams(seed=0, grammar=Grammar(GrammarKind.REGEX, text, "structured_outputs.regex"))
        async with AsyncExitStack() as cleanup:
            await registry.turns.compile_grammar(None, sampling, 0, cleanup)

    await compile_grammar("known")
    async with AsyncExitStack() as others:
        for _ in range(max(1, (os.cpu_count() or 1) // 2)):
            await others.enter_async_context(registry.side_work.turn(None, Lane.GRAMMAR))
        await asyncio.wait_for(compile_grammar("known"), 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(compile_grammar("new"), 0.1)


async def test_a_session_expires_after_its_ttl_but_not_under_a_turn(registry: SessionRegistry) -> None:
    unused, used = registry.create(ttl_s=1), registry.create(ttl_s=1)
    turn = start_turn(registry, used, PROMPT, GREEDY, LONG)
    await until(lambda: unused.state is SessionState.CLOSED)
    assert registry.table.get(used.id) is used
    with pytest.raises(NotFound):
        registry.table.get(unused.id)
    registry.pauses.release(used, turn)
    await until(lambda: used.state is SessionState.CLOSED)
    await assert_nothing_is_held(registry)


async def test_an_ephemeral_session_leaves_nothing_behind_even_after_an_error(registry: SessionRegistry) -> None:
    with contextlib.suppress(ValueError):
        async with registry.ephemeral() as session:
            await anext(start_turn(registry, session, PROMPT, GREEDY, LONG))
            raise ValueError("the caller's own")
    assert session.state is SessionState.CLOSED
    assert registry.table.page(limit=1) == []
    await assert_nothing_is_held(registry)


async def test_drain_lets_short_turns_end_and_cancels_long_ones(registry: SessionRegistry, slow_steps: None) -> None:
    long, short = registry.create(), registry.create()
    endless = start_turn(registry, long, PROMPT, GREEDY, LONG)
    brief = start_turn(registry, short, PROMPT, GREEDY, StopRule(max_tokens=2))
    await drain(registry, timeout_s=0.4)
    assert (await finish(brief)).reason is FinishReason.LENGTH
    assert (await finish(endless)).reason is FinishReason.CANCELLED
    with pytest.raises(Draining):
        start_turn(registry, short, PROMPT, GREEDY, LONG)
    with pytest.raises(Draining):
        registry.create()
    with pytest.raises(Draining):
        await registry.fork(short)


async def test_an_engine_that_hangs_does_not_keep_the_server_from_ending(
    info: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step, or a write of KV, may hang on a disk or a device."""
    for module, name in ((lifecycle, "KEEP_S"), (lifecycle, "LATE_S")):
        monkeypatch.setattr(module, name, 0.05)
    engine = DyingEngine(info)
    app = app_of(engine, Journal(tmp_path))
    async with app.router.lifespan_context(app):
        registry = app.state.services.sessions
        endless = start_turn(registry, registry.create(), PROMPT, GREEDY, LONG)
        async with asyncio.timeout(10):
            await drain(registry, timeout_s=0.05)
        assert not endless.ended.is_set()
        engine.die.set()
    assert "cancelled turns that have not ended: 1" in caplog.text
    assert [each.levelno for each in caplog.records if "a write of KV has not ended" in each.message] == [logging.ERROR]


async def one_random_step(registry: SessionRegistry, session: Session, choose: random.Random) -> None:
    """A turn that ends by itself, is cancelled or is cut, or a rewind or a fork."""
    action = choose.choice(["finish", "cancel", "cut", "cut late", "rewind", "fork"])
    if action == "rewind":
        await registry.rewind(session, choose.randint(0, len(session.history)))
    elif action == "fork":
        await registry.close(await registry.fork(session))
    else:
        tokens = [choose.randint(3, 200) for _ in range(choose.randint(1, 40))]
        replace = choose.random() < 0.3 or len(session.history) > 600
        rule = StopRule(max_tokens=choose.randint(4, 40))
        turn = start_turn(registry, session, tokens, SamplingParams(seed=1), rule, replace=replace)
        start = len(session.history)
        if action != "cut late":
            await until(lambda: len(session.history) >= start + 3)
        else:
            await turn.ended.wait()
        keep = choose.randint(0, 3) if action.startswith("cut") else None
        if action != "finish":
            reason = FinishReason.CANCELLED if keep is None else FinishReason.STOP
            registry.pauses.cancel(session, turn, keep=keep, reason=reason)
        await finish(turn)
        assert keep is None or len(session.history) == start + keep


async def test_the_history_here_is_the_engines_through_random_use(services: Services) -> None:
    registry, choose = services.sessions, random.Random(0)
    sessions = [registry.create() for _ in range(3)]
    for _ in range(60):
        session = choose.choice(sessions)
        await one_random_step(registry, session, choose)
        assert len(session.history) == await engine_tokens(registry, session)
    for session in sessions:
        with pytest.raises(FieldOutOfRange):
            await registry.rewind(session, len(session.history) + 1)
        await registry.close(session)
    await assert_nothing_is_held(registry)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_sessions_leave_no_descriptor_thread_or_block(serve_with: ServeWith) -> None:
    """The server runs in this process, so its descriptors and threads are ours."""
    http = serve_with(kv_device=16 << 20)

    def use_one() -> None:
        path = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
        http.post(f"{path}/generate", json={"prompt": "hello", "max_tokens": 3})
        body = {"token_ids": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with http.stream("POST", f"{path}/generate", json=body) as answer:  # it breaks off
            next(answer.iter_raw())
        assert http.delete(path).status_code == 204

    use_one()
    before = descriptors(), threading.active_count()
    for _ in range(25):
        use_one()
    memory = http.get("/v1/memory").json()
    assert (memory["sessions"], memory["data"]["device"]["owned_bytes"]) == (0, 0)
    # asyncio keeps its pool of tokenizing threads; it may still have been growing.
    wait_until(lambda: descriptors() <= before[0])
    assert threading.active_count() <= before[1] + (os.cpu_count() or 1) + 4


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
        registry.pauses.release(*taken[0])
        await finish(taken[0][1])
        late = registry.create()
        taken[0] = late, start_turn(registry, late, PROMPT, GREEDY, LONG)
        for session, turn in taken:
            registry.pauses.release(session, turn)
            await finish(turn)


async def test_capacity_counts_only_agents_with_kv(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    load, memory = services.findings.load, await services.sessions.memory()
    works, waits = services.sessions.create(), services.sessions.create()
    works.place(SessionMemory(device_bytes=memory.device.total_bytes // 8))
    works.state = waits.state = SessionState.QUEUED
    for then, seconds in ((SessionState.QUEUED, 300), (SessionState.QUEUED, 1300), (SessionState.IDLE, 2000)):
        waits.state = then
        for _ in range(seconds):
            load.sample()
            load.capacity(memory)
        works.state = SessionState.IDLE
        works.place(SessionMemory())
    assert load.capacity(memory) is None
    monkeypatch.setattr(Load, "_steps", lambda load: _Steps(0.0, 1e-3, 1.0))
    works.place(SessionMemory(device_bytes=1))
    for each in [works, services.sessions.create(unseen=True)] * 300:
        each.move(SessionState.QUEUED)
        each.move(SessionState.IDLE)
        load.sample()
    said = {"context_tokens": 2, "prompt_tokens": 1, "completion_tokens": 1}
    found = load.estimate(memory, [works], said, services.tenancy.quotas.limits(None), sees_all=True, longest=2)
    assert found.agent.think_s == pytest.approx(2.0, rel=0.02)
