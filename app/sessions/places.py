"""Places for sessions: how many may be open, how many of them may be a tenant's, and which close for others."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable

from app.domain.errors import SessionLimit, TenantLimit
from app.domain.limits import Quotas
from app.domain.values import Phase
from app.sessions.session import Session

RETRY_AFTER_S = 60
"""Sessions close by themselves over minutes, not seconds."""
HELD_FOR_A_FREE = 8
"""So many sessions may a tenant have for each that it leaves others."""


class SessionPlaces:
    """Counts sessions against `limit`, and against those of their tenants.

    A tenant leaves places to others, in proportion to its own (Choudhury and Hahne, *Dynamic queue length thresholds*,
    1998): each tenant finds some, and one that is alone has eight ninths.
    """

    def __init__(self, limit: int, quotas: Quotas, sessions: Callable[[], Iterable[Session]]) -> None:
        """`sessions` gives those that may be asked to close."""
        self.limit = limit
        self._quotas = quotas
        self._sessions = sessions
        self._held: Counter[str | None] = Counter()
        """How many each owner has."""

    def take(self, owner: str | None) -> None:
        """Count one more of the owner's."""
        self._held[owner] += 1

    def let_go(self, owner: str | None) -> None:
        """Count one fewer."""
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def giving_way(self, owner: str | None, count: int) -> list[Session]:
        """The sessions that must close before the owner may open `count` more, in that order. Its own come first where
        it has a limit of its own, or as many as it may beside others.

        Raises `TenantLimit` and `SessionLimit` if too few may close.
        """
        own = self._giving_way_of(owner, count)
        excess = self._held.total() + count - len(own) - self.limit
        if excess <= 0:
            return own
        giving = [session for session in self._sessions() if session.gives_way and session not in own]
        if len(giving) < excess:
            raise SessionLimit(f"{self.limit} sessions are open, and no more may be", retry_after_s=RETRY_AFTER_S)
        return own + heapq.nsmallest(excess, giving, key=_worth)

    def _giving_way_of(self, owner: str | None, count: int) -> list[Session]:
        """The owner's sessions that must close for its own limit, and for what it leaves to others: of the latter no
        more than it opens, as others may have come since.
        """
        quota, wanted = self._quotas.limits(owner).sessions, self._held[owner] + count
        over_quota = 0 if quota is None else max(0, wanted - quota)
        over_share = min(count, max(0, wanted - self._share(owner, wanted)))
        if not over_quota and not over_share:
            return []
        giving = [session for session in self._sessions() if session.owner == owner and session.gives_way]
        if len(giving) < over_quota:
            raise TenantLimit(
                f"the limit of this tenant is {quota} open sessions: close some with DELETE /v1/sessions/{{id}}",
                retry_after_s=RETRY_AFTER_S,
            )
        if len(giving) < over_share:
            raise SessionLimit(
                f"this tenant has {self._held[owner]} of the {self.limit} sessions that may be open, and leaves others "
                f"one for each {HELD_FOR_A_FREE} of its own",
                retry_after_s=RETRY_AFTER_S,
            )
        return heapq.nsmallest(max(over_quota, over_share), giving, key=_worth)

    def _share(self, owner: str | None, wanted: int) -> int:
        """The most sessions that the owner may have beside those of others, if it is fewer than `wanted`. Without
        tenants no owner leaves any. Those of others that give way are as good as free.
        """
        if owner is None:
            return self.limit
        left = self.limit - (self._held.total() - self._held[owner])
        if wanted > _part(left):
            left += sum(session.owner != owner and session.gives_way for session in self._sessions())
        return _part(left)


def _part(places: int) -> int:
    return max(1, math.ceil(places * HELD_FOR_A_FREE / (HELD_FOR_A_FREE + 1)))


def _worth(session: Session) -> tuple[bool, float]:
    """Orders sessions that may give way. A client that waits for a tool is coming back; others may never."""
    return session.phase in (Phase.IO_WAIT, Phase.READY), session.used_at
