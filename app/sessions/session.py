"""One session as the event loop knows it: its state machine, its token history, and what happens to its turn."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Breakpoint, Intervention, OnTimeout
from app.domain.errors import Moving, WrongState
from app.domain.memory_map import SessionMemory
from app.domain.points import Point
from app.domain.values import (
    Adapter,
    FinishReason,
    ForkPoint,
    Phase,
    Residency,
    SessionId,
    SessionState,
    Ticket,
    TokenLogprobs,
    TurnUsage,
    common_prefix,
)
from app.engine_process.turn import Turn
from app.messages import Failed, Open, Paused, Started, Token, TurnEvent, TurnFinished
from app.sessions.keyed import KeyedRequest
from app.text.generation import TextRule, TurnReader

if TYPE_CHECKING:
    from app.telemetry.spans import TurnSpan


RecomputeReason = Literal["dropped", "restarted", "moved"]
"""Why KV that a history had had to be computed again: there was no room for it in any tier, or it was gone with the
server or engine before, or stayed behind at another server.
"""


@dataclass(frozen=True, slots=True)
class NotedPause:
    """A turn that paused `at` that time, in Unix seconds, at a `point` of `layer`. The history had so many `tokens`;
    those of them that were lost with the turn are known once it is over.
    """

    at: float
    layer: int
    point: Point
    tokens: int
    tokens_lost: int = 0


@dataclass(slots=True)
class SessionUsage:
    """Totals over the session's turns in tokens, where the last one's time to its first token went, where in the
    history the model's answers begin, and what a restart must be able to tell of a pause.

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
    recompute_reason: RecomputeReason | None = None
    """Why that one recomputed tokens; None: it did not, or nobody knows."""
    answers: list[int] = field(default_factory=list)
    """Positions in the history, of the first answer and the last others."""
    paused: NotedPause | None = None
    """The turn that is paused, or runs on from its pause."""
    interrupted: NotedPause | None = None
    """The turn that was paused when the server ended, until the next one begins."""

    def add(self, turn: TurnUsage) -> None:
        """Count one more turn."""
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += turn.cached_tokens
        self.completion_tokens += turn.completion_tokens
        self.tokens_recomputed += turn.tokens_recomputed
        self.last = turn

    def note_answer(self, start: int) -> None:
        """The last answer begins at `start`."""
        self.answers = [*self.answers[:1], *self.answers[1:][-MAX_ANSWERS:], start]

    def keep_answers(self, length: int) -> None:
        """Of the history only the first `length` tokens are still there."""
        self.answers = [start for start in self.answers if start < length]

    def note_pause(self, info: CheckpointInfo, tokens: int) -> None:
        """The turn has paused there, with a history of so many tokens."""
        self.paused = NotedPause(info.created_at, info.layer, info.point, tokens)

    def interrupt(self, tokens: int) -> None:
        """The server's end has ended the turn that was paused: the history has so many tokens now."""
        if self.paused is not None:
            self.interrupted = replace(self.paused, tokens_lost=max(0, self.paused.tokens - tokens))
        self.paused = None

    def take_back(self, tokens: int) -> None:
        """Do not count the last `tokens` tokens that the last turn has generated."""
        self.completion_tokens -= tokens
        if self.last is not None:
            self.last = replace(self.last, completion_tokens=self.last.completion_tokens - tokens)


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


UNNAMED = ""
"""The name of every session that a call without a name opened. No header can say it."""
OF_RESPONSES = "\n"
"""The name of every session that was opened for kept responses. No header can say it either."""

BACKGROUND = "\n"
"""The tenant under which the engine runs the requests of all batches. A tenants file cannot have this name."""
MAX_ANSWERS = 512
"""Whose places are known of a session: each turn journals them."""

TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.IDLE: frozenset({SessionState.QUEUED, SessionState.CLOSED}),
    SessionState.QUEUED: frozenset({SessionState.RUNNING, SessionState.IDLE, SessionState.CLOSED}),
    SessionState.RUNNING: frozenset({SessionState.PAUSED, SessionState.IDLE, SessionState.CLOSED}),
    SessionState.PAUSED: frozenset({SessionState.QUEUED, SessionState.IDLE, SessionState.CLOSED}),
    SessionState.CLOSED: frozenset(),
}
"""Which states may follow a state. A turn ends in `idle` from wherever it is; `closed` is final."""


