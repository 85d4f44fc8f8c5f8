"""One paused turn: how long it may last, and what another session needs to be paused in the same place."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import OnTimeout
from app.domain.values import TokenLogprobs
from app.text.generation import TextRule


@dataclass(frozen=True, slots=True)
class PauseLimit:
    """How long a pause lasts without a client ending it, and how it ends then."""

    timeout_s: float = 600.0
    on_timeout: OnTimeout = OnTimeout.RESUME


DEFAULT_LIMIT = PauseLimit()


@dataclass(frozen=True, slots=True)
class Pause:
    """A turn that has stopped between two layers. `expires_at` is in Unix seconds."""

    info: CheckpointInfo
    expires_at: float
    timer: asyncio.TimerHandle


@dataclass(frozen=True, slots=True)
class PausedPlace:
    """The event loop's part of a paused turn, without the session's history."""

    info: CheckpointInfo
    limit: PauseLimit
    rule: TextRule
    before: array[int]
    """The history before the turn."""
    prompt_tokens: int
    """The length of its context."""
    max_tokens: int
    """Most that it generates."""
    logprobs: tuple[TokenLogprobs, ...]
    """Of the tokens generated so far, if the rule has them."""

    @property
    def left_of_prompt(self) -> int:
        """Tokens of the context that come after the paused pass."""
        return max(0, self.prompt_tokens - self.info.end)
