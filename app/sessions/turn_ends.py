"""Turns end before their time: a client cancels them, or their last reader leaves."""

from app.bridge.executor import EngineExecutor
from app.bridge.turn import Turn
from app.domain.values import FinishReason, SessionState
from app.messages import Cancel
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Session


class TurnEnds:
    """Ends the turns of all open sessions. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor, keeper: SessionKeeper) -> None:
        self._executor = executor
        self._keeper = keeper

    def cancel(
        self,
        session: Session,
        turn: Turn,
        keep: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """Ask for the end of `turn`, without waiting. The first `keep` generated tokens stay (None: all).

        An engine that has died has ended it. The next one opens the session as it is then.
        """
        session.cut(turn, keep)
        session.end(turn)
        if session.state is SessionState.IDLE:
            self._keeper.note(session)
        if self._executor.failure is None:
            self._executor.post(lambda ticket: Cancel(ticket, session.id, turn.ticket, keep, reason))

    def release(self, session: Session, turn: Turn) -> None:
        """Let go of a turn. The last release cancels a turn that runs; a paused one stays as it is.

        Call in a `finally`, once for each start and each `resume`; raises nothing.
        """
        turn.readers -= 1
        running = not turn.ended.is_set() and session.state is not SessionState.PAUSED
        if running and turn.readers <= 0:
            self.cancel(session, turn)
