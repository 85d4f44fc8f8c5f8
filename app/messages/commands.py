"""Commands: all that the event loop tells the engine."""

from dataclasses import dataclass

from app.domain.activations import PausedTurn
from app.domain.breakpoints import NEXT_BREAKPOINT, Breakpoint, Edit, Intervention, Positions, TensorData, Until
from app.domain.values import FinishReason, Phase, Residency, SamplingParams, SessionId, StopRule, Ticket


@dataclass(frozen=True, slots=True)
class Submit:
    """Run one turn: append `token_ids` to the session's history and generate.

    With `replace`, `token_ids` is the whole wanted history: the engine keeps the longest common prefix with the history
    that it has (and its KV) and drops what came after. Breakpoints that pause are passed unless the turn is `pausable`.

    If KV is missing for `apart_tokens` of the prompt or more (0: never mind), the turn may wait for another server to
    compute it: then `Lacking` says so, and the turn goes on after `ReceivePrompt` or `ComputePrompt`.
    """

    ticket: Ticket
    session: SessionId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRule
    replace: bool = False
    pausable: bool = True
    apart_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with a paused turn. Fails as `WrongState` unless it is paused; its other ends are those of a `Submit`."""

    ticket: Ticket
    session: SessionId
    until: Until = NEXT_BREAKPOINT


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the turn `turn`, keep the session. Answered by `Done(tokens: int)`, the length of the history now.

    `keep` is the number of generated tokens that stay in the history (None: all of them); the turn's own
    `TurnFinished` carries `reason`. A turn that has just ended by itself is cut all the same, unless a newer one has
    begun.
    A stop string found in the text is a `Cancel` with `reason=STOP`.
    """

    ticket: Ticket
    session: SessionId
    turn: Ticket
    keep: int | None = None
    reason: FinishReason = FinishReason.CANCELLED


TurnCommand = Submit | Resume | Cancel


