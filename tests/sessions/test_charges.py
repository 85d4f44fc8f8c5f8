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
