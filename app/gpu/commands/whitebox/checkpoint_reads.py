"""Reading the checkpoint of a paused turn and the captures of a session, as clients get them."""

from collections.abc import Callable, Iterable
from functools import partial

from app.domain.activations import Activation, Capture, Captures, PausedTurn
from app.domain.breakpoints import Positions
from app.domain.errors import FieldOutOfRange, WrongState
from app.gpu.state.checkpoints import Captured, Checkpoint
from app.gpu.state.conditions import Span
from app.gpu.state.sequence import TokenSequence
from app.gpu.state.turn import TurnState


def paused_turn_of(sequence: TokenSequence) -> tuple[TurnState, Checkpoint]:
    """Its paused turn, and where that has stopped. Raises `WrongState` if it has none."""
    turn, checkpoint = sequence.turn, sequence.checkpoint
    if turn is None or checkpoint is None or not turn.paused:
        raise WrongState(f"session {sequence.session} is not paused: there is no checkpoint")
    return turn, checkpoint


def checkpoint_of(sequence: TokenSequence) -> Checkpoint:
    """The checkpoint of the sequence's paused turn. Raises `WrongState` if it has none."""
    return paused_turn_of(sequence)[1]


def chosen_span(checkpoint: Checkpoint, positions: Positions, *, param: str = "positions") -> Span:
    """The positions of the checkpoint that `positions` chooses; `last` is its own last one. Raises `FieldOutOfRange`
    with `param`.
    """
    first, end = checkpoint.first, checkpoint.end
    if positions.last:
        return end - 1, end
    chosen = max(first, positions.first), end if positions.end is None else min(end, positions.end)
    wanted = positions.first, positions.end
    if chosen[0] >= chosen[1] or (positions.end is not None and chosen != wanted):
        raise FieldOutOfRange(f"{param} must be within {first}:{end}, the positions of the checkpoint", param=param)
    return chosen


def read_activation(sequence: TokenSequence, positions: Positions) -> Activation:
    """The residual stream at some positions of the checkpoint. Raises `WrongState`, `FieldOutOfRange`."""
    checkpoint = checkpoint_of(sequence)
    first, end = chosen_span(checkpoint, positions)
    tensor = checkpoint.hidden.read(first - checkpoint.first, end - checkpoint.first)
    return Activation(checkpoint.boundary - 1, first, end, tensor)


def read_paused(sequence: TokenSequence) -> PausedTurn:
    """Everything that another engine needs to go on with the turn. Raises `WrongState`."""
    turn, checkpoint = paused_turn_of(sequence)
    return PausedTurn(
        turn.sampling,
        turn.stop,
        turn.prompt_tokens,
        checkpoint.info(),
        checkpoint.hidden.read(0, checkpoint.length),
        sequence.interventions.snapshot(),
        turn.cached_tokens or 0,
        turn.tokens_recomputed,
    )


def read_captures(sequence: TokenSequence) -> Callable[[], Captures]:
    """A function for any thread that copies the captures of now. It waits for their copies to the host."""
    return partial(_copy_captures, tuple(sequence.captures.records), sequence.captures.dropped)


def _copy_captures(captured: Iterable[Captured], dropped: int) -> Captures:
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
