"""A turn that runs or is paused, as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.domain.activations import ResumeCost
from app.domain.breakpoints import Intervention
from app.domain.values import SamplingParams, StopRule, Ticket, TokenLogprobs


@dataclass(slots=True)
class TurnState:
    """One turn in the engine. `prompt_tokens` is the history's length when the turn began."""

    ticket: Ticket
    sampling: SamplingParams
    stop: StopRule
    prompt_tokens: int
    kept: int
    """Tokens of the history that the turn began from."""
    dropped: tuple[int, ...] = ()
    """Tokens that came after those, which come back if the turn fails, as do the next two."""
    interventions: tuple[Intervention, ...] = ()
    """Those of the session when the turn began."""
    reached: int = 0
    """The session's when the turn began."""
    pausable: bool = True
    paused: bool = False
    pause_at: tuple[int, int] | None = None
    """A boundary, and the position in whose pass to pause there."""
    to_end: bool = False
    """Whether breakpoints that pause are passed."""
    resumed: ResumeCost | None = None
    """What the last resume cost, until somebody has been told."""
    announced: bool = False
    """Whether a `Started` has been sent since the turn last entered the queue."""
    cached_tokens: int | None = None
    """None until the turn has left the queue for the first time."""
    tokens_recomputed: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun_at: float = 0.0
    """On the engine's clock."""
    restore_ms: float = 0.0
    """How long the turn has waited for KV that was not on the device."""
