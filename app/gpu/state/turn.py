"""A turn that runs or is paused, as the engine sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from app.domain.activations import ResumeCost
from app.domain.breakpoints import Intervention
from app.domain.values import FinishReason, SamplingParams, StopRule, Ticket, TokenLogprobs, TurnUsage
from app.gpu.state.blocks import BlockHash
from app.gpu.state.drafter import Drafter
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.moves import Move
from app.grammars.matcher import Matcher


@dataclass(frozen=True, slots=True)
class ExpectedEdits:
    """What a turn's context will be computed with, for as long as `basis` is the same."""

    basis: tuple[object, ...]
    log: InterventionLog
    limit: int
    """Up to which position that is certain."""


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
    matcher: Matcher | None = None
    """Where the generated tokens are in the grammar, if the turn has one."""
    drafter: Drafter | None = None
    """Guesses the next tokens, once it has been asked to."""
    pausable: bool = True
    paused: bool = False
    pause_at: tuple[int, int] | None = None
    """A boundary, and the position in whose pass to pause there."""
    to_end: bool = False
    """Whether breakpoints that pause are passed."""
    resumed: ResumeCost | None = None
    """Cost of the last resume, until the client has been told."""
    announced: bool = False
    """Whether a `Started` has been sent since the turn last entered the queue."""
    cached_tokens: int | None = None
    """None until the turn has left the queue for the first time."""
    prefix_hashes: list[BlockHash] = field(default_factory=list)
    """Chain hashes of the history's first blocks without edits, as far as the turn has looked for them."""
    expected: ExpectedEdits | None = None
    """When it was last asked for: while the turn waits, each step does."""
    apart: bool = False
    """Whether it waits for another server to compute its prompt. It has its place in the queue, and nothing more."""
    coming: Move | None = None
    """What brings the KV of that."""
    passed_over: int = 0
    """Steps that computed prompts of others instead of its own."""
    slice_began: int = 0
    """The step in which the turn last began to run, of those that have been planned."""
    slice_reached: int = 0
    """How far the session had come then."""
    tokens_recomputed: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun_at: float = 0.0
    """On the engine's clock."""
    restore_ms: float = 0.0
    """How long the turn has waited for KV that was not on the device."""

    def fork(self, ticket: Ticket) -> Self:
        """The same turn for another session."""
        matcher = None if self.matcher is None else self.matcher.copy()
        logprobs, hashes = list(self.prompt_logprobs), list(self.prefix_hashes)
        return replace(
            self,
            ticket=ticket,
            matcher=matcher,
            drafter=None,
            prompt_logprobs=logprobs,
            prefix_hashes=hashes,
            expected=None,
            restore_ms=0.0,  # the copy has waited for nothing
        )

    def generated(self, history_tokens: int) -> int:
        """Tokens generated so far, given the history's length."""
        return history_tokens - self.prompt_tokens

    def usage(self, history_tokens: int) -> TurnUsage:
        """What the turn has cost so far, given the history's length."""
        return TurnUsage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=self.generated(history_tokens),
            tokens_recomputed=self.tokens_recomputed,
        )

    def is_full(self, history_tokens: int, max_model_len: int) -> bool:
        """Whether the turn has all the tokens that it may have, once the history has so many."""
        generated = history_tokens - self.prompt_tokens
        return generated >= self.stop.max_tokens or history_tokens >= max_model_len

    def finish_reason(self, history: Sequence[int], max_model_len: int) -> FinishReason | None:
        """Why the turn must end now, judged after each token of `history`; None while it may go on."""
        generated, stop = len(history) - self.prompt_tokens, self.stop
        if generated > 0 and history[-1] in stop.stop_token_ids and generated >= stop.min_tokens:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.ended:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_full(len(history), max_model_len) else None
