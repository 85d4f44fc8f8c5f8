"""What sessions tell of a turn that is traced, in words that need no OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.domain.memory_map import SessionMemory
from app.domain.values import SamplingParams, SessionId
from app.messages import TurnEvent

TRACE_RESPONSE = "traceresponse"
"""The header of an answer that names the span of its turn, and its key in the state of the request."""
CLOSE_S = 3.0
"""How long the end of the server may wait for the collector of spans."""


class TurnTrace(Protocol):
    """One turn, from the queue to its end. Nothing here raises or waits."""

    def observe(self, event: TurnEvent) -> None:
        """Take the turn's next event."""
        ...

    def placed(self, memory: SessionMemory) -> None:
        """Take the engine's word of where the session's KV is now."""
        ...

    def resumed(self) -> None:
        """The turn is in the queue again. The request that did it is the task's; without one it was a timeout."""
        ...


@dataclass(frozen=True, slots=True)
class TurnStart:
    """What is known of a turn at its beginning. It has no text and no token."""

    session: SessionId
    owner: str | None
    model: str
    kv: SessionMemory
    """Where the session's KV is."""
    max_tokens: int
    param: str = ""
    """The field that its tokens came from."""
    sampling: SamplingParams | None = None
    """None: the turn was paused elsewhere, and goes on from there."""
    copy_of: TurnTrace | None = None
    """The turn that it was copied from."""

    @property
    def is_copy(self) -> bool:
        """Whether it begins with a pause."""
        return self.sampling is None


class Traces(Protocol):
    """Traces turns, as long as the server runs."""

    def begin(self, turn: TurnStart) -> TurnTrace | None:
        """Begin the trace of a turn that the task's request has asked for; None if this one is not sampled."""
        ...

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        ...
