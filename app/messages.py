"""What crosses between the event loop and the engine thread: commands in, events out.

Every command is answered by exactly one terminal event that carries its ticket: `TurnFinished` for a `Submit`, `Done`
for any other, `Failed` for either. `Started` and `Token` may come before a `TurnFinished`. Nothing is dropped in
silence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from app.domain import FinishReason, SamplingParams, SessionId, StopRule, Ticket, TokenLogprobs, TurnUsage
from app.errors import DjinnError


@dataclass(frozen=True, slots=True)
class Open:
    """Make the session known to the engine. Answered by `Done(None)`.

    KV prefixes are shared only between sessions of one `namespace`: one tenant never sees another's timing.
    """

    ticket: Ticket
    session: SessionId
    namespace: str = ""


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
class Inspect:
    """Ask where the session's KV is, or with `session=None` for the whole memory map.

    Answered by `Done(SessionMemory)` or `Done(MemoryMap)`.
    """

    ticket: Ticket
    session: SessionId | None = None


Command = Open | Submit | Cancel | Fork | Rewind | Close | Inspect


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """One session's KV on the device: `tokens` in the history, `blocks` held, `device_bytes` they take."""

    tokens: int
    computed_tokens: int
    blocks: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The engine's memory, in bytes, and how busy it is."""

    text_bytes: int
    kv_total_bytes: int
    kv_owned_bytes: int
    kv_cached_bytes: int
    block_bytes: int
    block_tokens: int
    sessions: int
    sessions_resident: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Started:
    """The turn left the queue at `at` (`time.perf_counter`); `cached_tokens` of its context already had their KV."""

    ticket: Ticket
    cached_tokens: int
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


TurnEvent = Started | PromptScored | Token | TurnFinished | Failed
Event = TurnEvent | Done
