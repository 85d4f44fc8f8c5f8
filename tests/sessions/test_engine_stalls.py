"""What becomes of turns and sessions while the engine lives and makes no progress, and when it goes on."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from app.domain.breakpoints import NEXT_BREAKPOINT
from app.domain.errors import DeadlyTurn, EngineStalled
from app.domain.values import SessionState
from app.events import Scope
from app.messages import Back, Close, Done, Fork, GoesOn, Open, Replacement, Stalled, Submit
from app.sessions.charges import MOST_DEATHS
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from tests.pausing import finish as finish_paused
from tests.pausing import paused, whole
from tests.sessions.conftest import ListeningEngine
from tests.sessions.test_engine_deaths import DEATH, begin, ticket_of, tokens_of
from tests.waiting import until

DOUBT, STALL = (Stalled("its process has said nothing for 7 s", ends_turns) for ends_turns in (False, True))


async def test_new_turns_are_refused_at_once_and_those_that_run_wait_a_little(
    engine: ListeningEngine, talking: FastAPI, on_paper: SessionRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sessions.registry.PATIENCE_S", 0.01)
    with talking.state.services.events.reading(Scope(None)) as channel:  # it tells while the engine says nothing
        await until(lambda: b"event: findings" in (channel.after(0) or (0, b""))[1])
    session, other = on_paper.create(), on_paper.create()
    reader = begin(on_paper, session, b"ask")
    engine.tell(*tokens_of(engine, b"yes"), DOUBT)
    await until(lambda: on_paper.executor.stall is not None)
    sent = len(engine.sent)
    with pytest.raises(EngineStalled, match="said nothing for 7 s") as refused:
        begin(on_paper, other, b"ask")
    assert refused.value.headers["Djinn-Not-Done"] == "stalled"
    assert (len(engine.sent), session.state, other.state) == (sent, SessionState.RUNNING, SessionState.IDLE)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(talking), base_url="http://localhost") as http:
        answers = [await http.get(path) for path in ("/ready", "/health", "/metrics", "/v1/memory")]
    assert [answer.status_code for answer in answers] == [503, 200, 200, 503]
    assert answers[0].json()["error"]["code"] == "engine_stalled"
    assert answers[0].headers["Retry-After"] == "2"
    assert "djinn_engine_up 0.0" in answers[2].text
    engine.tell(STALL)
    with pytest.raises(EngineStalled) as failed:
        await reader.read()
    assert failed.value.headers == {}  # it may be what the engine is stuck in: no door takes it elsewhere by itself
    assert (session.state, list(session.history)) == (SessionState.IDLE, [])


async def test_an_engine_that_goes_on_has_the_session_as_before_the_turn_and_is_not_heard_of_the_turn(
    engine: ListeningEngine, on_paper: SessionRegistry
) -> None:
    session = on_paper.create()
    reader = begin(on_paper, session, b"ask")
    ticket, tokens = ticket_of(engine), tokens_of(engine, b"yes")
    engine.tell(*tokens[:2], STALL)
    with pytest.raises(EngineStalled):
        await reader.read()
    closed, opened = engine.sent[-2:]
    assert isinstance(closed, Close)
    assert isinstance(opened, Open)
    assert (closed.session, opened.session, opened.token_ids) == (session.id, session.id, ())
    engine.tell(GoesOn(), *tokens[2:])
    await until(lambda: on_paper.executor.stall is None)
    await asyncio.sleep(0)
    assert list(session.history) == []
    begin(on_paper, session, b"ask")
    assert isinstance(engine.sent[-1], Submit)
    assert ticket_of(engine) > ticket


async def test_a_fork_that_the_engine_was_asked_for_does_not_hang_and_leaves_nothing(
    engine: ListeningEngine, on_paper: SessionRegistry
) -> None:
    parent = on_paper.create()
    forking = asyncio.create_task(on_paper.fork(parent))
    await until(lambda: isinstance(engine.sent[-1], Fork))
    child = engine.last(Fork).child  # type: ignore[union-attr]
    engine.tell(STALL)
    with pytest.raises(EngineStalled):
        await forking
    assert engine.last(Close).session == child  # type: ignore[union-attr]
    assert list(on_paper.table) == [parent]


async def stall_and(engine: ListeningEngine, registry: SessionRegistry, session: Session, *then: Replacement) -> None:
    """A client repeats a turn, and each time the engine stalls."""
    reader = begin(registry, session, b"ask")
    engine.tell(STALL)
    with pytest.raises(EngineStalled):
        await reader.read()
    engine.tell(*then)
    if DEATH in then:
        await until(lambda: isinstance(engine.sent[-1], Open) and registry.executor.failure is not None)
        engine.tell(Done(engine.last(Open).ticket))
    await until(lambda: registry.executor.is_up)


async def test_a_turn_is_run_again_if_the_engine_goes_on_and_not_for_ever_if_it_hangs_until_it_is_ended(
    engine: ListeningEngine, on_paper: SessionRegistry
) -> None:
    session = on_paper.create()
    for then in MOST_DEATHS * [(GoesOn(),)] + MOST_DEATHS * [(DEATH, Back())]:
        await stall_and(engine, on_paper, session, *then)
    with pytest.raises(DeadlyTurn):
        begin(on_paper, session, b"ask")


async def test_a_turn_that_is_paused_outlives_a_stall(registry: SessionRegistry) -> None:
    expected = await whole(registry)
    session, reader = await paused(registry)
    registry.executor._dispatch([STALL])
    assert session.state is SessionState.PAUSED
    registry.executor._dispatch([GoesOn()])
    await finish_paused(registry, session, registry.pauses.resume(session, NEXT_BREAKPOINT))
    assert reader.token_ids == expected.token_ids
