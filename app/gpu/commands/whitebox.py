"""Carrying out the commands that look into the model of a session, or change what it computes there."""

from typing import assert_never

from app.domain.breakpoints import Action
from app.domain.errors import WrongState
from app.gpu.commands.activation_maps import open_map, read_norms
from app.gpu.commands.checkpoint_reads import read_activation, read_captures, read_paused
from app.gpu.commands.checkpoint_writes import edit_checkpoint, write_checkpoint
from app.gpu.commands.checkpoints import CheckpointHandler
from app.gpu.state.sequence import TokenSequence
from app.messages import (
    Arm,
    BreakpointCommand,
    CheckpointCommand,
    ClearCaptures,
    CloseMap,
    Disarm,
    EditCheckpoint,
    Lens,
    MapLens,
    OpenMap,
    ReadCaptures,
    ReadCheckpoint,
    ReadNorms,
    ReadPaused,
    Reinstate,
    WriteCheckpoint,
)


def look_inside(
    sequence: TokenSequence, command: BreakpointCommand | CheckpointCommand, checkpoints: CheckpointHandler
) -> object:
    """Carry out one such command on its session; returns what `Done` answers. Raises DjinnError if the session's state
    does not allow it.
    """
    match command:
        case Arm():
            arm(sequence, command)
        case Disarm():
            disarm(sequence, command)
        case ReadCaptures():
            return read_captures(sequence)
        case ClearCaptures():
            checkpoints.clear_captures(sequence)
        case ReadNorms():
            return read_norms(sequence, command)
        case OpenMap():
            return open_map(sequence, command)
        case MapLens():
            return checkpoints.map_lens(sequence, command)
        case CloseMap():
            sequence.map = None
        case ReadCheckpoint():
            return read_activation(sequence, command.positions)
        case EditCheckpoint():
            edit_checkpoint(sequence, command.edits)
        case WriteCheckpoint():
            write_checkpoint(sequence, command)
        case ReadPaused():
            return read_paused(sequence)
        case Lens():
            return checkpoints.lens(sequence, command)
        case Reinstate():
            checkpoints.reinstate(sequence, command)
        case _:
            assert_never(command)
    return None


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
