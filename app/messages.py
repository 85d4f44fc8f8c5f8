"""Messages between the event loop and the engine thread: commands in, events out.

Every command is answered by exactly one terminal event that carries its ticket: `TurnFinished` or `Paused` for a
`Submit` or a `Resume`, `Done` for any other, `Failed` for either. `Started` and `Token` may come before the end of a
turn. A turn that is cancelled while it is paused ends once more, with `TurnFinished`, under the ticket that it was
paused under. Nothing is dropped in silence.
"""

import time

from msgspec import Struct, field

from app.domain.activations import CheckpointInfo, LensAsk, PausedTurn, ResumeCost
from app.domain.breakpoints import NEXT_BREAKPOINT, Breakpoint, Edit, Intervention, Positions, TensorData, Until
from app.domain.errors import DjinnError
from app.domain.memory_map import SessionMemory
from app.domain.points import Point
from app.domain.values import (
    FinishReason,
    Phase,
    Residency,
    SamplingParams,
    SessionId,
    StopRule,
    Ticket,
    TokenLogprobs,
    TurnUsage,
)


class Ticketed(Struct, frozen=True):
    """A command, or what answers it."""

    ticket: Ticket


class OfSession(Ticketed, frozen=True):
    """A command about one session."""

    session: SessionId


class Above(Struct, frozen=True):
    """Where a pass begins that leaves out layers: `hidden` `[tokens, hidden_size]` is the residual stream that `layer`
    takes at the positions from `first` on.
    """

    first: int
    layer: int
    hidden: TensorData


