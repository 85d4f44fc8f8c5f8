"""Carrying out commands about breakpoints, and about what a paused turn has left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from app.domain.activations import LensPosition
from app.domain.breakpoints import Action, Positions, TensorData
from app.domain.errors import WrongState
from app.gpu.commands.checkpoint_reads import checkpoint_of, chosen_span, read_activation, read_captures, read_paused
from app.gpu.commands.checkpoint_writes import edit_checkpoint, write_checkpoint
from app.gpu.kv_tiers.placement import Placement
from app.gpu.passes.conditions import Span
from app.gpu.state.checkpoints import Checkpoint, StoredTensor
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.sequence import Sequence
from app.gpu.state.turn import TurnState
from app.messages import (
    Arm,
    BreakpointCommand,
    CheckpointCommand,
    ClearCaptures,
    Disarm,
    EditCheckpoint,
    Lens,
    ReadCaptures,
    ReadCheckpoint,
    ReadPaused,
    Reinstate,
    WriteCheckpoint,
)

Predict = Callable[[StoredTensor, Span, int], list[list[tuple[int, float]]]]
"""For each row of a span of a residual stream, the most likely tokens after the final norm and the head."""


class CheckpointHandler:
    """Every answer is the value of a `Done`; whatever cannot be done raises DjinnError and changes nothing."""

    def __init__(self, placement: Placement, predict: Predict, store: Callable[[TensorData], StoredTensor]) -> None:
        self._placement = placement
        self._predict = predict
        self._store = store

    def handle(self, command: BreakpointCommand | CheckpointCommand, sequence: Sequence) -> object:
        """Carry out a command on its session."""
        match command:
            case ReadCaptures():
                return partial(read_captures, tuple(sequence.captures.records), sequence.captures.dropped)
            case ReadCheckpoint():
                return read_activation(checkpoint_of(sequence), command.positions)
            case ReadPaused():
                return read_paused(sequence)
            case Lens():
                return self._lens(sequence, command.positions, command.top_k)
            case Arm():
                _arm(sequence, command)
            case Disarm():
                _disarm(sequence, command.breakpoint)
            case ClearCaptures():
                sequence.captures.clear()
            case EditCheckpoint():
                edit_checkpoint(sequence, command.edits)
            case WriteCheckpoint():
                write_checkpoint(sequence, command)
            case Reinstate():
                self._reinstate(sequence, command)
        return None

    def _lens(self, sequence: Sequence, positions: Positions, top_k: int) -> tuple[LensPosition, ...]:
        checkpoint = checkpoint_of(sequence)
        first, end = chosen_span(checkpoint, positions)
        rows = self._predict(checkpoint.hidden, (first - checkpoint.first, end - checkpoint.first), top_k)
        return tuple(
            LensPosition(position, sequence.tokens[position], tuple(top))
            for position, top in zip(range(first, end), rows, strict=True)
        )

    def _reinstate(self, sequence: Sequence, command: Reinstate) -> None:
        sequence.breakpoints = {each.id: each for each in command.breakpoints}
        sequence.interventions = InterventionLog(command.interventions)
        sequence.assume_computed()
        paused = command.paused
        if paused is None or command.turn is None:
            return
        info = paused.checkpoint
        self._placement.cut(sequence, info.first)
        sequence.interventions = InterventionLog(paused.interventions)
        sequence.reached = info.first
        sequence.turn = TurnState(
            command.turn,
            paused.sampling,
            paused.stop,
            paused.prompt_tokens,
            kept=paused.prompt_tokens,
            interventions=command.interventions,
            paused=True,
            cached_tokens=0,
        )
        sequence.checkpoint = Checkpoint(
            info.layer + 1,
            info.first,
            info.end - info.first,
            self._store(paused.hidden),
            info.in_pass,
            info.breakpoint,
            info.created_at,
            held=False,
        )


def _arm(sequence: Sequence, command: Arm) -> None:
    turn = sequence.turn
    cannot_pause = turn is not None and not turn.paused and not turn.pausable
    if command.breakpoint.action is Action.PAUSE and cannot_pause:
        raise WrongState(f"session {command.session} is running a turn of an API that cannot tell of a pause")
    sequence.breakpoints[command.breakpoint.id] = command.breakpoint


def _disarm(sequence: Sequence, breakpoint_id: str | None) -> None:
    if breakpoint_id is None:
        sequence.breakpoints.clear()
    else:
        sequence.breakpoints.pop(breakpoint_id, None)
