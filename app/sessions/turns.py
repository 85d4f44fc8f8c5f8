"""Turns of sessions: queued, followed, cancelled, let go of."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from app.bridge.executor import EngineExecutor
from app.bridge.turn import Turn
from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Action
from app.domain.errors import Busy, ContextTooLong, Draining, FieldOutOfRange, WrongState
from app.domain.values import FinishReason, SamplingParams, SessionState, StopRule
from app.messages import Cancel, Paused, Submit, TurnEvent, TurnFinished
from app.metrics.turns import Metrics, TurnClock
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Session
from app.sessions.table import SessionTable
from app.settings import Settings

RETRY_AFTER_S = 1


class SessionTurns:
    """The turns of all open sessions. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor, settings: Settings, metrics: Metrics, keeper: SessionKeeper) -> None:
        self.executor = executor
        self.info = executor.engine.info
        self.settings = settings
        self.part_tokens = min(settings.max_step_tokens, self.info.max_model_len)
        """Most tokens that one pass of a session has."""
        self.draining = False
        self.table = SessionTable(settings.max_sessions)
        self.on_paused: Callable[[Session, CheckpointInfo], None] = lambda session, info: None
        """Takes the news of turns that have paused."""
        self._metrics = metrics
        self._keeper = keeper

    def start_turn(
        self,
        session: Session,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        stop: StopRule,
        *,
        replace: bool = False,
        pausable: bool = True,
        param: str = "prompt",
    ) -> Turn:
        """Queue a turn that appends `token_ids` to the history, or with `replace` makes them the history.

        Whoever starts a turn must `release` it, however it ends. A `pausable` one needs a reader (`Pauses.reader`).
        Raises `WrongState` unless idle, and if it is not `pausable` but a breakpoint pauses, `Busy` when the queue is
        full, `Draining`, and `FieldOutOfRange` if there is no token to start from; `param` names what the tokens came
        from.
        """
        if self.draining:
            raise Draining("the server is shutting down")
        session.require(SessionState.IDLE, to="start a turn")
        if not pausable:
            _require_no_pauses(session)
        if self.table.waiting >= self.settings.max_queue:
            raise Busy(f"the queue is full ({self.settings.max_queue} turns wait)", retry_after_s=RETRY_AFTER_S)
        history = array("I", token_ids) if replace else session.history + array("I", token_ids)
        if not history:
            raise FieldOutOfRange("a turn needs at least 1 token to start from", param=param)
        turn = self.executor.start_turn(
            lambda ticket: Submit(ticket, session.id, tuple(token_ids), sampling, stop, replace, pausable),
            self.observer(session),
        )
        session.begin(turn, history)
        return turn

    def observer(self, session: Session) -> Callable[[TurnEvent], None]:
        """What is to be told of a turn of the session before its reader is."""
        clock = TurnClock(self._metrics)

        def observe(event: TurnEvent) -> None:
            clock.observe(event)
            usage = session.usage
            usage.queue_ms, usage.restore_ms, usage.prefill_ms = clock.queue_ms, clock.restore_ms, clock.prefill_ms
            session.observe(event)
            if isinstance(event, TurnFinished):
                self._keeper.note(session)
            elif isinstance(event, Paused):
                self.on_paused(session, event.checkpoint)

        return observe

    def room(
        self, context: int, max_tokens: int | None, *, param: str = "prompt", limit_param: str = "max_tokens"
    ) -> int:
        """How many tokens a turn on `context` tokens may generate: `max_tokens`, or what there is room for.

        Raises `ContextTooLong` if the context and `max_tokens` exceed the model's length; `param` names what the
        context came from, `limit_param` what `max_tokens` came from.
        """
        room = self.info.max_model_len - context
        wanted = 1 if max_tokens is None else max_tokens
        if room < wanted:
            raise ContextTooLong(
                f"this model's context is {self.info.max_model_len} tokens, but there are {context} and at least "
                f"{wanted} more are to be generated",
                param=limit_param if room >= 0 and max_tokens else param,
            )
        return room if max_tokens is None else max_tokens

    def cancel(
        self,
        session: Session,
        turn: Turn,
        keep: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """Ask for the end of `turn`, without waiting. The first `keep` generated tokens stay (None: all)."""
        session.cut(turn, keep)
        session.end(turn)
        if session.state is SessionState.IDLE:
            self._keeper.note(session)
        self.executor.post(lambda ticket: Cancel(ticket, session.id, turn.ticket, keep, reason))

    def release(self, session: Session, turn: Turn) -> None:
        """Let go of a turn: one that nobody reads any more must not run on, but a paused one stays as it is.

        Call in a `finally`, once for each `start_turn` and `resume`; raises nothing.
        """
        turn.readers -= 1
        running = not turn.ended.is_set() and session.state is not SessionState.PAUSED
        if running and turn.readers <= 0 and self.executor.failure is None:
            self.cancel(session, turn)

    async def settled(self, session: Session) -> None:
        """Return when all that has happened to the session is durable. Raises `NotDurable` if it cannot be."""
        await self._keeper.settled(session)


def _require_no_pauses(session: Session) -> None:
    pausing = [each.id for each in session.breakpoints.values() if each.action is Action.PAUSE]
    if pausing:
        raise WrongState(
            f"session {session.id} would pause at breakpoint {pausing[0]}, which this API cannot tell: use "
            f"/v1/sessions/{session.id}/generate, or remove the breakpoint"
        )