class Submit(OfSession, frozen=True):
    """Run one turn: append `token_ids` to the session's history and generate.

    With `replace`, `token_ids` is the whole wanted history: the engine keeps the longest common prefix with the history
    that it has (and its KV) and drops what came after. Breakpoints that pause are passed unless the turn is `pausable`.

    If KV is missing for `apart_tokens` of the prompt or more (0: never mind), the turn may wait for another server to
    compute it: then `Lacking` says so, and the turn goes on after `ReceivePrompt` or `ComputePrompt`.

    Other sessions may share the prefixes of the history with the lengths `prefix_ends`. Where layers fold, the engine
    keeps a state at each.

    With `above` it brings no tokens: the end of the history is computed once more, from a layer on. The layers below
    keep the KV that the session has.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRule
    replace: bool = False
    pausable: bool = True
    apart_tokens: int = 0
    prefix_ends: tuple[int, ...] = ()
    above: Above | None = None


class Resume(OfSession, frozen=True):
    """Go on with a paused turn. Fails as `WrongState` unless it is paused; its other ends are those of a `Submit`."""

    until: Until = NEXT_BREAKPOINT


class Cancel(OfSession, frozen=True):
    """End the turn `turn`, keep the session. Answered by `Done(tokens: int)`, the length of the history now.

    `keep` is the number of generated tokens that stay in the history (None: all of them); the turn's own
    `TurnFinished` carries `reason`. A turn that has just ended by itself is cut all the same, unless a newer one has
    begun.
    A stop string found in the text is a `Cancel` with `reason=STOP`.
    """

    turn: Ticket
    keep: int | None = None
    reason: FinishReason = FinishReason.CANCELLED


class Open(OfSession, frozen=True):
    """Make the session known to the engine, with the history that it has already. Answered by `Done(None)`.

    KV prefixes are shared only between sessions of one `namespace` (None: that of the `tenant`): no tenant ever sees
    another's timing. KV on disk that belongs to a beginning of `token_ids` is taken up again. `interventions` are those
    that the history was computed with, `breakpoints` those that are armed. Unless the history `had_kv`, to compute it
    does not count as recomputing. `adapter` is the digest of the LoRA adapter that the session is computed with, which
    need not be loaded before its next turn; empty: none. Sessions of different adapters share nothing.
    """

    tenant: str = ""
    residency: Residency = Residency.BEST_EFFORT
    token_ids: tuple[int, ...] = ()
    had_kv: bool = True
    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    namespace: str | None = None
    adapter: str = ""


class Fork(OfSession, frozen=True):
    """Open `child` with the history, the breakpoints and, copy-on-write, the KV of `session`; a paused one's child is
    paused in the same place. Answered by `Done(tokens: int)`.

    `turn` is the ticket of the child's paused turn, None if `session` is idle; fails as `WrongState` if that is wrong.
    """

    child: SessionId
    turn: Ticket | None = None


class Rewind(OfSession, frozen=True):
    """Drop every token of the history from position `to_token` on. Answered by `Done(tokens: int)`."""

    to_token: int


class Close(OfSession, frozen=True):
    """Forget the session and free everything it holds; a running turn ends as cancelled. Answered by `Done(None)`."""


class FreeHost(OfSession, frozen=True):
    """Take the KV of a session without a turn out of host memory: to disk, or it is lost if it does not fit there.
    Answered by `Done(None)` when that has been ordered; nothing is if the KV is elsewhere.
    """


class SetPhase(OfSession, frozen=True):
    """Say what the client is doing, and when it will go on. Answered by `Done(None)`; `Placed` tells of moves of KV.

    `resume_in_ms` is counted from now; None: unknown. `lengths` are the seconds that earlier waits of the kind took, in
    ascending order, if only they tell when the session goes on. Fails as `WrongState` while a turn is in the session.
    """

    phase: Phase
    resume_in_ms: float | None = None
    lengths: tuple[float, ...] = ()


class Export(OfSession, frozen=True):
    """Write the session's history and KV to the file `path`. Answered by `Done(ExportedKV)` when the file is whole.

    KV that cannot be brought to the host is left out: the file is then only the history. `about` is for the importer;
    the engine only carries it. Fails as `WrongState` while a turn is in the session.
    """

    path: str
    about: str = ""


class Import(OfSession, frozen=True):
    """Open the session from the exported file `path`, which the engine takes over. Answered by `Done(ImportedKV)`.

    Its KV is shared only between sessions of one `namespace`, which need not be all of the `tenant`. Fails as
    `BadExport` if the file is not whole, or not of this model.
    """

    path: str
    namespace: str = ""
    tenant: str = ""


class SendKV(OfSession, frozen=True):
    """Send the session's history and KV to another server's engine, over a connection that the engine has been given
    under the number `connection`. Answered by `Done(SentKV)` when all of it has been written to the connection.

    The session stays as it is. KV that cannot be brought to the host is left out. Fails as `WrongState` while a turn
    runs, or if the session has captures: they do not travel.
    """

    connection: int


class ReceiveKV(OfSession, frozen=True):
    """Open the session with the history `token_ids`, and with the KV that `SendKV` of another server's engine sends
    over the connection of that number. Answered by `Done(tokens: int)`, those with KV, when all of it has come.

    The KV goes to host memory, or to disk if the host has no room. Fails as `PeerFull` if neither has, as
    `PeerMismatch` if it is not of this model, as `EngineError` if the connection ends early: then there is no such
    session. The other fields are as in `Open`. `interventions` are those that the KV was computed with. No other
    session shares it before `PublishKV`.
    """

    connection: int
    tenant: str
    residency: Residency
    token_ids: tuple[int, ...]
    interventions: tuple[Intervention, ...]
    namespace: str | None
    adapter: str = ""


class PublishKV(OfSession, frozen=True):
    """Let the other sessions of its namespace share the KV that `ReceiveKV` has brought: whose it is was a claim until
    now. Answered by `Done(None)`.
    """


class Arm(OfSession, frozen=True):
    """Add a breakpoint to a session in any state. Answered by `Done(None)`.

    Fails as `WrongState` if it pauses and a turn runs that is not `pausable`.
    """

    breakpoint: Breakpoint


class Disarm(OfSession, frozen=True):
    """Take one breakpoint from a session, or all (`breakpoint` None); one that is gone already is no error. Answered
    by `Done(None)`. A pause that it made goes on.
    """

    breakpoint: str | None = None


class ReadCaptures(OfSession, frozen=True):
    """Answered by `Done(Callable[[], Captures])`: sending them may take long, so another thread does that. `point` and
    `layer` choose some of them; None: any.
    """

    point: Point | None = None
    layer: int | None = None


class ReadKept(OfSession, frozen=True):
    """What the session keeps of a point of a layer: its newest captures of the whole point, and the checkpoint of a
    turn that is paused there. `positions` are any of these, next to each other. Answered by
    `Done(Callable[[], Activation])`, as `ReadCaptures` is. Fails as `FieldOutOfRange` for positions that are not kept.
    """

    point: Point
    layer: int
    positions: Positions


class ClearCaptures(OfSession, frozen=True):
    """Forget all captures. Answered by `Done(None)`."""


class PoolCaptures(OfSession, frozen=True):
    """Answered by `Done(Callable[[], TensorData])`, as `ReadCaptures` is: the mean of all captures, with `normed` after
    the final norm of each position. Fails as `ActivationsFull` if some found no room, or there are none.
    """

    normed: bool


class ReadLogits(Ticketed, frozen=True):
    """Apply the final norm and the head to all that has been captured in `sessions`, in their order, at once.

    Answered by `Done(Callable[[], TensorData])`, as `ReadCaptures` is: float32 `[rows, len(token_ids)]`, or of all
    tokens `[rows, vocab_size]` without `token_ids`. Fails as `ActivationsFull` if some captures found no room, or there
    are none, and as `NotFound`.
    """

    sessions: tuple[SessionId, ...]
    token_ids: tuple[int, ...] | None


class ReadCheckpoint(OfSession, frozen=True):
    """Answered by `Done(Activation)`. Fails as `WrongState` unless the session is paused, `FieldOutOfRange` for
    positions that are not in the checkpoint.
    """

    positions: Positions


class EditCheckpoint(OfSession, frozen=True):
    """Apply edits to the checkpoint of a paused session, all or none. Answered by `Done(None)`.

    Fails as `WrongState`, and as `FieldOutOfRange` for positions outside the checkpoint or a result that is not finite.
    """

    edits: tuple[Edit, ...]


class WriteCheckpoint(OfSession, frozen=True):
    """Put another residual stream in the place of a checkpoint's; shape, dtype and finite values have been checked
    except against this checkpoint's number of positions. Answered by `Done(None)`.
    """

    tensor: TensorData


class Lens(OfSession, frozen=True):
    """Apply the final norm and the head to a checkpoint. Answered by `Done(LensRows)`."""

    positions: Positions
    top_k: int


class OpenMap(OfSession, frozen=True):
    """Hold on to what is kept now of a point at some positions and layers (None: all) for `MapLens` and `ReadFeatures`,
    until `CloseMap`; and to the same of the session `beside` it, with which a lens compares.

    Answered by `Done(ActivationMap)`; `FieldOutOfRange` for positions that are not in the history, or too many.
    """

    positions: Positions
    layers: tuple[int, ...] | None
    point: Point = Point.RESID_POST
    beside: SessionId | None = None


class MapLens(OfSession, frozen=True):
    """Apply the final norm and the head to the residual streams of the session's map. Answered by `Done(LensRows)`;
    `WrongState` if none is open, or it is closed meanwhile, `NotFound` if the lens is not loaded.
    """

    ask: LensAsk


class CloseMap(OfSession, frozen=True):
    """Let go of the session's map, if it has one. Answered by `Done(None)`."""


