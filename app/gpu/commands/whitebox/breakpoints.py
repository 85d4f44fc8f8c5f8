"""Breakpoints of a session, added and taken away."""

from app.domain.breakpoints import Action
from app.domain.errors import WrongState
from app.gpu.state.sequence import TokenSequence
from app.messages import Arm, Disarm


def arm(sequence: TokenSequence, command: Arm) -> None:
    """Add a breakpoint. Raises `WrongState` if it would pause a turn that must not."""
    turn = sequence.turn
    cannot_pause = turn is not None and not turn.paused and not turn.pausable
    if command.breakpoint.action is Action.PAUSE and cannot_pause:
        raise WrongState(f"session {command.session} is running a turn of an API that cannot report a pause")
    sequence.breakpoints[command.breakpoint.id] = command.breakpoint
    sequence.plain_to = 0


def disarm(sequence: TokenSequence, command: Disarm) -> None:
    """Take one breakpoint away, or all; one that is gone already is no error."""
    if command.breakpoint is None:
        sequence.breakpoints.clear()
    else:
        sequence.breakpoints.pop(command.breakpoint, None)
