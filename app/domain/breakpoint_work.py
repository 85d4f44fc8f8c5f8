"""How much breakpoints may do in one step, which all sessions of the step wait for. Pure."""

from collections.abc import Iterable

from app.domain.breakpoints import Action, Breakpoint
from app.domain.errors import FieldOutOfRange

MAX_WORK = 256
"""Edits and captures of one session, counted at each of their layers: what it may do at one position."""
OPERATION_WORK = 64
"""An edit or a capture of up to so many positions at one layer takes about as long as one of a single position."""
STEP_WORK = MAX_WORK * OPERATION_WORK
"""Positions that edits and captures may reach in one step over all sessions, counted at each layer and for each of
them, and at least `OPERATION_WORK` each time. A session that does all that it may has room for as many tokens.
"""

MAX_PASS_EDITS = 4 * MAX_WORK
"""In one pass, with those that were made at its pauses. If the KV is lost, one step makes all of them again."""


def check_work(armed: Iterable[Breakpoint], more: Breakpoint) -> None:
    """Raise `FieldOutOfRange` if `more` does too much for one step, or the session with `armed` would."""
    alone, layers = work_of([more]), len(more.layers)
    if alone > MAX_WORK:
        raise FieldOutOfRange(
            f"layers: {layers} must be from 1 to {MAX_WORK // (alone // layers)} layers: with {alone // layers} edits "
            f"after each, the breakpoint would make {alone} at one position, and a step has room for {MAX_WORK}",
            param="layers",
        )
    work = work_of([*armed, more])
    if work > MAX_WORK:
        raise FieldOutOfRange(
            f"breakpoints: the session would make {work} edits and captures at one position, counted at each layer, "
            f"with this breakpoint; at most {MAX_WORK} may be: remove some, or name fewer layers or edits",
            param="breakpoints",
        )


def work_of(breakpoints: Iterable[Breakpoint]) -> int:
    """Edits and captures that breakpoints can make at one position, each counted at every layer."""
    return sum(max(1, len(each.edits)) * len(each.layers) for each in breakpoints if each.action is not Action.PAUSE)
