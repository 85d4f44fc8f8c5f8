"""One session as the event loop knows it: its state machine, its token history, and what it has cost."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from app.domain import Phase, Residency, SessionId, SessionState, TurnUsage
from app.errors import WrongState
from app.memory_map import SessionMemory
from app.messages import Failed, Started, Token, TurnEvent, TurnFinished
from app.stream import Turn

TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.IDLE: frozenset({SessionState.QUEUED, SessionState.CLOSED}),
    SessionState.QUEUED: frozenset({SessionState.RUNNING, SessionState.IDLE, SessionState.CLOSED}),
    SessionState.RUNNING: frozenset({SessionState.PAUSED, SessionState.IDLE, SessionState.CLOSED}),
    SessionState.PAUSED: frozenset({SessionState.QUEUED, SessionState.IDLE, SessionState.CLOSED}),
    SessionState.CLOSED: frozenset(),
}
"""Which states may follow a state. A turn ends in `idle` from wherever it is; `closed` is final."""


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

    def add(self, turn: TurnUsage) -> None:
        """Count one more turn."""
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += turn.cached_tokens
        self.completion_tokens += turn.completion_tokens
        self.tokens_recomputed += turn.tokens_recomputed


@dataclass(slots=True, eq=False)
class Session:
    """One session. `owner` is the API key's fingerprint (None: no keys are set); times are Unix seconds.

    `history` mirrors the engine's token history at the last event, so that reading it costs the engine nothing.
    """

    id: SessionId
    owner: str | None
    metadata: dict[str, str] = field(default_factory=dict)
    ttl_s: int | None = None
    residency: Residency = Residency.BEST_EFFORT
    name: str | None = None
    """What `X-Session-ID` calls it, if it was opened that way."""
    ephemeral: bool = False
    """Whether it lives for one call only: nobody could come back to it after a restart."""
    phase: Phase = Phase.COMPUTE
    """What was last signalled; a turn makes it `compute`."""
    kv: SessionMemory = field(default_factory=SessionMemory)
    """Where its KV is, by the engine's last word."""
    state: SessionState = SessionState.IDLE
    history: array[int] = field(default_factory=lambda: array("I"))
    usage: SessionUsage = field(default_factory=SessionUsage)
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.time)
    turn: Turn | None = None
    """The turn that is in the session, or was the last in it."""
    _before_turn: array[int] = field(default_factory=lambda: array("I"))
    _prompt_tokens: int = 0
    _generated: int = 0
    """Tokens of the last turn that `usage` counts as completion."""
    _keep: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn is in the session."""
        return self.state in (SessionState.QUEUED, SessionState.RUNNING, SessionState.PAUSED)

    @property
    def expires_at(self) -> float | None:
        """When the session closes by itself; None while a turn is in it, or without a `ttl_s`."""
        if self.ttl_s is None or self.busy:
            return None
        return self.used_at + self.ttl_s

    def require(self, *allowed: SessionState, to: str) -> None:
        """Raise `WrongState` unless the session is in one of the `allowed` states. `to` says what was asked for."""
        if self.state not in allowed:
            states = " or ".join(allowed)
            raise WrongState(f"cannot {to}: session {self.id} is {self.state}, it must be {states}")

    def move(self, state: SessionState) -> None:
        """Go to `state`. Raises `WrongState` if the state machine has no such transition."""
        if state not in TRANSITIONS[self.state]:
            raise WrongState(f"session {self.id} is {self.state} and cannot become {state}")
        self.state = state
        self.used_at = time.time()

    def begin(self, turn: Turn, history: array[int]) -> None:
        """Enter the queue with a turn whose context is `history`."""
        self.move(SessionState.QUEUED)
        self.phase = Phase.COMPUTE
        self.turn = turn
        self._before_turn, self.history = self.history, history
        self._prompt_tokens, self._keep = len(history), None

    def cut(self, turn: Turn, keep: int | None) -> None:
        """Follow a cancel of `turn` that keeps the first `keep` generated tokens; it may come after the turn's end."""
        if turn is self.turn and keep is not None:
            self._keep = keep
            if not self.busy:
                self._drop_generated(keep)

    def observe(self, event: TurnEvent) -> None:
        """Follow the running turn. A closed session has nothing left to follow."""
        if self.state is SessionState.CLOSED:
            return
        match event:
            case Started():
                self.move(SessionState.RUNNING)
            case Token():
                self.history.append(event.token_id)
            case TurnFinished():
                self.usage.add(event.usage)
                self._generated = event.usage.completion_tokens
                self.move(SessionState.IDLE)
                if self._keep is not None:
                    self._drop_generated(self._keep)
            case Failed():
                self.history = self._before_turn
                self.move(SessionState.IDLE)

    def _drop_generated(self, keep: int) -> None:
        """Keep the first `keep` tokens that the last turn generated, in the history and in the count."""
        del self.history[self._prompt_tokens + keep :]
        kept = min(self._generated, keep)
        self.usage.completion_tokens -= self._generated - kept
        self._generated = kept
