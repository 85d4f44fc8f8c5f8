"""Carrying out commands about breakpoints, and about what a paused turn has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from app.breakpoints import (
    MAX_INTERVENTIONS,
    Action,
    Activation,
    Capture,
    Captures,
    Edit,
    EditOp,
    Intervention,
    LensPosition,
    PausedTurn,
    Positions,
    TensorData,
)
from app.errors import FieldOutOfRange, WrongState
from app.gpu.checkpoints import Captured, Checkpoint, StoredTensor
from app.gpu.conditions import Span, select
from app.gpu.interventions import InterventionLog
from app.gpu.placement import Placement
from app.gpu.sequence import Sequence, TurnState
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


MAX_WRITTEN_BYTES = 64 << 20
"""What one session may keep of activations that a client has written, in memory and in the journal."""


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
                return partial(_captures, tuple(sequence.captures.records), sequence.captures.dropped)
            case ReadCheckpoint():
                return _read(_checkpoint(sequence), command.positions)
            case ReadPaused():
                return _read_paused(sequence)
            case Lens():
                return self._lens(sequence, command.positions, command.top_k)
            case Arm():
                _arm(sequence, command)
            case Disarm():
                _disarm(sequence, command.breakpoint)
            case ClearCaptures():
                sequence.captures.clear()
            case EditCheckpoint():
                _edit(sequence, command.edits)
            case WriteCheckpoint():
                _write(sequence, command)
            case Reinstate():
                self._reinstate(sequence, command)
        return None

    def _lens(self, sequence: Sequence, positions: Positions, top_k: int) -> tuple[LensPosition, ...]:
        checkpoint = _checkpoint(sequence)
        first, end = _chosen(checkpoint, positions)
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
    running = sequence.busy and sequence.turn is not None and not sequence.turn.pausable
    if command.breakpoint.action is Action.PAUSE and running:
        raise WrongState(f"session {command.session} is running a turn of an API that cannot tell of a pause")
    sequence.breakpoints[command.breakpoint.id] = command.breakpoint


def _disarm(sequence: Sequence, breakpoint_id: str | None) -> None:
    if breakpoint_id is None:
        sequence.breakpoints.clear()
    else:
        sequence.breakpoints.pop(breakpoint_id, None)


def _captures(captured: Iterable[Captured], dropped: int) -> Captures:
    records = tuple(
        Capture(
            each.breakpoint,
            each.layer,
            each.positions,
            each.token_ids,
            each.hidden.read(0, len(each.positions)),
        )
        for each in captured
    )
    return Captures(records, dropped)


def _read(checkpoint: Checkpoint, positions: Positions) -> Activation:
    first, end = _chosen(checkpoint, positions)
    tensor = checkpoint.hidden.read(first - checkpoint.first, end - checkpoint.first)
    return Activation(checkpoint.boundary - 1, first, end, tensor)


def _read_paused(sequence: Sequence) -> PausedTurn:
    checkpoint, turn = _checkpoint(sequence), sequence.turn
    assert turn is not None
    return PausedTurn(
        turn.sampling,
        turn.stop,
        turn.prompt_tokens,
        checkpoint.info(),
        checkpoint.hidden.read(0, checkpoint.length),
        sequence.interventions.snapshot(),
    )


def _edit(sequence: Sequence, edits: tuple[Edit, ...]) -> None:
    checkpoint = _checkpoint(sequence)
    if len(sequence.interventions) + len(edits) > MAX_INTERVENTIONS:
        raise FieldOutOfRange(
            f"the session's KV has been computed with {len(sequence.interventions)} edits; at most "
            f"{MAX_INTERVENTIONS} are kept",
            param="edits",
        )
    hidden, made = checkpoint.hidden, []
    for index, edit in enumerate(edits):
        first, end = _chosen(checkpoint, edit.positions, param=f"edits.{index}.positions")
        hidden = hidden.edited(first - checkpoint.first, end - checkpoint.first, edit)
        made.append(Intervention(first, end, checkpoint.boundary, edit))
    if not hidden.is_finite():
        raise FieldOutOfRange("the edits lead to values that are not finite numbers", param="edits")
    _put_back(sequence, hidden, made)


def _write(sequence: Sequence, command: WriteCheckpoint) -> None:
    checkpoint, tensor = _checkpoint(sequence), command.tensor
    if (tensor.dtype, tensor.shape) != (checkpoint.hidden.dtype, checkpoint.hidden.shape):
        raise FieldOutOfRange(
            f"the activation must be {checkpoint.hidden.dtype} {list(checkpoint.hidden.shape)}, "
            f"not {tensor.dtype} {list(tensor.shape)}",
            param="activation",
        )
    if sequence.interventions.written_bytes + len(tensor.data) > MAX_WRITTEN_BYTES:
        raise FieldOutOfRange(
            f"the session keeps {sequence.interventions.written_bytes} bytes of written activations, in case its KV is "
            f"lost; at most {MAX_WRITTEN_BYTES} are kept",
            param="activation",
        )
    sequence.interventions.forget(checkpoint.boundary, checkpoint.first, checkpoint.end)
    edit = Edit(EditOp.REPLACE, vector=tensor)
    made = Intervention(checkpoint.first, checkpoint.end, checkpoint.boundary, edit)
    _put_back(sequence, checkpoint.hidden.edited(0, checkpoint.length, edit), [made])


def _put_back(sequence: Sequence, hidden: StoredTensor, made: list[Intervention]) -> None:
    checkpoint = _checkpoint(sequence)
    checkpoint.hidden = hidden
    for intervention in made:
        sequence.interventions.add(intervention)


def _checkpoint(sequence: Sequence) -> Checkpoint:
    if sequence.checkpoint is None or sequence.turn is None or not sequence.turn.paused:
        raise WrongState(f"session {sequence.session} is not paused: there is no checkpoint")
    return sequence.checkpoint


def _chosen(checkpoint: Checkpoint, positions: Positions, *, param: str = "positions") -> Span:
    """The part of the checkpoint that `positions` chooses; `last` is its own last position."""
    span = (checkpoint.first, checkpoint.end)
    chosen = span[1] - 1, span[1]
    if not positions.last:
        found = select(positions, span, prompt_tokens=0)
        wanted = positions.first, span[1] if positions.end is None else positions.end
        if found is None or (positions.end is not None and found != wanted):
            raise FieldOutOfRange(
                f"{param} must be within {span[0]}:{span[1]}, the positions of the checkpoint", param=param
            )
        chosen = found
    return chosen
