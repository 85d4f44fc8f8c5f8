"""What crosses between the event loop and the engine thread: commands in, events out.

Every command is answered by exactly one terminal event that carries its ticket: `TurnFinished` for a `Submit`, `Done`
for any other, `Failed` for either. `Started` and `Token` may come before a `TurnFinished`. Nothing is dropped in
silence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from app.domain import (
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
from app.errors import DjinnError
from app.memory_map import SessionMemory


@dataclass(frozen=True, slots=True)
class Open:
    """Make the session known to the engine, with the history that it has already. Answered by `Done(None)`.

    KV prefixes are shared only between sessions of one `namespace`: one tenant never sees another's timing. KV on disk
    that belongs to a beginning of `token_ids` is taken up again.
    """

    ticket: Ticket
    session: SessionId
    namespace: str = ""
    residency: Residency = Residency.BEST_EFFORT
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Submit:
    """Run one turn: append `token_ids` to the session's history and generate.

    With `replace`, `token_ids` is the whole wanted history: the engine keeps the longest common prefix with the history
    that it has (and its KV) and drops what came after.
    """

    ticket: Ticket
    session: SessionId
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRule
    replace: bool = False


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


@dataclass(frozen=True, slots=True)
class Fork:
    """Open `child` with the history and, copy-on-write, the KV of `session`. Answered by `Done(tokens: int)`."""

    ticket: Ticket
    session: SessionId
    child: SessionId


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
class SetPhase:
    """Say what the session is doing, and when it will go on. Answered by `Done(None)`; `Placed` says what came of it.

    `resume_in_ms` is counted from now; None: unknown. Fails as `WrongState` while a turn is in the session.
    """

    ticket: Ticket
    session: SessionId
    phase: Phase
    resume_in_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Export:
    """Write the session's history and KV to the file `path`. Answered by `Done(ExportedKV)` when the file is whole.

    KV that cannot be had is left out: the file is then only the history. `about` is for the importer; the engine only
    carries it. Fails as `WrongState` while a turn is in the session.
    """

    ticket: Ticket
    session: SessionId
    path: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Import:
    """Open the session from the exported file `path`, which the engine takes over. Answered by `Done(ImportedKV)`.

    Fails as `BadExport` if the file is not whole, or not of this model.
    """

    ticket: Ticket
    session: SessionId
    path: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """Every session that survived a restart has been opened: KV files that nobody has claimed go. Answered by
    `Done(None)`.
    """

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask for the memory map. Answered by `Done(MemoryMap)`."""

    ticket: Ticket


Command = Open | Submit | Cancel | Fork | Rewind | SetPhase | Export | Import | Close | Restored | Inspect


@dataclass(frozen=True, slots=True)
class ExportedKV:
    """What an export wrote: tokens of the history, and how many of them have their KV in the file."""

    tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class ImportedKV:
    """What an import found: the history, and the `about` of the export."""

    token_ids: tuple[int, ...]
    about: str


@dataclass(frozen=True, slots=True)
class Started:
    """The turn left the queue at `at` (`time.perf_counter`); `cached_tokens` of its context already had their KV.

    `restore_ms` of its time in the queue went by while its KV came back to the device.
    """

    ticket: Ticket
    cached_tokens: int
    restore_ms: float = 0.0
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt tokens from the second on, when `SamplingParams.prompt_logprobs` asked for
    them.
    """

    ticket: Ticket
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    ticket: Ticket
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """The turn is over; `history_tokens` is the length of the session's history now."""

    ticket: Ticket
    reason: FinishReason
    usage: TurnUsage
    history_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a command that is not a `Submit`."""

    ticket: Ticket
    value: object = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The command could not be carried out; the session is as it was before it, unless the error says otherwise."""

    ticket: Ticket
    error: DjinnError


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a session's KV is now. It answers no command: KV also moves by itself."""

    session: SessionId
    memory: SessionMemory


TurnEvent = Started | PromptScored | Token | TurnFinished | Failed
Event = TurnEvent | Done | Placed
