"""Dispatching each of these commands to the code that carries it out."""

from typing import assert_never

from app.gpu.commands.whitebox.activation_maps import open_map, read_norms
from app.gpu.commands.whitebox.breakpoints import arm, disarm
from app.gpu.commands.whitebox.checkpoint_reads import read_activation, read_captures, read_paused
from app.gpu.commands.whitebox.checkpoint_writes import edit_checkpoint, write_checkpoint
from app.gpu.commands.whitebox.checkpoints import CheckpointHandler
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
