"""Turns that stop: cancelled, let go of or paused.

Each pause ends when someone resumes or cancels its turn, and otherwise by its timeout.
"""

import asyncio
import logging
import time
from contextvars import Context

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import NEXT_BREAKPOINT, OnTimeout, Until
from app.domain.errors import DjinnError, FieldOutOfRange
from app.domain.points import boundary_of, place_of
from app.domain.tasks import Tasks
from app.domain.values import FinishReason, SessionState
from app.engine_process.executor import EngineExecutor
from app.engine_process.turn import Turn
from app.messages import Cancel, Resume
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Pause, PauseLimit, Session
from app.sessions.table import SessionTable
from app.text.generation import TurnReader

logger = logging.getLogger(__name__)

STALL_LOOK_S = 1.0
"""How long a timeout waits for an engine that has stalled, each time."""


class Pauses:
    """Ends and pauses the turns of all open sessions. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor, table: SessionTable, keeper: SessionKeeper) -> None:
        self._executor = executor
        self._table = table
        self._keeper = keeper
        self._reading = Tasks()
        """Reads turns that a timeout has resumed."""

    def cancel(
        self, session: Session, turn: Turn, keep: int | None = None, reason: FinishReason = FinishReason.CANCELLED
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

    def resume(self, session: Session, until: Until) -> TurnReader:
        """Go on with the turn; returns its reader. The caller must `release` the turn.

        Raises `WrongState` unless the session is paused, `Draining`, `Moving`, and `FieldOutOfRange` for a layer that
        is passed.
        """
        self.check_resume(session, until)
        reader = session.reader
        assert reader is not None
        self._executor.resume_turn(reader.turn, lambda ticket: Resume(ticket, session.id, until))
        reader.turn.readers += 1
        session.resume()
        return reader

    def check_resume(self, session: Session, until: Until) -> None:
        """Raise what `resume` would raise now, and change nothing."""
        at, last = session.require_pause(to="resume").info, self._executor.engine.info.num_layers - 1
        place = place_of(boundary_of(at.point, at.layer), at.point)
        if until.layer is not None and not (
            until.layer <= last and place_of(boundary_of(until.point, until.layer), until.point) > place
        ):
            raise FieldOutOfRange(
                f"until.layer: {until.layer} must be above {at.layer}, where the session is paused, and at most {last}"
                f"; a point of layer {at.layer} must come after {at.point}",
                param="until.layer",
            )
        self._table.require_no_drain(session)

    def begin(self, session: Session, info: CheckpointInfo) -> None:
        """Follow a turn that has just paused. The breakpoint limits the pause.

        A pause that `until` made may last as long as the one before it.
        """
        made_by = (session.breakpoints | session.spent).get(info.breakpoint or "")
        if made_by is not None:
            session.pause_limit = PauseLimit(made_by.timeout_s, made_by.on_timeout)
        self.wait(session, info)
        self._keeper.note(session)  # a restart has to tell what it has ended

    def wait(self, session: Session, info: CheckpointInfo) -> None:
        """Start the timeout of the session's pause, as long as `Session.pause_limit` says."""
        self._begin(session, info, time.time() + session.pause_limit.timeout_s)

    def hold(self, session: Session) -> None:
        """Stop the timeout, if the session is paused."""
        if session.pause is not None:
            session.pause.timer.cancel()

    def go_on(self, session: Session, expires_at: float | None = None) -> None:
        """Go on with a timeout that `hold` has stopped; with `expires_at` it ends then."""
        if session.pause is not None:
            session.pause.timer.cancel()
            self._begin(session, session.pause.info, session.pause.expires_at if expires_at is None else expires_at)

    def _begin(self, session: Session, info: CheckpointInfo, expires_at: float) -> None:
        if session.state is not SessionState.PAUSED:  # a cancel is on its way
            return
        assert session.turn is not None
        if self._table.draining and not self._table.evacuates(session):  # resume refuses from now on
            self.cancel(session, session.turn, reason=FinishReason.SHUTDOWN)
            return
        # No request asks for what the timer does, also if one has brought the paused turn.
        left_s = max(0.0, expires_at - time.time())
        timer = asyncio.get_running_loop().call_later(left_s, self._time_out, session, context=Context())
        session.pause = Pause(info, expires_at, timer)

    def _time_out(self, session: Session) -> None:
        assert session.turn is not None
        if self._executor.failure is not None or self._table.draining:  # it times out where it goes
            return
        if self._executor.stall is not None:
            self.go_on(session, time.time() + STALL_LOOK_S)
            return
        if session.pause_limit.on_timeout is OnTimeout.ABORT:
            self.cancel(session, session.turn)
            return
        self._reading.start(self._read_on(session, self.resume(session, NEXT_BREAKPOINT)))

    async def _read_on(self, session: Session, reader: TurnReader) -> None:
        """Read to the next pause or the end: its stop strings still count."""
        try:
            await reader.read()
        except DjinnError as error:
            logger.warning("a turn that a timeout had resumed: %s", error.message, extra={"session": session.id})
        finally:
            self.release(session, reader.turn)
