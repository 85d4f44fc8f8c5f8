"""Commands to the engine and its events. A dead engine keeps no caller waiting. A slow reader misses no event."""

import asyncio

import pytest

from app.domain.errors import EngineError, EngineRestarting
from app.domain.values import (
    FinishReason,
    ModelInfo,
    SamplingParams,
    SessionId,
    StopRule,
    Ticket,
    TokenLogprobs,
    TurnUsage,
)
from app.engine_process.executor import Deliver, EngineExecutor
from app.engine_process.turn import SLICE, TokenRun, Turn
from app.messages import Done, Fork, Inspect, Lost, Notice, Submit, Token, TurnEvent, TurnFinished
from app.routers.dependencies import Services
from tests.bridge.engines import DyingEngine, TalkingEngine, app_of
from tests.others import turns_of_others
from tests.taking_turns import start_turn
from tests.waiting import until


def ignore(notice: Notice) -> None:
    """An engine that is dying has no news of sessions."""


async def talking(info: ModelInfo) -> tuple[EngineExecutor, Deliver]:
    engine = TalkingEngine(info)
    executor = EngineExecutor(engine, ignore)
    executor.start()
    await asyncio.to_thread(engine.runs.wait, 30)
    assert engine.deliver is not None
    return executor, engine.deliver


async def test_when_the_engine_dies_who_waits_is_told_and_who_comes_later_too(info: ModelInfo) -> None:
    engine = DyingEngine(info)
    app = app_of(engine)
    async with app.router.lifespan_context(app):
        services: Services = app.state.services
        registry = services.sessions
        session, expiring = registry.create(), registry.create(ttl_s=1)
        turn = start_turn(registry, session, [5], SamplingParams(seed=0), StopRule(max_tokens=5))
        waiting = asyncio.create_task(registry.memory())
        await asyncio.sleep(0)
        engine.die.set()
        with pytest.raises(EngineError, match="out of memory"):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(EngineError, match="out of memory"):
            await asyncio.wait_for(anext(turn), 30)
        with pytest.raises(EngineError, match="out of memory"):
            await registry.memory()
        with pytest.raises(EngineError, match="out of memory"):
            start_turn(registry, session, [5], SamplingParams(seed=0), StopRule(max_tokens=5))
        with pytest.raises(EngineError, match="out of memory"):
            registry.create()
        registry.pauses.release(session, turn)
        assert {each.id for each in registry.table.page(limit=9)} == {session.id, expiring.id}
        await until(lambda: len(registry.table.page(limit=9)) == 1)  # expiry goes on


async def test_stop_answers_every_waiting_call(info: ModelInfo) -> None:
    executor = EngineExecutor(DyingEngine(info), ignore)
    executor.start()
    waiting = asyncio.create_task(executor.call(Inspect))
    await asyncio.sleep(0)
    await executor.stop()
    with pytest.raises(EngineError):
        await waiting
    with pytest.raises(EngineError):  # a request may end later than the engine
        await asyncio.wait_for(executor.call(Inspect), 30)


async def test_an_observer_that_fails_costs_others_no_event(info: ModelInfo, caplog: pytest.LogCaptureFixture) -> None:
    executor, deliver = await talking(info)

    def submit(ticket: Ticket) -> Submit:
        return Submit(ticket, SessionId("s"), (1,), SamplingParams(seed=0), StopRule(1))

    def refuse(event: TurnEvent) -> None:
        raise ValueError("an observer of its own")

    turns = [executor.start_turn(submit, observe) for observe in (refuse, lambda event: None)]
    deliver([TurnFinished(turn.ticket, FinishReason.LENGTH, TurnUsage(), 2, None, None) for turn in turns])
    for turn in turns:
        assert isinstance(await asyncio.wait_for(anext(turn), 30), TurnFinished)
    assert "an observer of its own" in caplog.text
    await executor.stop()


async def test_a_turn_that_a_command_has_brought_does_not_outlive_the_engine(info: ModelInfo) -> None:
    executor, deliver = await talking(info)
    replies: list[Ticket] = []

    def fork(ticket: Ticket, turn: Ticket) -> Fork:
        replies.append(ticket)
        return Fork(ticket, SessionId("a"), SessionId("b"), turn)

    waiting = asyncio.create_task(executor.call_for_turn(fork, lambda event: None))
    await until(lambda: bool(replies))
    deliver([Done(replies[0]), Lost("it was ended by SIGKILL")])
    with pytest.raises(EngineRestarting, match="SIGKILL"):
        await asyncio.wait_for(waiting, 30)
    await executor.stop()


def ended(count: int) -> Turn:
    """A turn that has made `count` tokens, and has no reader yet."""
    turn = Turn(Ticket(1))
    for number in range(count):
        turn.deliver(Token(Ticket(1), number, TokenLogprobs(number, -0.5)))
    turn.deliver(FINISHED)
    return turn


async def read(turn: Turn) -> list[TokenRun]:
    return [item async for item in turn if isinstance(item, TokenRun)]


FINISHED = TurnFinished(Ticket(1), FinishReason.LENGTH, TurnUsage(), 2, None, None)


@pytest.mark.parametrize("event", [Token(Ticket(1), 5, None), FINISHED], ids=["token", "end"])
async def test_a_reader_that_waits_gets_what_comes_next(event: TurnEvent) -> None:
    turn = Turn(Ticket(1))
    reading = asyncio.ensure_future(anext(turn))
    await asyncio.sleep(0)
    turn.deliver(event)
    await asyncio.wait_for(reading, 30)


async def test_many_tokens_come_in_slices_and_in_order() -> None:
    runs = await read(ended(10 * SLICE + 1))
    assert max(len(run.token_ids) for run in runs) <= SLICE
    assert [token for run in runs for token in run.token_ids] == list(range(10 * SLICE + 1))
    assert [found.token_id for run in runs for found in run.logprobs] == list(range(10 * SLICE + 1))


async def test_others_run_between_two_slices() -> None:
    assert await turns_of_others(read(ended(10 * SLICE))) >= 9
