"""What a session has cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.domain.values import TurnUsage


@dataclass(slots=True)
class SessionUsage:
    """Totals over the session's turns in tokens, and where the last one's time to its first token went.

    `restore_ms` went by while KV came back to the device, `queue_ms` is any other wait.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_recomputed: int = 0
    queue_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    last: TurnUsage | None = None
    """Of the last turn that has ended."""

    def add(self, turn: TurnUsage) -> None:
        """Count one more turn."""
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += turn.cached_tokens
        self.completion_tokens += turn.completion_tokens
        self.tokens_recomputed += turn.tokens_recomputed
        self.last = turn

    def take_back(self, tokens: int) -> None:
        """Do not count the last `tokens` tokens that the last turn has generated."""
        self.completion_tokens -= tokens
        if self.last is not None:
            self.last = replace(self.last, completion_tokens=self.last.completion_tokens - tokens)
