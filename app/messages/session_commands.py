"""Commands about a whole session."""

from dataclasses import dataclass

from app.domain.breakpoints import Breakpoint, Intervention
from app.domain.values import Phase, Residency, SessionId, Ticket


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
