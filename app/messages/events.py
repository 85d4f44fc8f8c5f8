"""Events: all that the engine tells the event loop."""

import time
from dataclasses import dataclass, field

from app.domain.activations import CheckpointInfo, ResumeCost
from app.domain.breakpoints import Intervention
from app.domain.errors import DjinnError
from app.domain.memory_map import SessionMemory
from app.domain.values import FinishReason, SessionId, Ticket, TokenLogprobs, TurnUsage


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


@dataclass(slots=True)  # not frozen: hundreds are made a step, and that would take twice as long
class Token:
    """One generated token."""

    ticket: Ticket
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """The turn is over; `history_tokens` is the length of the session's history now.

    `interventions` are all that the history was computed with; None: as before the turn.
    """

    ticket: Ticket
    reason: FinishReason
    usage: TurnUsage
    history_tokens: int
    interventions: tuple[Intervention, ...] | None = None
    resumed: ResumeCost | None = None
    """Of the last pause, if there was one."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The turn has stopped at a boundary, until it is resumed."""

    ticket: Ticket
    checkpoint: CheckpointInfo
    usage: TurnUsage
    resumed: ResumeCost | None = None
    """Of the pause before, if there was one."""


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


@dataclass(frozen=True, slots=True)
class Lacking:
    """The turn waits for another server to compute its prompt, whose blocks from the one of that number, `first`, on
    have no KV here. It answers no command. The listener sends `ReceivePrompt` or `ComputePrompt`.
    """

    session: SessionId
    turn: Ticket
    first: int


@dataclass(frozen=True, slots=True)
class Spent:
    """A breakpoint that acts `once` has done so, and is gone. It answers no command."""

    session: SessionId
    breakpoint: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine has died, and all that it held with it. Commands before this are not answered. Another is started."""

    reason: str


@dataclass(frozen=True, slots=True)
class Back:
    """Another engine takes commands. It knows of no session yet."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """The engine lives, but makes no progress. It may go on, with all that it holds; it then does what it was sent.

    `ends_turns`: it has not got on for so long that its turns are not waited for any more.
    """

    reason: str
    ends_turns: bool


@dataclass(frozen=True, slots=True)
class GoesOn:
    """The engine that had stalled makes progress again."""


TurnEvent = Started | PromptScored | Token | Paused | TurnFinished | Failed
Notice = Placed | Spent | Lacking
"""Events that answer no command."""
Event = TurnEvent | Done | Notice
Replacement = Lost | Back | Stalled | GoesOn
"""What is told of an engine in a process of its own."""


@dataclass(frozen=True, slots=True)
class ExportedKV:
    """An export has been written: tokens of the history, and how many of them have their KV in the file."""

    tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class ImportedKV:
    """An import has been read: the history, and where in the file the `about` of the export is, in bytes."""

    token_ids: tuple[int, ...]
    about_at: int
    about_bytes: int


@dataclass(frozen=True, slots=True)
class KeptKV:
    """`sessions` have their KV on disk, that of `tokens` tokens; `lost` others have some which is not there."""

    sessions: int
    tokens: int
    lost: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class SentKV:
    """A session's history of `tokens` has been sent, with the KV of the first `computed_tokens`, in so many bytes."""

    tokens: int
    computed_tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ReceivedPrompt:
    """KV of `tokens` tokens of a prompt has come from another server; `error` says why not that of all."""

    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """A session has come, with the KV of its first `computed_tokens`."""

    computed_tokens: int
