"""Commands about a turn."""

from dataclasses import dataclass

from app.domain.breakpoints import NEXT_BREAKPOINT, Until
from app.domain.values import FinishReason, SamplingParams, SessionId, StopRule, Ticket


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