@dataclass(frozen=True, slots=True)
class Open:
    """Make the session known to the engine, with the history that it has already. Answered by `Done(None)`.

    KV prefixes are shared only between sessions of one `namespace` (None: that of the `tenant`): no tenant ever sees
    another's timing. KV on disk that belongs to a beginning of `token_ids` is taken up again. `interventions` are those
    that the history was computed with, `breakpoints` those that are armed.
    """

    ticket: Ticket
    session: SessionId
    tenant: str = ""
    residency: Residency = Residency.BEST_EFFORT
    token_ids: tuple[int, ...] = ()
    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Open `child` with the history, the breakpoints and, copy-on-write, the KV of `session`; a paused one's child is
    paused in the same place. Answered by `Done(tokens: int)`.

    `turn` is the ticket of the child's paused turn, None if `session` is idle; fails as `WrongState` if that is wrong.
    """

    ticket: Ticket
    session: SessionId
    child: SessionId
    turn: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Rewind:
    """Drop every token of the history from position `to_token` on. Answered by `Done(tokens: int)`."""

    ticket: Ticket
    session: SessionId
    to_token: int


@dataclass(frozen=True, slots=True)
class Close:
    """Forget the session and free everything it holds; a running turn ends as cancelled. Answered by `Done(None)`."""

    ticket: Ticket
    session: SessionId


@dataclass(frozen=True, slots=True)
class FreeHost:
    """Take the KV of a session without a turn out of host memory: to disk, or it is lost if it does not fit there.
    Answered by `Done(None)` when that has been ordered; nothing is if the KV is elsewhere.
    """

    ticket: Ticket
    session: SessionId


@dataclass(frozen=True, slots=True)
class SetPhase:
    """Say what the client is doing, and when it will go on. Answered by `Done(None)`; `Placed` tells of moves of KV.

    `resume_in_ms` is counted from now; None: unknown. Fails as `WrongState` while a turn is in the session.
    """

    ticket: Ticket
    session: SessionId
    phase: Phase
    resume_in_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Export:
    """Write the session's history and KV to the file `path`. Answered by `Done(ExportedKV)` when the file is whole.

    KV that cannot be brought to the host is left out: the file is then only the history. `about` is for the importer;
    the engine only carries it. Fails as `WrongState` while a turn is in the session.
    """

    ticket: Ticket
    session: SessionId
    path: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Import:
    """Open the session from the exported file `path`, which the engine takes over. Answered by `Done(ImportedKV)`.

    Its KV is shared only between sessions of one `namespace`, which need not be all of the `tenant`. Fails as
    `BadExport` if the file is not whole, or not of this model.
    """

    ticket: Ticket
    session: SessionId
    path: str
    namespace: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class SendKV:
    """Send the session's history and KV to another server's engine, over a connection that the engine has been given
    under the number `connection`. Answered by `Done(SentKV)` when all of it has been written to the connection.

    The session stays as it is. KV that cannot be brought to the host is left out. Fails as `WrongState` while a turn
    runs, or if the session has captures: they do not travel.
    """

    ticket: Ticket
    session: SessionId
    connection: int


@dataclass(frozen=True, slots=True)
class ReceiveKV:
    """Open the session with the history `token_ids`, and with the KV that `SendKV` of another server's engine sends
    over the connection of that number. Answered by `Done(ReceivedKV)` when all of it has come.

    The KV goes to host memory, or to disk if the host has no room. Fails as `PeerFull` if neither has, as
    `PeerMismatch` if it is not of this model, as `EngineError` if the connection ends early: then there is no such
    session. The other fields are as in `Open`. `interventions` are those that the KV was computed with. No other
    session shares it before `PublishKV`.
    """

    ticket: Ticket
    session: SessionId
    connection: int
    tenant: str
    residency: Residency
    token_ids: tuple[int, ...]
    interventions: tuple[Intervention, ...]
    namespace: str | None


@dataclass(frozen=True, slots=True)
class PublishKV:
    """Let the other sessions of its namespace share the KV that `ReceiveKV` has brought: whose it is was a claim until
    now. Answered by `Done(None)`.
    """

    ticket: Ticket
    session: SessionId


SessionCommand = Open | Fork | Rewind | Close | SetPhase | FreeHost | Export | Import | SendKV | ReceiveKV | PublishKV


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


@dataclass(frozen=True, slots=True)
class ReceivePrompt:
    """Have the turn, of which `Lacking` has told, wait for KV of its prompt: blocks from number `first` on, which
    `SendPrompt` of another server's engine sends over the connection. Answered by `Done(ReceivedPrompt)` when nothing
    more comes; then the turn goes on with what has come.

    Fails as `PeerFull` if host memory has no room for them, and then the turn goes on without; as `WrongState` if it
    waits no more.
    """

    ticket: Ticket
    session: SessionId
    turn: Ticket
    connection: int
    first: int


@dataclass(frozen=True, slots=True)
class ComputePrompt:
    """Have the turn of a `Lacking` event go on: no other replica computes its prompt. Answered by `Done(None)`, also if
    it waits no more.
    """

    ticket: Ticket
    session: SessionId
    turn: Ticket


@dataclass(frozen=True, slots=True)
class SendPrompt:
    """Send the blocks of the session, from number `first` on, over the connection of that number, as they are computed
    by its turn, which generates nothing. Answered by `Done(SentKV)` when the last of them has been written to the
    connection.

    Fails as `EngineError` if the turn ends before it has them all, or the other server wants them no more.
    """

    ticket: Ticket
    session: SessionId
    connection: int
    first: int


PromptCommand = ReceivePrompt | ComputePrompt | SendPrompt


@dataclass(frozen=True, slots=True)
class Restored:
    """Say that all sessions from before a restart are open: KV files without a session are deleted. Answered by
    `Done(None)`.
    """

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask for the memory map. Answered by `Done(MemoryMap)`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class FreeDisk:
    """Delete KV files of `count` bytes, as far as there are any that may go. Answered by `Done(None)` when that has
    been ordered.
    """

    ticket: Ticket
    count: int


@dataclass(frozen=True, slots=True)
class KeepKV:
    """Write the KV of `sessions` to disk, the first ones first, as far as there is room and `within_s` seconds: the
    engine is about to stop. Those with a turn follow when it is over. Answered by `Done(KeptKV)`.
    """

    ticket: Ticket
    sessions: tuple[SessionId, ...]
    within_s: float


ServerCommand = Restored | Inspect | FreeDisk | KeepKV
