"""The edits that a context will be computed with, which a turn that waits asks for at each step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, Intervention
from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.passes.ways import expected_edits
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState

HALVE, DOUBLE = Edit(EditOp.SCALE, 0.5), Edit(EditOp.SCALE, 2.0)


def steered(name: str, edit: Edit) -> Breakpoint:
    return Breakpoint(name, (0,), Action.EDIT, edits=(edit,))


def waiting() -> TokenSequence:
    """A turn of 20 tokens, of which 8 have been computed with an edit before."""
    sequence = TokenSequence(SessionId("ses_1"), b"", tokens=[1] * 20, reached=8)
    sequence.breakpoints["a"] = steered("a", HALVE)
    sequence.interventions.add(Intervention(0, 8, 1, HALVE))
    sequence.turn = TurnState(Ticket(1), SamplingParams(seed=0), StopRule(1), 20, 0)
    return sequence


def test_they_are_worked_out_once_while_the_turn_waits() -> None:
    sequence = waiting()
    log, limit = expected_edits(sequence)
    assert (log.snapshot(), limit) == ((Intervention(0, 20, 1, HALVE),), 20)
    assert expected_edits(sequence)[0] is log
    assert sequence.interventions.snapshot() == (Intervention(0, 8, 1, HALVE),)


CHANGES: dict[str, Callable[[TokenSequence], object]] = {
    "another breakpoint": lambda sequence: sequence.breakpoints.update(b=steered("b", DOUBLE)),
    "no breakpoint": lambda sequence: sequence.breakpoints.clear(),
    "one more edit": lambda sequence: sequence.interventions.add(Intervention(3, 4, 1, DOUBLE)),
    "fewer edits": lambda sequence: sequence.interventions.truncate(4),
    "one more token": lambda sequence: sequence.tokens.append(1),
    "an edit that pauses": lambda sequence: sequence.breakpoints.update(b=Breakpoint("b", (0,), Action.PAUSE)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_them_is_followed(change: Callable[[TokenSequence], object]) -> None:
    sequence, other = waiting(), waiting()
    before = expected_edits(sequence)
    change(sequence)
    change(other)
    (log, limit), (fresh, fresh_limit) = expected_edits(sequence), expected_edits(other)
    assert (log.snapshot(), limit) == (fresh.snapshot(), fresh_limit)
    assert (log.snapshot(), limit) != (before[0].snapshot(), before[1])
