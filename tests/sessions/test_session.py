"""A session's state, and what a cut leaves of it."""

from array import array

import pytest

from app.domain.breakpoints import Edit, EditOp, Intervention
from app.domain.errors import EngineError
from app.domain.values import FinishReason, SessionId, Ticket, TurnUsage
from app.engine_process.turn import Turn
from app.messages import Failed, Started, Token, TurnFinished
from app.sessions.session import Session

TICKET = Ticket(1)


def session_with_turn() -> tuple[Session, Turn]:
    """A session with a history of 2 tokens and a turn of 1 more."""
    session, turn = Session(SessionId("ses_1"), None, history=array("I", [1, 2])), Turn(TICKET)
    session.begin(turn, array("I", [1, 2, 3]), 8)
    return session, turn


def finished(history_tokens: int, interventions: tuple[Intervention, ...] | None = None) -> TurnFinished:
    usage = TurnUsage(prompt_tokens=3, cached_tokens=2, completion_tokens=history_tokens - 3)
    return TurnFinished(TICKET, FinishReason.STOP, usage, history_tokens, interventions)


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