class ReadNorms(OfSession, frozen=True):
    """Answered by `Done(Callable[[], ActivationNorms])`, as `ReadCaptures` is. Fails as `OpenMap` does. `vector` is
    `[hidden_size]`, and not zero.
    """

    positions: Positions
    layers: tuple[int, ...] | None
    vector: TensorData | None


class ReadFeatures(OfSession, frozen=True):
    """Apply a loaded dictionary to the streams of the session's map: of each the `top_k` most active features, and the
    activations of those that are `chosen`. Answered by `Done(FeatureRows)`; fails as `MapLens` does.
    """

    digest: str
    k: int | None
    top_k: int
    chosen: tuple[int, ...] = ()


class Attribute(OfSession, frozen=True):
    """Attribute the difference of the logits of two tokens at a position to what is kept now there. Answered by
    `Done(Attribution)`; `FieldOutOfRange` unless the stream after the last layer is kept there.
    """

    positions: Positions
    tokens: tuple[int, int]
    neurons: int = 0
    """How many of each layer are told, the most important ones."""


class ReadPaused(OfSession, frozen=True):
    """Read a paused turn, to continue it elsewhere. Answered by `Done(PausedTurn)`; `WrongState` unless paused."""


class Reinstate(OfSession, frozen=True):
    """Give an imported session its breakpoints, edits and paused turn back. All of it has been checked.

    A `paused` turn has the ticket `turn` from now on. Answered by `Done(None)`.
    """

    breakpoints: tuple[Breakpoint, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    paused: PausedTurn | None = None
    turn: Ticket | None = None


class ReceivePrompt(OfSession, frozen=True):
    """Have the turn, of which `Lacking` has told, wait for KV of its prompt: blocks from number `first` on, which
    `SendPrompt` of another server's engine sends over the connection. Answered by `Done(ReceivedPrompt)` when nothing
    more comes; then the turn goes on with what has come.

    Fails as `PeerFull` if host memory has no room for them, and then the turn goes on without; as `WrongState` if it
    waits no more.
    """

    turn: Ticket
    connection: int
    first: int


class ComputePrompt(OfSession, frozen=True):
    """Have the turn of a `Lacking` event go on: no other replica computes its prompt. Answered by `Done(None)`, also if
    it waits no more.
    """

    turn: Ticket


class SendPrompt(OfSession, frozen=True):
    """Send the blocks of the session, from number `first` on, over the connection of that number, as they are computed
    by its turn, which generates nothing. Answered by `Done(SentKV)` when the last of them has been written to the
    connection.

    Fails as `EngineError` if the turn ends before it has them all, or the other server wants them no more.
    """

    connection: int
    first: int


class Restored(Ticketed, frozen=True):
    """Say that all sessions from before a restart are open: KV files without a session are deleted. Answered by
    `Done(None)`.
    """


class LoadAdapter(Ticketed, frozen=True):
    """Load the LoRA adapter in the folder `path`. Answered by `Done(LoadedAdapter)`; fails as `BadAdapter`,
    `AdaptersFull`.
    """

    path: str


class UnloadAdapter(Ticketed, frozen=True):
    """Forget the adapter with that digest. Sessions that are computed with it stay. Answered by `Done(None)`; fails as
    `WrongState` while turns of theirs wait, run or are paused.
    """

    digest: str


class LoadUpload(Ticketed, frozen=True):
    """Load the tensors of an upload, which the server has written to `path`. Answered by `Done(None)`; fails as
    `NotFound`, `UploadsFull`.
    """

    path: str
    digest: str


class DropUpload(Ticketed, frozen=True):
    """Forget the upload with that digest. Answered by `Done(None)`, also if there is none; fails as `UploadInUse` while
    a session has a breakpoint or edits that need it.
    """

    digest: str


class Inspect(Ticketed, frozen=True):
    """Ask for the memory map. Answered by `Done(MemoryMap)`."""


class FreeDisk(Ticketed, frozen=True):
    """Delete KV files of `count` bytes, as far as there are any that may go. Answered by `Done(None)` when that has
    been ordered.
    """

    count: int


class KeepKV(Ticketed, frozen=True):
    """Write the KV of `sessions` to disk, the first ones first, as far as there is room and `within_s` seconds: the
    engine is about to stop. Those with a turn follow when it is over. Answered by `Done(KeptKV)`.
    """

    sessions: tuple[SessionId, ...]
    within_s: float


ServerCommand = (
    Restored | Inspect | FreeDisk | KeepKV | LoadAdapter | UnloadAdapter | LoadUpload | DropUpload | ReadLogits
)
TurnCommand = Submit | Resume | Cancel | ReceivePrompt | ComputePrompt | SendPrompt
SessionCommand = Open | Fork | Rewind | Close | SetPhase | FreeHost | Export | Import | SendKV | ReceiveKV | PublishKV
BreakpointCommand = Arm | Disarm | Reinstate | ReadCaptures | ReadKept | ClearCaptures | PoolCaptures
MapCommand = OpenMap | MapLens | CloseMap | ReadNorms | ReadFeatures | Attribute
CheckpointCommand = ReadCheckpoint | EditCheckpoint | WriteCheckpoint | Lens | ReadPaused
Command = TurnCommand | SessionCommand | BreakpointCommand | MapCommand | CheckpointCommand | ServerCommand


class Started(Ticketed, frozen=True):
    """The turn left the queue at `at` (`time.perf_counter`); `cached_tokens` of its context already had their KV.

    `restore_ms` of its time in the queue went by while its KV came back to the device.
    """

    cached_tokens: int
    restore_ms: float = 0.0
    at: float = field(default_factory=time.perf_counter)


class PromptScored(Ticketed, frozen=True):
    """Log-probabilities of the prompt tokens from the second on, when `SamplingParams.prompt_logprobs` asked for
    them.
    """

    logprobs: tuple[TokenLogprobs, ...]


class Probed(Ticketed, frozen=True):
    """What the probe of that name has found at `positions` of the history, before the next token: a value for each.
    `halts`: it is more than it may be, and the turn stops or pauses.
    """

    probe: str
    positions: tuple[int, ...]
    values: tuple[float, ...]
    halts: bool


class Featured(Ticketed, frozen=True):
    """The most active features of the dictionary of that name at `positions` of the history, before the next token: for
    each their numbers and activations, the most active first.
    """

    dictionary: str
    positions: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


class Token(Ticketed, frozen=True):
    """One generated token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class TurnFinished(Ticketed, frozen=True):
    """The turn is over; `history_tokens` is the length of the session's history now.

    `interventions` are all that the history was computed with; None: as before the turn.
    """

    reason: FinishReason
    usage: TurnUsage
    history_tokens: int
    interventions: tuple[Intervention, ...] | None = None
    resumed: ResumeCost | None = None
    """Of the last pause, if there was one."""


class Paused(Ticketed, frozen=True):
    """The turn has stopped at a boundary, until it is resumed."""

    checkpoint: CheckpointInfo
    usage: TurnUsage
    resumed: ResumeCost | None = None
    """Of the pause before, if there was one."""


class Done(Ticketed, frozen=True):
    """The answer to a command that is not a `Submit`."""

    value: object = None


class Failed(Ticketed, frozen=True):
    """The command could not be carried out; the session is as it was before it, unless the error says otherwise."""

    error: DjinnError


class Placed(Struct, frozen=True):
    """Where a session's KV is now. It answers no command: KV also moves by itself."""

    session: SessionId
    memory: SessionMemory


class Lacking(Struct, frozen=True):
    """The turn waits for another server to compute its prompt, whose blocks from the one of that number, `first`, on
    have no KV here. It answers no command. The listener sends `ReceivePrompt` or `ComputePrompt`.
    """

    session: SessionId
    turn: Ticket
    first: int


class Spent(Struct, frozen=True):
    """A breakpoint that acts `once` has done so, and is gone. It answers no command."""

    session: SessionId
    breakpoint: str


class Lost(Struct, frozen=True):
    """The engine has died, and all that it held with it. Commands before this are not answered. Another is started."""

    reason: str


class Back(Struct, frozen=True):
    """Another engine takes commands. It knows of no session yet."""


class Stalled(Struct, frozen=True):
    """The engine lives, but makes no progress. It may go on, with all that it holds; it then does what it was sent.

    `ends_turns`: it has not got on for so long that its turns are not waited for any more.
    """

    reason: str
    ends_turns: bool


class GoesOn(Struct, frozen=True):
    """The engine that had stalled makes progress again."""


Reading = Probed | Featured
"""What has been read inside the model, beside the tokens."""
TurnEvent = Started | PromptScored | Reading | Token | Paused | TurnFinished | Failed
Notice = Placed | Spent | Lacking
"""Events that answer no command."""
Event = TurnEvent | Done | Notice
Replacement = Lost | Back | Stalled | GoesOn
"""What is told of an engine in a process of its own."""


class ExportedKV(Struct, frozen=True):
    """An export has been written: tokens of the history, and how many of them have their KV in the file."""

    tokens: int
    computed_tokens: int


class ImportedKV(Struct, frozen=True):
    """An import has been read: the history, where in the file the `about` of the export is, in bytes, and the digest
    of the adapter that the session is computed with.
    """

    token_ids: tuple[int, ...]
    about_at: int
    about_bytes: int
    adapter: str = ""


class KeptKV(Struct, frozen=True):
    """`sessions` have their KV on disk, that of `tokens` tokens; `lost` others have some which is not there."""

    sessions: int
    tokens: int
    lost: int
    lost_tokens: int


class SentKV(Struct, frozen=True):
    """A session's history of `tokens` has been sent, with the KV of the first `computed_tokens`, in so many bytes."""

    tokens: int
    computed_tokens: int
    bytes: int


class ReceivedPrompt(Struct, frozen=True):
    """KV of `tokens` tokens of a prompt has come from another server; `error` says why not that of all."""

    tokens: int
    error: str | None = None
