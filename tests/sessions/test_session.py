"""A session's state, and the counts of sessions with turns."""

import time
from array import array

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Edit, EditOp, Intervention, Pass
from app.domain.errors import EngineError, WrongState
from app.domain.homes import new_session_id
from app.domain.values import FinishReason, SessionId, SessionState, Ticket, TurnUsage
from app.engine_process.turn import Turn
from app.messages import Failed, Paused, Started, Token, TurnFinished
from app.sessions.session import TRANSITIONS, Session
from app.sessions.table import SessionTable
from app.tenants.tenancy import Tenancy
from tests.serving import tiny_settings

TICKET = Ticket(1)


def session_with_turn() -> tuple[Session, Turn]:
    """A session with a history of 2 tokens and a turn of 1 more."""
    session, turn = Session(SessionId("ses_1"), None, history=array("I", [1, 2])), Turn(TICKET)
    session.begin(turn, array("I", [1, 2, 3]), 8)
    return session, turn


def finished(history_tokens: int, interventions: tuple[Intervention, ...] | None = None) -> TurnFinished:
    usage = TurnUsage(prompt_tokens=3, cached_tokens=2, completion_tokens=history_tokens - 3)
    return TurnFinished(TICKET, FinishReason.STOP, usage, history_tokens, interventions)


def paused() -> Paused:
    return Paused(TICKET, CheckpointInfo(1, 2, 3, 64, "float32", 256, Pass.DECODE, None, 0.1, 1.0), TurnUsage())


def edited(first: int, end: int) -> Intervention:
    return Intervention(first, end, 2, Edit(EditOp.SCALE, 0.9))


def test_a_cut_of_an_earlier_turn_changes_nothing() -> None:
    session, turn = session_with_turn()
    for event in (Started(TICKET, 2), Token(TICKET, 7), finished(4)):
        session.observe(event)
    session.begin(Turn(Ticket(2)), array("I", [1, 2, 3, 4, 5]), 8)
    assert session.past[1] == []
    session.cut(turn, 0)
    session.observe(finished(5))
    assert list(session.history) == [1, 2, 3, 4, 5]
    assert session.past[1] == [], "the answer was replaced"


@pytest.mark.parametrize("cut_first", [True, False])
def test_a_cut_history_keeps_only_what_it_was_computed_with(cut_first: bool) -> None:
    session, turn = session_with_turn()
    session.observe(Started(TICKET, 2))
    for token_id in (7, 8, 9):
        session.observe(Token(TICKET, token_id))
    if cut_first:
        session.cut(turn, 1)
    session.observe(finished(6, (edited(0, 2), edited(3, 6), edited(4, 6))))
    if not cut_first:
        session.cut(turn, 1)
    assert list(session.interventions) == [edited(0, 2), edited(3, 4)]
    assert session.usage.answers == [3]
    session.truncate(3)
    assert session.usage.answers == []
    session.truncate(1)
    assert list(session.interventions) == [edited(0, 1)]
    session.truncate(0)
    assert list(session.interventions) == []


def test_a_turn_that_changes_no_intervention_and_one_that_fails_leave_them() -> None:
    session, _ = session_with_turn()
    session.interventions = (edited(0, 2),)
    session.observe(Started(TICKET, 2))
    session.observe(finished(3))
    assert session.interventions == (edited(0, 2),)
    session.begin(Turn(TICKET), array("I", [1, 2, 3, 4]), 8)
    session.observe(Failed(TICKET, EngineError("boom")))
    assert session.interventions == (edited(0, 2),)


IDLE = 10_000
OWNERS = [None, "one", "two"]


def table() -> SessionTable:
    return SessionTable(2 * IDLE, Tenancy(tiny_settings(), time.time).quotas)


class CountedTurns(RuleBasedStateMachine):
    """Sessions come, move and go; each count is compared with a look at all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()

    @rule(owner=st.sampled_from(OWNERS))
    def open(self, owner: str | None) -> None:
        self.table.add(Session(new_session_id(), owner))

    @rule(owner=st.sampled_from(OWNERS), state=st.sampled_from(SessionState), fails=st.booleans())
    def open_in_the_engine(self, owner: str | None, state: SessionState, fails: bool) -> None:
        session = Session(new_session_id(), owner)
        try:
            with self.table.opening(session):
                if state in TRANSITIONS[session.state]:
                    session.move(state)
                assert self.table.turns.count(owner) == self.count(owner) + session.under_way
                if fails or session.state is SessionState.CLOSED:
                    raise WrongState("no")
        except WrongState:
            pass

    @rule(number=st.integers(0, 100), state=st.sampled_from(SessionState))
    def move(self, number: int, state: SessionState) -> None:
        sessions = list(self.table)
        if sessions and state in TRANSITIONS[(session := sessions[number % len(sessions)]).state]:
            session.move(state)
            if state is SessionState.CLOSED:
                self.table.remove(session)

    @invariant()
    def counts_are_those_of_a_look_at_all(self) -> None:
        for owner in OWNERS:
            assert self.table.turns.count(owner) == self.count(owner)
            assert set(self.table.turns.of(owner)) == {each for each in self.table if each.owner == owner and each.busy}
            others = any(each.under_way and each.owner != owner for each in self.table)
            assert self.table.turns.others_run(owner) == others

    def count(self, owner: str | None) -> int:
        return sum(session.under_way for session in self.table if session.owner == owner)


TestCountedTurns = CountedTurns.TestCase
TestCountedTurns.settings = hypothesis_settings(stateful_step_count=30)


class LookedAt(Session):
    """Counts who looks whether it has a turn under way."""

    looks = 0

    @property
    def under_way(self) -> bool:
        LookedAt.looks += 1
        return super().under_way


def test_a_turn_looks_at_no_idle_session() -> None:
    sessions = table()
    for number in range(IDLE):
        sessions.add(LookedAt(new_session_id(), OWNERS[number % len(OWNERS)]))
    busy = LookedAt(new_session_id(), "one")
    sessions.add(busy)
    busy.begin(Turn(Ticket(1)), busy.history, 1)
    LookedAt.looks = 0
    assert sessions.turns.count("one") == 1
    assert sessions.turns.others_run("two")
    assert LookedAt.looks <= 2
