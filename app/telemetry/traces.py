"""What sessions tell of a turn that is traced, in words that need no OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.memory_map import SessionMemory
from app.domain.values import SamplingParams, SessionId

TRACE_RESPONSE = "traceresponse"
"""The header of an answer that names the span of its turn, and its key in the state of the request."""
CLOSE_S = 3.0
"""How long the end of the server may wait for the collector of spans."""


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
    copy_of: object = None
    """The `TurnSpan` of the turn that it was copied from."""

    @property
    def is_copy(self) -> bool:
        """Whether it begins with a pause."""
        return self.sampling is None
