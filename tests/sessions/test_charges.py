"""What a turn costs the one whose limit it counts against."""

from __future__ import annotations

import pytest

from app.domain.errors import EngineError
from app.domain.values import FinishReason, Ticket, TurnUsage
from app.messages import Failed, Started, TurnEvent, TurnFinished
from app.sessions.charges.turn_charge import TurnCharge

SENT, CACHED, GENERATED = 300, 60, 7
TICKET = Ticket(1)
STARTED = Started(TICKET, CACHED)


def finished(cached: int, generated: int) -> TurnFinished:
    usage = TurnUsage(SENT, cached, generated, tokens_recomputed=40)
    return TurnFinished(TICKET, FinishReason.CANCELLED, usage, SENT + generated)


@pytest.mark.parametrize(
    ("events", "cost"),
    [
        ([STARTED, finished(CACHED, GENERATED)], SENT - CACHED + GENERATED),
        ([finished(0, 0)], 0),  # it was cancelled in the queue
        ([STARTED, Failed(TICKET, EngineError("x"))], 0),
    ],
)
def test_the_end_of_a_turn_settles_once(events: list[TurnEvent], cost: int) -> None:
    settled: list[int] = []
    charge = TurnCharge(settled.append, sent=SENT)
    for event in events:
        charge.observe(event)
    assert settled == [cost]


def test_a_copy_that_its_client_has_left_settles_once() -> None:
    settled: list[int] = []
    charge = TurnCharge(settled.append, sent=SENT, generated=GENERATED)
    charge.drop()
    charge.observe(finished(CACHED, GENERATED))
    assert settled == [0]


def test_a_copy_of_a_paused_turn_costs_only_what_it_generates_itself() -> None:
    settled: list[int] = []
    charge = TurnCharge(settled.append, sent=0, generated=GENERATED)
    for event in (STARTED, finished(0, GENERATED + 2)):
        charge.observe(event)
    assert settled == [2]
