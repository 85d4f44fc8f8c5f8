from __future__ import annotations

from array import array
from itertools import product

import pytest

from app.domain import FinishReason, SessionId, SessionState, Ticket, TurnUsage
from app.errors import EngineError, WrongState
from app.messages import Failed, Started, Token, TurnFinished
from app.session import Session
from app.stream import Turn

TICKET = Ticket(1)
LEGAL = {
    ("idle", "queued"),
    ("idle", "closed"),
    ("queued", "running"),
    ("queued", "idle"),
    ("queued", "closed"),
    ("running", "paused"),
    ("running", "idle"),
    ("running", "closed"),
    ("paused", "queued"),
    ("paused", "idle"),
    ("paused", "closed"),
}


def session_in(state: SessionState) -> Session:
    return Session(SessionId("ses_1"), owner=None, state=state)


def session_with_turn() -> tuple[Session, Turn]:
    """A session with a history of 2 tokens and a turn of 1 more."""
    session, turn = session_in(SessionState.IDLE), Turn(TICKET)
    session.history = array("I", [1, 2])
    session.begin(turn, array("I", [1, 2, 3]))
    return session, turn


def finished(history_tokens: int) -> TurnFinished:
    usage = TurnUsage(prompt_tokens=3, cached_tokens=2, completion_tokens=history_tokens - 3)
    return TurnFinished(TICKET, FinishReason.STOP, usage, history_tokens)


@pytest.mark.parametrize(("state", "to"), list(product(SessionState, SessionState)))
def test_every_pair_of_states_is_either_legal_or_refused_by_name(state: SessionState, to: SessionState) -> None:
    session = session_in(state)
    if (state, to) in LEGAL:
        session.move(to)
        assert session.state == to
    else:
        with pytest.raises(WrongState, match=f"is {state} and cannot become {to}"):
            session.move(to)
        assert session.state == state


def test_require_names_the_state_that_is_in_the_way() -> None:
    with pytest.raises(WrongState, match=r"cannot rewind: session ses_1 is running, it must be idle"):
        session_in(SessionState.RUNNING).require(SessionState.IDLE, to="rewind")


def test_a_turn_goes_from_queue_to_idle_and_leaves_its_tokens_and_usage() -> None:
    session, _ = session_with_turn()
    assert session.state == "queued"
    session.observe(Started(TICKET, 2))
    assert session.state == "running"
    session.observe(Token(TICKET, 7))
    session.observe(Token(TICKET, 8))
    session.observe(finished(5))
    assert session.state == "idle"
    assert list(session.history) == [1, 2, 3, 7, 8]
    assert session.usage.prompt_tokens == 3
    assert session.usage.completion_tokens == 2


def test_a_failed_turn_leaves_the_history_as_it_was() -> None:
    session, _ = session_with_turn()
    session.observe(Started(TICKET, 2))
    session.observe(Token(TICKET, 7))
    session.observe(Failed(TICKET, EngineError("boom")))
    assert session.state is SessionState.IDLE
    assert list(session.history) == [1, 2]


@pytest.mark.parametrize("cut_first", [True, False])
def test_a_cut_counts_whether_it_comes_before_the_end_or_after(cut_first: bool) -> None:
    session, turn = session_with_turn()
    session.observe(Started(TICKET, 2))
    for token_id in (7, 8, 9):
        session.observe(Token(TICKET, token_id))
    if cut_first:
        session.cut(turn, 1)
    session.observe(finished(4 if cut_first else 6))
    if not cut_first:
        session.cut(turn, 1)
    assert list(session.history) == [1, 2, 3, 7]
    assert session.usage.completion_tokens == 1


def test_a_cut_of_an_earlier_turn_changes_nothing() -> None:
    session, turn = session_with_turn()
    session.observe(finished(3))
    session.begin(Turn(Ticket(2)), array("I", [1, 2, 3, 4, 5]))
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
    assert session.expires_at is None
    session.observe(finished(3))
    assert session.expires_at == session.used_at + 10
