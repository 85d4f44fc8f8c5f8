"""Sessions follow what the engine says unasked: where KV is, and which breakpoints have gone."""

from __future__ import annotations

from app.messages import Notice, Placed, Spent
from app.sessions.keeper import SessionKeeper
from app.sessions.table import SessionTable


class Notices:
    """Takes the engine's notices to their sessions. Used on the event loop only."""

    def __init__(self, table: SessionTable, keeper: SessionKeeper) -> None:
        self._table = table
        self._keeper = keeper

    def take(self, notice: Notice) -> None:
        """Note one. A session that has closed meanwhile has nothing left to note."""
        session = self._table.find(notice.session)
        if session is None:
            return
        match notice:
            case Placed():
                session.kv = notice.memory
            case Spent() if notice.breakpoint in session.breakpoints:
                session.spent[notice.breakpoint] = session.breakpoints.pop(notice.breakpoint)
                self._keeper.note(session)
