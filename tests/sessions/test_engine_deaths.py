"""What an engine's death leaves of sessions and their turns."""

from array import array
from contextlib import AsyncExitStack

import httpx
import pytest
from fastapi import FastAPI

from app.domain.errors import DeadlyTurn, EngineRestarting
from app.domain.values import FinishReason, Ticket, TurnUsage
from app.messages import Back, Done, Event, Lost, Open, Rewind, Started, Submit, Token, TurnFinished
from app.routers.dependencies import Services
from app.sessions.charges import KNOWN_FOR_S, MOST_DEATHS, DeadlyTurns
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.turns import TurnRequest
from app.text.generation import TextRule, TurnReader
from tests.sessions.conftest import ListeningEngine
from tests.taking_turns import GREEDY, LONG
from tests.waiting import until

DEATH = Lost("its process was ended by SIGKILL")


def begin(registry: SessionRegistry, session: Session, text: bytes, *, replace: bool = False) -> TurnReader:
    """A turn that ends at the stop string "!"."""
    request = TurnRequest(list(text), GREEDY, LONG, TextRule(stop=("!",)), replace)
    return registry.turns.start(session, request, AsyncExitStack())


def tokens_of(engine: ListeningEngine, text: bytes) -> list[Event]:
    ticket = ticket_of(engine)
    return [Started(ticket, 0), *(Token(ticket, byte) for byte in text)]


def end_of(engine: ListeningEngine, prompt: int, generated: int) -> Event:
    usage = TurnUsage(prompt_tokens=prompt, completion_tokens=generated)
    return TurnFinished(ticket_of(engine), FinishReason.LENGTH, usage, prompt + generated)


def ticket_of(engine: ListeningEngine) -> Ticket:
    return engine.last(Submit).ticket


async def test_a_turn_that_has_finished_is_answered_though_the_engine_is_dead(
    engine: ListeningEngine, on_paper: SessionRegistry
) -> None:
    session = on_paper.create()
    reader = begin(on_paper, session, b"ask")
    engine.tell(*tokens_of(engine, b"yes!no"), end_of(engine, 3, 6), DEATH)
    assert isinstance(await reader.read(), TurnFinished)
    assert reader.text == "yes"
    assert bytes(session.history.tolist()) == b"askyes!"
    with pytest.raises(EngineRestarting):
        on_paper.executor.check()


async def test_the_next_engine_has_no_token_behind_a_stop_string_that_was_found_late(
    engine: ListeningEngine, on_paper: SessionRegistry
) -> None:
    session = on_paper.create()
    reader = begin(on_paper, session, b"ask")
    engine.tell(*tokens_of(engine, b"yes!no"), end_of(engine, 3, 6), DEATH, Back())
    engine.sent.clear()
    await until(lambda: bool(engine.sent))
    opened = engine.last(Open)
    assert isinstance(opened, Open)
    assert bytes(opened.token_ids) == b"askyes!no"
    await reader.read()
    engine.tell(Done(opened.ticket))
    await until(lambda: on_paper.executor.failure is None)
    rewound = engine.last(Rewind)
    assert isinstance(rewound, Rewind)
    assert (rewound.session, rewound.to_token) == (session.id, len(session.history)) == (session.id, 7)


async def test_a_stop_string_in_a_turn_that_has_failed_cuts_nothing(
    engine: ListeningEngine, on_paper: SessionRegistry
) -> None:
    session = on_paper.create()
    reader = begin(on_paper, session, b"a long first question")
    engine.tell(*tokens_of(engine, b"yes"), end_of(engine, 21, 3))
    await reader.read()
    before, cost = session.history.tolist(), session.usage.completion_tokens
    reader = begin(on_paper, session, b"short", replace=True)
    engine.tell(*tokens_of(engine, b"no!"), DEATH)
    with pytest.raises(EngineRestarting):
        await reader.read()
    assert session.history.tolist() == before
    assert session.usage.completion_tokens == cost


async def test_metrics_are_there_when_no_engine_can_be_started(engine: ListeningEngine, talking: FastAPI) -> None:
    services: Services = talking.state.services
    services.sessions.executor.reopen = refuse
    engine.tell(DEATH, Back())
    await until(lambda: "no room" in (services.sessions.executor.failure or ""))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(talking), base_url="http://localhost") as http:
        answers = [await http.get("/ready"), await http.get("/metrics")]
    assert [answer.status_code for answer in answers] == [500, 200]
    assert "djinn_engine_up 0.0" in answers[1].text


async def refuse() -> None:
    """As when sessions cannot be opened."""
    raise RuntimeError("no room")


async def die_beside(
    engine: ListeningEngine, registry: SessionRegistry, session: Session, text: bytes, *, times: int
) -> None:
    """A client repeats a turn, and each time the engine dies."""
    for _ in range(times):
        reader = begin(registry, session, text)
        engine.tell(DEATH)
        with pytest.raises(EngineRestarting):
            await reader.read()
        engine.tell(Back())
        await until(lambda: isinstance(engine.sent[-1], Open))
        engine.tell(Done(engine.last(Open).ticket))
        await until(lambda: registry.executor.failure is None)


async def test_a_turn_that_was_there_at_three_deaths_is_not_run_again(
    engine: ListeningEngine, talking: FastAPI, on_paper: SessionRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = on_paper.create()
    await die_beside(engine, on_paper, session, b"ask", times=2)
    begin(on_paper, session, b"other")
    engine.tell(*tokens_of(engine, b"yes"), end_of(engine, 5, 3))
    await until(lambda: not session.busy)
    session.truncate(0)
    await die_beside(engine, on_paper, session, b"ask", times=1)
    with pytest.raises(DeadlyTurn, match="the engine died 3 times while this turn was there"):
        begin(on_paper, session, b"ask")
    assert not session.busy
    begin(on_paper, session, b"asks")
    monkeypatch.setattr("app.sessions.capacity.LOOK_S", 0.0)
    told = {each.kind: each.text for each in talking.state.services.findings.tell(None, None, is_operator=True)}
    assert "started anew 3 times in 15 min" in told["restarts"]
    assert "3 of 4 turns failed in 10 min, most of them with engine_restarting" in told["failing"]


async def test_a_turn_that_comes_to_its_end_was_not_what_ended_the_engine(
    engine: ListeningEngine, on_paper: SessionRegistry
) -> None:
    session = on_paper.create()
    await die_beside(engine, on_paper, session, b"ask", times=2)
    reader = begin(on_paper, session, b"ask")
    engine.tell(*tokens_of(engine, b"yes"), end_of(engine, 3, 3))
    await reader.read()
    session.truncate(0)
    await die_beside(engine, on_paper, session, b"ask", times=2)
    begin(on_paper, session, b"ask")


async def test_an_owner_is_not_refused_for_what_another_asks() -> None:
    now, context = 0.0, array("I", list(b"ask"))
    turns = DeadlyTurns(lambda: now)
    for death in range(1, MOST_DEATHS + 1):
        turns.note_death("one", context, death)
    turns.check("other", context, param="prompt")
    with pytest.raises(DeadlyTurn):
        turns.check("one", context, param="prompt")
    now += KNOWN_FOR_S
    turns.check("one", context, param="prompt")
