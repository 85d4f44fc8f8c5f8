"""Sessions with turns are counted for their owners, and idle ones cost a turn nothing."""

from __future__ import annotations

import time

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.bridge.turn import Turn
from app.domain.errors import WrongState
from app.domain.session_ids import new_session_id
from app.domain.values import SessionState, Ticket
from app.sessions.session import TRANSITIONS, Session
from app.sessions.table import SessionTable
from app.tenants.tenancy import Tenancy
from tests.serving import tiny_settings

IDLE = 10_000
OWNERS = [None, "one", "two"]


def table() -> SessionTable:
    return SessionTable(2 * IDLE, Tenancy(tiny_settings(), time.time).quotas)


class CountedTurns(RuleBasedStateMachine):
    """Sessions come, move and go; each count is compared with a look at all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.opening: list[Session] = []

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