class Watcher:
    """Told of sessions that can be found, on the event loop. It must neither raise nor wait. This one does nothing."""

    def opened(self, session: Session) -> None:
        """From now on the session is found."""

    def changed(self, session: Session) -> None:
        """Its state, phase, history or KV is another. Not told of each token."""

    def grew(self, session: Session) -> None:
        """The turn has one more token. Called for each: it must cost next to nothing."""

    def closed(self, session: Session) -> None:
        """The session is gone. Its turn, if it has one, ends with it."""

    def departed(self, session: Session) -> None:
        """The session is on another server from now on, which has told so already."""

    def begun(self, session: Session) -> None:
        """A turn is in the queue."""

    def armed(self, session: Session) -> None:
        """Its breakpoints are others."""

    def edited(self, session: Session, place: CheckpointInfo) -> None:
        """A client has changed the checkpoint of its paused turn, which is there."""

    def stopped(self, session: Session, event: Paused | TurnFinished | Failed) -> None:
        """The turn has paused or is over; the session has followed already."""

    def end(self) -> None:
        """The server shuts down, and nothing more will happen."""


NOBODY = Watcher()


def bound_name(name: str, adapter: Adapter | None) -> str:
    """The name together with the adapter: each model has its own session of one name. No header can say it."""
    return name if adapter is None else f"{name}\n{adapter.digest}"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One session. `owner` is the tenant's name (None: there are no keys); times are Unix seconds.

    `history` mirrors the engine's token history at the last event, so that reading it costs the engine nothing.
    """

    id: SessionId
    owner: str | None
    metadata: dict[str, str] = field(default_factory=dict)
    ttl_s: int | None = None
    residency: Residency = Residency.BEST_EFFORT
    name: str | None = None
    """What `X-Session-ID` calls it, `UNNAMED` or `OF_RESPONSES`; None: no such call opened it."""
    ephemeral: bool = False
    """Whether it lives for one call only, as far as is known: it is not journaled."""
    background: bool = False
    """Whether it was opened for a request of a batch."""
    unseen: bool = False
    """Whether no list and no stream tells of it: it has a text to embed or a place of an experiment."""
    forked_from: ForkPoint | None = None
    """None: it was opened empty, or imported."""
    namespace: str | None = None
    """Only sessions of the same one share its KV; None: its owner's, but for those that have one. KV that a client has
    sent may be forged, so an imported session has one of its own, and its forks have that too.
    """
    adapter: Adapter | None = None
    """The LoRA adapter that it is computed with, from its first token to its last; None: the base alone."""
    phase: Phase = Phase.COMPUTE
    """What was last signalled; a turn makes it `compute`."""
    returns_at: float | None = None
    """When it will go on, as its client said or as its tools let expect; None after a restart too."""
    is_guess: bool = False
    """Whether `returns_at` is the server's own guess."""
    unsignalled: int = 0
    """Turns since its client, or an answer that calls tools, last said what it does."""
    placed: SessionMemory = field(default_factory=SessionMemory)
    """Where its KV is, by the engine's last word: it says none at a decoded token."""
    requests: int = 0
    """Requests under way that need it: their path names it, or a response of it."""
    state: SessionState = SessionState.IDLE
    history: array[int] = field(default_factory=lambda: array("I"))
    usage: SessionUsage = field(default_factory=SessionUsage)
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.time)
    turn: Turn | None = None
    """The turn that is in the session, or was the last in it."""
    reader: TurnReader | None = None
    """What reads the turn that is in the session, if it may pause."""
    trace: TurnSpan | None = None
    """That of the turn in it, if the turn is traced."""
    keyed: KeyedRequest | None = None
    """The request with an `Idempotency-Key` that asked for the turn in it."""
    pause: Pause | None = None
    """The pause that the session is in."""
    pause_limit: PauseLimit = DEFAULT_LIMIT
    """That of the turn's last pause."""
    breakpoints: dict[str, Breakpoint] = field(default_factory=dict)
    """Those that are armed, by id."""
    spent: dict[str, Breakpoint] = field(default_factory=dict)
    """Those that went after they had acted, since the turn was started or resumed."""
    interventions: tuple[Intervention, ...] = ()
    """What the history was computed with. The engine reports it when a turn ends."""
    prompt_tokens: int = 0
    """Length of the context that `turn` started from."""
    max_tokens: int = 0
    """Most that `turn` generates."""
    shared: int = 0
    """Tokens that the history had in common with the one before, when a call without a name last went on from there."""
    uncounted: int = 0
    """Tokens of the history that no turn has computed here: the next one's owner pays for them."""
    leaving: bool = False
    """Whether another server has it soon, or may have it: requests cannot reach it here."""
    reopened: bool = False
    """Whether the engine knows it only from its history, and no turn has ended since."""
    arrived_at: float | None = None
    """When it came from another server, by the monotonic clock; None: not since this one's start."""
    watcher: Watcher = NOBODY
    """Told of what happens to it, once it is found."""
    on_move: Callable[[Session], None] = lambda session: None
    """Told of each new state: the table counts turns."""
    _before_turn: array[int] = field(default_factory=lambda: array("I"))
    _lost_by: RecomputeReason | None = None
    """Why its KV was not whole when the turn began."""
    _generated: int = 0
    """Tokens of the last turn that `usage` counts as completion."""
    _keep: int | None = None

    @property
    def kv(self) -> SessionMemory:
        """Where its KV is now, with what its turn has decoded."""
        return self.placed.grown(len(self.history)) if self.state is SessionState.RUNNING else self.placed

    @property
    def busy(self) -> bool:
        """Whether a turn is in the session."""
        return self.state in (SessionState.QUEUED, SessionState.RUNNING, SessionState.PAUSED)

    @property
    def under_way(self) -> bool:
        """Whether its turn is in the queue or in the engine: a paused one is in neither."""
        return self.state in (SessionState.QUEUED, SessionState.RUNNING)

    @property
    def is_agent(self) -> bool:
        """Whether figures count it as an agent: it is not of a batch, an experiment or an embedding."""
        return not self.background and not self.unseen

    @property
    def called(self) -> str | None:
        """What its owner's calls name it by; None: they do not."""
        return None if self.name in (UNNAMED, OF_RESPONSES) else self.name

    @property
    def label(self) -> str:
        """What its client calls it, in the words of a label if it has any; empty: nothing."""
        return self.metadata.get("name") or self.called or next(iter(self.metadata.values()), "")

    @property
    def log_name(self) -> str:
        """The same for the log, which operators read: no label of a tenant, and none but its name."""
        return "" if self.owner is not None else self.metadata.get("name") or self.called or ""

    @property
    def adapter_digest(self) -> str:
        """That of its adapter; empty: it has none."""
        return "" if self.adapter is None else self.adapter.digest

    def is_of(self, adapter: Adapter | None) -> bool:
        """Whether it is computed with the files of that adapter, whatever they are called."""
        return self.adapter_digest == ("" if adapter is None else adapter.digest)

    @property
    def bound_as(self) -> str | None:
        """What it is found by: its name, which calls for another model may use for a session of that model."""
        return None if self.called is None else bound_name(self.called, self.adapter)

    def opening(self, ticket: Ticket, *, had_kv: bool = True) -> Open:
        """What has the engine know the session as it is now."""
        tenant, namespace = self.owner or "", self.namespace
        if self.background:  # to the engine, all batches are one tenant, whose turns have its share
            tenant, namespace = BACKGROUND, tenant if namespace is None else namespace  # prefixes stay the owner's
        history, armed = tuple(self.history), tuple(self.breakpoints.values())
        made, adapter = self.interventions, self.adapter_digest
        return Open(ticket, self.id, tenant, self.residency, history, had_kv, armed, made, namespace, adapter)

    @property
    def gives_way(self) -> bool:
        """Whether the server may close it for another: it is idle, no client named it, no request is under way, and no
        other server may have it. A client may know its id, from the header of an answer.
        """
        is_still = self.state is SessionState.IDLE and not self.requests and not self.leaving
        return self.name in (UNNAMED, OF_RESPONSES) and is_still

    @property
    def pausing(self) -> list[str]:
        """Ids of the armed breakpoints that pause a turn."""
        return [each.id for each in self.breakpoints.values() if each.may_pause]

    @property
    def settled_history(self) -> array[int]:
        """The history without the turn that is in the session."""
        return self._before_turn if self.busy else self.history

    @property
    def settled_interventions(self) -> tuple[Intervention, ...]:
        """What `settled_history` was computed with."""
        return _until(len(self.settled_history), self.interventions)

    @property
    def past(self) -> tuple[array[int], list[int]]:
        """What a chat may go on from, and where the model's answers in it begin."""
        history = self.history[: self.prompt_tokens if self.busy else None]
        left = common_prefix(self._before_turn, history) if self.busy else len(history)
        return history, [start for start in self.usage.answers if start < left]

    @property
    def expires_at(self) -> float | None:
        """When the session closes by itself; None while a turn is in it, while it leaves, or without a `ttl_s`."""
        if self.ttl_s is None or self.busy or self.leaving:
            return None
        return self.used_at + self.ttl_s

    @property
    def paused_place(self) -> PausedPlace | None:
        """What another session needs to be paused where this one is; None if it is not paused."""
        if self.pause is None:
            return None
        assert self.reader is not None
        return PausedPlace(
            info=self.pause.info,
            limit=self.pause_limit,
            rule=self.reader.rule,
            before=self.settled_history[:],
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            logprobs=tuple(self.reader.all_logprobs),
        )

    def require(self, *allowed: SessionState, to: str) -> None:
        """Raise `WrongState` unless the session is in one of the `allowed` states, `Moving` while it leaves. `to` says
        what was asked for.
        """
        if self.leaving:
            raise Moving(f"cannot {to}: session {self.id} is on its way to another server")
        if self.state not in allowed:
            states = " or ".join(allowed)
            raise WrongState(f"cannot {to}: session {self.id} is {self.state}, it must be {states}")

    def require_pause(self, *, to: str) -> Pause:
        """The session's pause. Raises `WrongState` if it is not paused; `to` says what was asked for."""
        self.require(SessionState.PAUSED, to=to)
        assert self.pause is not None
        return self.pause

    def move(self, state: SessionState) -> None:
        """Go to `state`. Raises `WrongState` if the state machine has no such transition."""
        if state not in TRANSITIONS[self.state]:
            raise WrongState(f"session {self.id} is {self.state} and cannot become {state}")
        self.state = state
        self.used_at = time.time()
        if self.pause is not None:
            self.pause.timer.cancel()
            self.pause = None
        if not self.busy:
            self.reader = None
        self.on_move(self)
        self.watcher.changed(self)

    def signal(self, phase: Phase, returns_at: float | None = None, *, is_guess: bool = False) -> None:
        """Note what it is doing, and when its client will be back."""
        self.phase, self.returns_at, self.is_guess, self.unsignalled = phase, returns_at, is_guess, 0
        self.expect()
        self.watcher.changed(self)

    def relabel(self, labels: dict[str, str]) -> None:
        """Have other labels."""
        self.metadata = labels
        self.expect()
        self.watcher.changed(self)

    def expect(self) -> None:
        """Its client is coming back: a call without a name has not been the only one."""
        self.ephemeral = self.ephemeral and self.name != UNNAMED

    def place(self, kv: SessionMemory) -> None:
        """Note where its KV is."""
        if self.trace is not None:
            self.trace.placed(kv)
        before, self.placed = self.placed, kv
        if kv != before:
            self.watcher.changed(self)

    def begin(self, turn: Turn, history: array[int], max_tokens: int) -> None:
        """Enter the queue with a turn whose context is `history`, and that generates at most `max_tokens`."""
        self.move(SessionState.QUEUED)
        self.phase, self.returns_at = Phase.COMPUTE, None
        self.unsignalled += 1
        if self.turn is not None:
            self.expect()
        self._lost_by = self._find_loss()
        self.turn = turn
        self.pause_limit = DEFAULT_LIMIT
        self.spent.clear()
        self._before_turn, self.history = self.history, history
        self.prompt_tokens, self.max_tokens, self._keep = len(history), max_tokens, None

    def _find_loss(self) -> RecomputeReason | None:
        """Why KV of the history is not there now; None: it is, or this server has never had it."""
        if self.placed.computed_tokens >= len(self.history) - 1 or self.usage.last is None:
            return None
        if self.reopened:
            return "restarted"
        return "moved" if self.turn is None and self.arrived_at is not None else "dropped"

    def take_up(self, turn: Turn, place: PausedPlace) -> None:
        """Begin in the place where another session is paused, with its history."""
        self.state, self.turn, self.pause_limit = SessionState.PAUSED, turn, place.limit
        self._before_turn, self.prompt_tokens, self.max_tokens = place.before, place.prompt_tokens, place.max_tokens
        self.usage.note_pause(place.info, len(self.history))
        self.on_move(self)

    def resume(self) -> None:
        """Enter the queue with the turn that is paused."""
        self.move(SessionState.QUEUED)
        self.phase, self.returns_at = Phase.COMPUTE, None
        self.spent.clear()
        if self.trace is not None:
            self.trace.resumed()

    def end(self, turn: Turn) -> None:
        """Follow a cancel of `turn` that is on its way: from now on nothing resumes the turn."""
        turn.ending = True
        if turn is self.turn and self.state is SessionState.PAUSED:
            self.move(SessionState.QUEUED)

    def cut(self, turn: Turn, keep: int | None) -> None:
        """Follow a cancel of `turn` that keeps the first `keep` generated tokens; it may come after the turn's end. Of
        a turn that has failed nothing is left to cut.
        """
        if turn is self.turn and keep is not None and not turn.failed:
            self._keep = keep
            if not self.busy:
                self._drop_generated(keep)

    def observe(self, event: TurnEvent) -> None:
        """Follow the turn in the session. One that has closed meanwhile has nothing left to follow."""
        if not self.busy:
            return
        match event:
            case Started():
                self.move(SessionState.RUNNING)
            case Token():
                self.history.append(event.token_id)
                self.watcher.grew(self)
            case Paused() if self.turn is not None and not self.turn.ending:
                self.usage.note_pause(event.checkpoint, len(self.history))
                self.move(SessionState.PAUSED)
            case TurnFinished():
                self.usage.add(event.usage)
                if event.reason is FinishReason.SHUTDOWN:
                    self.usage.interrupt(len(self.history))
                self.usage.paused = None
                self.usage.recompute_reason = self._lost_by if event.usage.tokens_recomputed else None
                self.reopened = False
                if event.interventions is not None:
                    self.interventions = event.interventions
                self._generated = event.usage.completion_tokens
                unchanged = common_prefix(self._before_turn, self.history)
                self.usage.keep_answers(min(unchanged, self.prompt_tokens))
                if len(self.history) > self.prompt_tokens:
                    self.usage.note_answer(self.prompt_tokens)
                self.move(SessionState.IDLE)
                if self._keep is not None:
                    self._drop_generated(self._keep)
            case Failed():
                self.history, self.interventions = self._before_turn, self.settled_interventions
                self.move(SessionState.IDLE)

    def truncate(self, length: int) -> None:
        """Drop the history from position `length` on, and what it was computed with."""
        del self.history[length:]
        self.interventions = _until(length, self.interventions)
        self.usage.keep_answers(length)
        self.watcher.changed(self)

    def _drop_generated(self, keep: int) -> None:
        """Keep the first `keep` tokens that the last turn generated, in the history and in the count."""
        self.truncate(self.prompt_tokens + keep)
        kept = min(self._generated, keep)
        self.usage.take_back(self._generated - kept)
        self._generated = kept


def _until(length: int, interventions: tuple[Intervention, ...]) -> tuple[Intervention, ...]:
    """What is left of `interventions` in the first `length` positions."""
    if all(each.end <= length for each in interventions):
        return interventions
    return tuple(part for each in interventions if (part := each.clip(0, length)) is not None)
