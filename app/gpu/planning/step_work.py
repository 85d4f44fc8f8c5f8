"""What breakpoints may do in a step, shared by all sessions. Pure planning."""

from app.domain.values import SessionId


class StepWork:
    """At most `most` work in a step, in the unit of `STEP_WORK`. A row that needs more has the step to itself.

    Rows that were passed over come first in the next step, in their order, so that none starves.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._passed_over: dict[SessionId, int] = {}
        """What the row of each needed, the longest wait first."""
        self._reserved: dict[SessionId, int] = {}
        self._is_free = True

    def begin(self) -> None:
        """Begin a step. What is reserved for rows that then do not come is lost with the step."""
        self._left, self._reserved, self._is_free = self._most, {}, True
        waiting, self._passed_over = self._passed_over, {}
        for session, work in waiting.items():
            if not self._passed_over and (work <= self._left or not self._reserved):
                self._reserved[session] = work
                self._left -= work
            else:
                self._passed_over[session] = work

    def waits(self, session: SessionId) -> bool:
        """Whether the session's row was passed over and finds no room in this step either, if it needs as much."""
        needed = self._passed_over.get(session)
        return needed is not None and needed > self._left and not self._is_only

    def take(self, session: SessionId, work: int) -> bool:
        """Whether the session's row, which needs `work`, may be in the step; else it is passed over."""
        own = self._reserved.pop(session, None)
        self._left += own or 0
        if work > self._left and not self._is_only and (own is None or work > own):
            if own is None:
                self._passed_over[session] = work
            else:
                self._passed_over = {session: work, **self._passed_over}
            return False
        self._left -= work
        self._is_free = False
        self._passed_over.pop(session, None)
        return True

    def forget(self, session: SessionId) -> None:
        """The session's turn has ended or paused."""
        self._passed_over.pop(session, None)
        self._reserved.pop(session, None)

    @property
    def _is_only(self) -> bool:
        """Whether the next row has the step to itself."""
        return self._is_free and not self._reserved
