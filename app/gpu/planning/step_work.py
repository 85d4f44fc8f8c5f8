"""What breakpoints may do in a step, shared by all sessions. Pure planning."""

from collections import Counter
from dataclasses import dataclass

from app.domain.values import SessionId


@dataclass(frozen=True, slots=True)
class _Need:
    """What a row that was passed over needed."""

    work: int
    tenant: str


class StepWork:
    """At most `most` work in a step, in the unit of `STEP_WORK`. A row that needs more has the step to itself.

    Rows that were passed over come first in the next step, so that none starves: those of a tenant in their order, and
    the tenants by the work that they have had while they waited.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._passed_over: dict[SessionId, _Need] = {}
        """Those of each tenant with the longest wait first."""
        self._had: Counter[str] = Counter()
        """By tenants that have rows which were passed over."""
        self._reserved: dict[SessionId, int] = {}
        self._is_free = True

    def begin(self) -> None:
        """Begin a step. What is reserved for rows that then do not come is lost with the step."""
        self._left, self._reserved, self._is_free = self._most, {}, True
        waiting, self._passed_over = self._in_turn(), {}
        for session, need in waiting.items():
            if not self._passed_over and (need.work <= self._left or not self._reserved):
                self._reserved[session] = need.work
                self._left -= need.work
            else:
                self._passed_over[session] = need

    def waits(self, session: SessionId) -> bool:
        """Whether the session's row was passed over and finds no room in this step either, if it needs as much."""
        needed = self._passed_over.get(session)
        return needed is not None and needed.work > self._left and not self._is_only

    def take(self, session: SessionId, tenant: str, work: int) -> bool:
        """Whether the row of the tenant's session, which needs `work`, may be in the step; else it is passed over."""
        own = self._reserved.pop(session, None)
        self._left += own or 0
        if work > self._left and not self._is_only and (own is None or work > own):
            if own is None:
                self._passed_over[session] = _Need(work, tenant)
            else:
                self._passed_over = {session: _Need(work, tenant), **self._passed_over}
            return False
        self._left -= work
        if tenant in self._had:
            self._had[tenant] += work
        self._is_free = False
        self._passed_over.pop(session, None)
        return True

    def forget(self, session: SessionId) -> None:
        """The session's turn has ended or paused."""
        self._passed_over.pop(session, None)
        self._reserved.pop(session, None)

    def _in_turn(self) -> dict[SessionId, _Need]:
        """The rows that were passed over, in the order in which they come. A tenant that has begun to wait has had no
        less than others.
        """
        tenants = dict.fromkeys(need.tenant for need in self._passed_over.values())
        least = min((self._had[tenant] for tenant in tenants if tenant in self._had), default=0)
        self._had = Counter({tenant: self._had.get(tenant, least) for tenant in tenants})
        if len(tenants) <= 1:
            return self._passed_over
        had, begins = self._had.copy(), dict[SessionId, int]()
        for session, need in self._passed_over.items():
            begins[session] = had[need.tenant]
            had[need.tenant] += need.work
        return {session: self._passed_over[session] for session in sorted(begins, key=begins.__getitem__)}

    @property
    def _is_only(self) -> bool:
        """Whether the next row has the step to itself."""
        return self._is_free and not self._reserved
