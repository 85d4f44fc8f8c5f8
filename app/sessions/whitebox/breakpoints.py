"""Breakpoints of sessions: armed, removed, and what they have captured."""

import asyncio
from collections.abc import Callable

from app.bridge.executor import EngineExecutor
from app.domain.activations import Captures
from app.domain.breakpoint_work import check_work
from app.domain.breakpoints import Breakpoint
from app.domain.errors import FieldOutOfRange, JournalUnavailable, NotDurable, NotFound
from app.domain.values import SessionState
from app.messages import Arm, ClearCaptures, Disarm, ReadCaptures
from app.sessions.guards.journal_room import vector_bytes
from app.sessions.keeper import SessionKeeper
from app.sessions.session import Session

MAX_BREAKPOINTS = 64


class Breakpoints:
    """Arms and disarms, in the engine and in the journal. `Session.breakpoints` follows. Used on the event loop only.

    A breakpoint is in `Session.breakpoints` from before the engine has it until after: a pause that it makes finds it.
    """

    def __init__(self, executor: EngineExecutor, keeper: SessionKeeper) -> None:
        self._executor = executor
        self._keeper = keeper

    async def arm(self, session: Session, breakpoint: Breakpoint) -> None:
        """Add a breakpoint, whatever the session is doing; when this returns it is armed and durable.

        On an error there is no such breakpoint. Raises:
        - `FieldOutOfRange` if the session has too many breakpoints, or too much to do in a step;
        - `WrongState` if the breakpoint pauses and a turn runs that cannot pause;
        - `JournalUnavailable`, and `DiskShort` if the journal's disk has no room for its vectors.
        """
        if len(session.breakpoints) >= MAX_BREAKPOINTS:
            raise FieldOutOfRange(
                f"session {session.id} has {MAX_BREAKPOINTS} breakpoints, the most allowed: remove some",
                param="breakpoints",
            )
        check_work(session.breakpoints.values(), breakpoint)
        with self._keeper.room.claiming(0 if session.ephemeral else vector_bytes(breakpoint.edits)):
            await self._arm(session, breakpoint)

    async def _arm(self, session: Session, breakpoint: Breakpoint) -> None:
        session.breakpoints[breakpoint.id] = breakpoint
        try:
            await self._executor.call(lambda ticket: Arm(ticket, session.id, breakpoint))
            self._changed(session)
            await self._keeper.settled(session)
        except BaseException as error:  # a client that has gone does not know its id either
            self._take_back(session, breakpoint)
            if isinstance(error, NotDurable):
                raise JournalUnavailable(f"no breakpoint was armed: {error.reason}") from error
            raise

    async def disarm(self, session: Session, breakpoint_id: str | None) -> None:
        """Remove one breakpoint, or all. Raises `NotFound`, and `NotDurable` if it would be back after a restart."""
        if breakpoint_id is not None and breakpoint_id not in session.breakpoints:
            raise NotFound(f"no breakpoint {breakpoint_id[:100]}", param="breakpoint_id")
        going = list(session.breakpoints) if breakpoint_id is None else [breakpoint_id]
        await self._executor.call(lambda ticket: Disarm(ticket, session.id, breakpoint_id))
        for each in going:
            session.breakpoints.pop(each, None)
        self._changed(session)
        await self._keeper.settled(session)

    async def captures(self, session: Session) -> Captures:
        """What `capture` breakpoints have recorded."""
        read: Callable[[], Captures] = await self._executor.call(lambda ticket: ReadCaptures(ticket, session.id))
        return await asyncio.to_thread(read)

    async def clear_captures(self, session: Session) -> None:
        """Forget what has been recorded."""
        await self._executor.call(lambda ticket: ClearCaptures(ticket, session.id))

    def _take_back(self, session: Session, breakpoint: Breakpoint) -> None:
        session.breakpoints.pop(breakpoint.id, None)
        if session.state is SessionState.CLOSED or self._executor.failure is not None:
            return
        self._executor.post(lambda ticket: Disarm(ticket, session.id, breakpoint.id))
        self._changed(session)

    def _changed(self, session: Session) -> None:
        """Tell the journal and the watchers what is armed now."""
        self._keeper.note(session)
        session.watcher.armed(session)
