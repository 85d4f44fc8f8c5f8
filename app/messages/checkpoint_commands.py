"""Commands about breakpoints, captures and checkpoints."""

from dataclasses import dataclass

from app.domain.activations import PausedTurn
from app.domain.breakpoints import Breakpoint, Edit, Intervention, Positions, TensorData
from app.domain.values import SessionId, Ticket


@dataclass(frozen=True, slots=True)
class Arm:
    """Add a breakpoint to a session in any state. Answered by `Done(None)`.

    Fails as `WrongState` if it pauses and a turn runs that is not `pausable`.
    """

    ticket: Ticket
    session: SessionId
    breakpoint: Breakpoint


@dataclass(frozen=True, slots=True)
class Disarm:
    """Take one breakpoint from a session, or all (`breakpoint` None); one that is gone already is no error. Answered
    by `Done(None)`. A pause that it made goes on.
    """

    ticket: Ticket
    session: SessionId
    breakpoint: str | None = None


@dataclass(frozen=True, slots=True)
class ReadCaptures:
    """Answered by `Done(Callable[[], Captures])`: the copy may take long, so another thread makes it."""

    ticket: Ticket
    session: SessionId


@dataclass(frozen=True, slots=True)
class ClearCaptures:
    """Forget all captures. Answered by `Done(None)`."""

    ticket: Ticket
    session: SessionId


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Answered by `Done(Activation)`. Fails as `WrongState` unless the session is paused, `FieldOutOfRange` for
    positions that are not in the checkpoint.
    """

    ticket: Ticket
    session: SessionId
    positions: Positions


@dataclass(frozen=True, slots=True)
class EditCheckpoint:
    """Apply edits to the checkpoint of a paused session, all or none. Answered by `Done(None)`.

    Fails as `WrongState`, and as `FieldOutOfRange` for positions outside the checkpoint or a result that is not finite.
    """

    ticket: Ticket
    session: SessionId
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Put another residual stream in the place of a checkpoint's; shape, dtype and finite values have been checked
    except against this checkpoint's number of positions. Answered by `Done(None)`.
    """

    ticket: Ticket
    session: SessionId
    tensor: TensorData


@dataclass(frozen=True, slots=True)
class Lens:
    """Apply the final norm and the head to a checkpoint. Answered by `Done(CheckpointLens)`."""

    ticket: Ticket
    session: SessionId
    positions: Positions
    top_k: int


@dataclass(frozen=True, slots=True)
class OpenMap:
    """Hold on to the residual streams of now at some positions and layers (None: all) for `MapLens`, until `CloseMap`.

    Answered by `Done(ActivationMap)`; `FieldOutOfRange` for positions that are not in the history, or too many.
    """

    ticket: Ticket
    session: SessionId
    positions: Positions
    layers: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class MapLens:
    """Apply the final norm and the head to residual streams `[first, end)` of the session's map, counted through its
    layers. Answered by `Done(LensRows)`; `WrongState` if none is open.
    """

    ticket: Ticket
    session: SessionId
    first: int
    end: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CloseMap:
    """Let go of the session's map, if it has one. Answered by `Done(None)`."""

    ticket: Ticket
    session: SessionId


@dataclass(frozen=True, slots=True)
class ReadNorms:
    """Answered by `Done(Callable[[], ActivationNorms])`, as `ReadCaptures` is. Fails as `OpenMap` does. `vector` is
    `[hidden_size]`, and not zero.
    """

    ticket: Ticket
    session: SessionId
    positions: Positions
    layers: tuple[int, ...] | None
    vector: TensorData | None


@dataclass(frozen=True, slots=True)
class ReadPaused:
    """Read a paused turn, to continue it elsewhere. Answered by `Done(PausedTurn)`; `WrongState` unless paused."""

    ticket: Ticket
    session: SessionId


@dataclass(frozen=True, slots=True)
class Reinstate:
    """Give an imported session its breakpoints, edits and paused turn back. All of it has been checked.

    A `paused` turn has the ticket `turn` from now on. Answered by `Done(None)`.
    """

    ticket: Ticket
    session: SessionId
    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    paused: PausedTurn | None = None
    turn: Ticket | None = None


BreakpointCommand = Arm | Disarm | ReadCaptures | ClearCaptures | ReadNorms | OpenMap | MapLens | CloseMap | Reinstate
CheckpointCommand = ReadCheckpoint | EditCheckpoint | WriteCheckpoint | Lens | ReadPaused
