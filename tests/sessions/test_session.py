from __future__ import annotations

from array import array

import pytest

from app.bridge.turn import Turn
from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Edit, EditOp, Intervention, Pass
from app.domain.errors import EngineError, WrongState
from app.domain.values import FinishReason, SessionId, SessionState, Ticket, TurnUsage
from app.messages import Failed, Paused, Started, Token, TurnFinished
from app.sessions.session import Session

TICKET = Ticket(1)


def session_in(state: SessionState) -> Session:
    return Session(SessionId("ses_1"), owner=None, state=state)


def session_with_turn() -> tuple[Session, Turn]:
    """A session with a history of 2 tokens and a turn of 1 more."""
    session, turn = session_in(SessionState.IDLE), Turn(TICKET)
    session.history = array("I", [1, 2])
    session.begin(turn, array("I", [1, 2, 3]), 8)
    return session, turn


def finished(history_tokens: int, interventions: tuple[Intervention, ...] | None = None) -> TurnFinished:
    usage = TurnUsage(prompt_tokens=3, cached_tokens=2, completion_tokens=history_tokens - 3)
    return TurnFinished(TICKET, FinishReason.STOP, usage, history_tokens, interventions)


def paused() -> Paused:
    return Paused(TICKET, CheckpointInfo(1, 2, 3, 64, "float32", 256, Pass.DECODE, None, 0.1, 1.0), TurnUsage())


def edited(first: int, end: int) -> Intervention:
    return Intervention(first, end, 2, Edit(EditOp.SCALE, 0.9))


def test_require_names_the_state_that_is_in_the_way() -> None:
    with pytest.raises(WrongState, match=r"cannot rewind: session ses_1 is running, it must be idle"):
        session_in(SessionState.RUNNING).require(SessionState.IDLE, to="rewind")


def test_a_cut_of_an_earlier_turn_changes_nothing() -> None:
    session, turn = session_with_turn()
    session.observe(finished(3))
    session.begin(Turn(Ticket(2)), array("I", [1, 2, 3, 4, 5]), 8)
    session.cut(turn, 0)
    session.observe(finished(5))
    assert list(session.history) == [1, 2, 3, 4, 5]


def test_events_after_the_close_are_passed_over() -> None:
    session, _ = session_with_turn()
    session.move(SessionState.CLOSED)
    session.observe(Started(TICKET, 0))
    session.observe(finished(3))
    assert session.state is SessionState.CLOSED


def test_only_a_session_without_a_turn_expires() -> None:
    session, _ = session_with_turn()
    session.ttl_s = 10
    for event in (Started(TICKET, 2), paused()):
        assert session.expires_at is None
        session.observe(event)
    assert (session.state, session.expires_at) == (SessionState.PAUSED, None)
    session.observe(finished(3))
    assert session.expires_at == session.used_at + 10


def test_a_pause_that_a_cancel_overtakes_is_none() -> None:
    session, turn = session_with_turn()
    session.observe(Started(TICKET, 2))
    session.end(turn)
    session.observe(paused())
    assert session.state == "running"
    session.observe(finished(3))
    assert session.state == "idle"


def test_while_a_turn_is_in_the_session_its_settled_history_is_that_before() -> None:
    session, _ = session_with_turn()
    session.interventions = (edited(0, 2),)
    for event in (Started(TICKET, 2), Token(TICKET, 7), paused()):
        session.observe(event)
        assert list(session.settled_history) == [1, 2]
        assert session.settled_interventions == (edited(0, 2),)
    session.observe(finished(4, (edited(0, 4),)))
    assert list(session.settled_history) == [1, 2, 3, 7]
    assert session.settled_interventions == (edited(0, 4),)


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
