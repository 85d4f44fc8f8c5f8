"""The open sessions: found by id and owner, listed in pages, and how many there may be."""

import contextlib
import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from app.domain.errors import Busy, Draining, FieldOutOfRange, Moving, NotFound, SessionLimit, TenantLimit
from app.domain.homes import home_of
from app.domain.values import Phase, Quotas, Residency, SessionId, SessionState, Tier
from app.engine_process.turn import Turn
from app.logs import NAMED
from app.messages import Lacking
from app.sessions.session import NOBODY, OF_RESPONSES, Session, Watcher

RETRY_AFTER_S = 60
"""Sessions close by themselves over minutes, not seconds."""
HELD_FOR_A_FREE = 8
"""So many sessions may a tenant have for each that it leaves others."""


def _part(places: int) -> int:
    return max(1, math.ceil(places * HELD_FOR_A_FREE / (HELD_FOR_A_FREE + 1)))


def _worth(session: Session) -> tuple[bool, bool, float]:
    """Orders sessions that may give way. A client that waits for a tool is coming back; others may never. A call
    without a name brings its whole history again, while kept responses go with their session.
    """
    return session.phase in (Phase.IO_WAIT, Phase.READY), session.name == OF_RESPONSES, session.used_at


RequireHome = Callable[[SessionId, str | None, bool], None]
"""Takes an id, who asks for it, and whether it may be anybody's. Raises `Moved` if the session is on another server."""


class SessionTable:
    """Every open session. Sessions that the engine is still opening count, but are not found yet.

    A tenant leaves places to others, in proportion to its own (Choudhury and Hahne, *Dynamic queue length thresholds*,
    1998): each tenant finds free places, and a tenant that is alone may fill eight ninths of all.
    """

    def __init__(self, limit: int, quotas: Quotas, watcher: Watcher = NOBODY) -> None:
        self.watcher = watcher
        """Told of every session that is found."""
        self.draining = False
        """Whether the server shuts down: no sessions or turns are taken any more."""
        self.evacuates: Callable[[Session], bool] = lambda session: False
        """Whether the session will soon go to another server, as this one shuts down. Asked for those that a request
        wants."""
        self.require_home: RequireHome = lambda session, owner, or_any: None
        """Asked for each session that is not found."""
        self.on_closed: Callable[[Session], None] = lambda session: None
        """Told of each session that has closed."""
        self.on_lacking: Callable[[Session, Lacking], object] = lambda session, notice: None
        """Told of each turn that waits for another server to compute its prompt."""
        self.agent_turns = 0
        """Turns of agents that are over, with those that failed."""
        self._limit, self._quotas = limit, quotas
        self._open: dict[SessionId, Session] = {}
        self._opening: dict[SessionId, Session] = {}
        self._held = Counter[str | None]()
        """How many each owner has."""
        self._busy: defaultdict[str | None, set[Session]] = defaultdict(set)
        """Each owner's with a turn in them, also while the engine opens them."""
        self._closed: defaultdict[str | None, dict[SessionId, None]] = defaultdict(dict)
        """The last sessions of each owner that closed, as many as may be open: still places in the owner's list."""

    def __iter__(self) -> Iterator[Session]:
        """The sessions that are found, in the order in which they were opened."""
        return iter(list(self._open.values()))

    def giving_way(self, owner: str | None, count: int) -> list[Session]:
        """The sessions that must close before the owner may open `count` more, in that order. Its own come first where
        it is at its own limit, or at its share of the server's.

        Raises `TenantLimit` and `SessionLimit` if too few may close, `Draining`.
        """
        self.require_no_drain()
        own = self._giving_way_of(owner, count)
        excess = self._held.total() + count - len(own) - self._limit
        if excess <= 0:
            return own
        giving = [session for session in self._open.values() if session.gives_way and session not in own]
        if len(giving) < excess:
            raise SessionLimit(f"{self._limit} sessions are open, and no more may be", retry_after_s=RETRY_AFTER_S)
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
        giving = [session for session in self._open.values() if session.owner == owner and session.gives_way]
        if len(giving) < over_quota:
            raise TenantLimit(
                f"the limit of this tenant is {quota} open sessions: close some with DELETE /v1/sessions/{{id}}",
                retry_after_s=RETRY_AFTER_S,
            )
        if len(giving) < over_share:
            raise SessionLimit(
                f"this tenant has {self._held[owner]} of the {self._limit} sessions that may be open, and leaves "
                f"others one for each {HELD_FOR_A_FREE} of its own",
                retry_after_s=RETRY_AFTER_S,
            )
        return heapq.nsmallest(max(over_quota, over_share), giving, key=_worth)

    def _share(self, owner: str | None, wanted: int) -> int:
        """The most sessions that the owner may have beside those of others, if it is fewer than `wanted`. Without
        tenants no owner leaves any. Those of others that give way are as good as free.
        """
        if owner is None:
            return self._limit
        left = self._limit - (self._held.total() - self._held[owner])
        if wanted > _part(left):
            left += sum(session.owner != owner and session.gives_way for session in self._open.values())
        return _part(left)

    def free(self, owner: str | None, most: int) -> int:
        """How many sessions the owner may open before any must close for them, up to `most`."""
        for count in range(most, 0, -1):
            with contextlib.suppress(Busy, Draining):
                if not self.giving_way(owner, count):
                    return count
        return 0

    def may_open(self, owner: str | None) -> bool:
        """Whether the owner may open a session now, if need be in the place of one that gives way."""
        with contextlib.suppress(Busy, Draining):
            return self.giving_way(owner, 1) is not None
        return False

    def owned_by(self, owner: str | None) -> Iterator[Session]:
        """The owner's sessions, also those that the engine is still opening."""
        return (each for each in chain(self._open.values(), self._opening.values()) if each.owner == owner)

    def by_owner(self) -> dict[str | None, list[Session]]:
        """Every owner's open sessions."""
        found: defaultdict[str | None, list[Session]] = defaultdict(list)
        for session in self._open.values():
            found[session.owner].append(session)
        return found

    def require_guarantee(self, owner: str | None) -> None:
        """Raise `TenantLimit` unless the owner may have one more session with `residency: guaranteed`."""
        limit = self._quotas.limits(owner).guaranteed_sessions
        guaranteed = sum(session.residency is Residency.GUARANTEED for session in self.owned_by(owner))
        if limit is not None and guaranteed >= limit:
            raise TenantLimit(
                f"the limit of this tenant is {limit} guaranteed sessions",
                retry_after_s=RETRY_AFTER_S,
                param="residency",
            )

    def require_no_drain(self, session: Session | None = None) -> None:
        """Raise `Draining` if the server shuts down; `Moving` if the session that is wanted will be elsewhere soon."""
        if not self.draining:
            return
        if session is not None and self.evacuates(session):
            raise Moving(f"session {session.id} is about to go to another server, as this one shuts down")
        raise Draining("the server is shutting down")

    def add(self, session: Session) -> None:
        """Take in a session; from now on it is found."""
        self._open[session.id] = session
        self._held[session.owner] += 1
        self._follow_turns(session)
        session.watcher, NAMED[session.id] = self.watcher, session
        self.watcher.opened(session)

    def remove(self, session: Session, *, departs: bool = False) -> None:
        """Let go of a session that closes, or `departs` to another server."""
        del self._open[session.id]
        self._held[session.owner] -= 1
        self._leave_turn(session)
        closed = self._closed[session.owner]
        closed[session.id] = None
        if len(closed) > self._limit:
            del closed[next(iter(closed))]
        (self.watcher.departed if departs else self.watcher.closed)(session)
        self.on_closed(session)

    @contextlib.contextmanager
    def opening(self, session: Session) -> Iterator[None]:
        """Count the session while the engine opens it, and take it in if that went well."""
        self._opening[session.id] = session
        self._held[session.owner] += 1
        self._follow_turns(session)
        try:
            yield
        except BaseException:
            self._leave_turn(session)
            raise
        finally:
            del self._opening[session.id]
            self._held[session.owner] -= 1
        self.add(session)

    def get(self, session_id: str, owner: str | None = None, *, or_any: bool = False) -> Session:
        """The owner's session of that id, or with `or_any` anybody's. Raises `NotFound`, also for another owner's,
        `Moved` if it is on another server, `Moving` if it is on its way to one.
        """
        session = self._open.get(SessionId(session_id))
        if session is None:
            self.require_home(SessionId(session_id), owner, or_any)
        elif session.leaving and (or_any or session.owner == owner):
            raise Moving(f"session {session_id} is on its way to another server")
        if session is None or not (or_any or session.owner == owner) or has_expired(session):
            raise NotFound(f"no session {session_id[:100]}", param="session_id")
        return session

    @contextlib.contextmanager
    def using(self, session_id: str, owner: str | None = None, *, or_any: bool = False) -> Iterator[Session]:
        """The session that `get` finds, which does not give way meanwhile. Raises `NotFound`."""
        session = self.get(session_id, owner, or_any=or_any)
        with holding(session):
            yield session

    def page(
        self,
        owner: str | None = None,
        *,
        everybody: bool = False,
        limit: int,
        after: SessionId | None = None,
        state: SessionState | None = None,
        tier: Tier | None = None,
        name: str | None = None,
    ) -> list[Session]:
        """Up to `limit` of the owner's sessions, or of everybody's, that are younger than `after`, oldest first; with a
        `name` only those that calls name so. None of them is `unseen`.

        Raises `FieldOutOfRange` unless `after` is None, or one of them: a session that is open or has closed lately. An
        id that names a server of a cluster is a place too: the list of all of them has others' sessions.
        """
        if after is not None and home_of(after) is None:
            self._check_place(after, owner, everybody=everybody)
        found = sorted(
            session.id
            for session in self._open.values()
            if not session.unseen
            and (everybody or session.owner == owner)
            and (after is None or session.id > after)
            and state in (None, session.state)
            and tier in (None, session.kv.tier)
            and name in (None, session.called)
        )
        return [self._open[session_id] for session_id in found[:limit]]

    def _check_place(self, session_id: SessionId, owner: str | None, *, everybody: bool) -> None:
        session = self._open.get(session_id)
        is_open = session is not None and (everybody or session.owner == owner)
        closed = chain.from_iterable(self._closed.values()) if everybody else self._closed.get(owner, ())
        if not is_open and session_id not in closed:
            raise FieldOutOfRange(
                f"after must be the id of an open session, or of one of the last {self._limit} that closed; "
                f"got '{session_id[:100]}'",
                param="after",
            )

    def has(self, session_id: SessionId) -> bool:
        """Whether the session is open, anybody's."""
        return session_id in self._open

    def find(self, session_id: SessionId) -> Session | None:
        """The session that the engine means, unless it has been closed."""
        return self._open.get(session_id) or self._opening.get(session_id)

    @property
    def expired(self) -> list[Session]:
        """Sessions whose `ttl_s` has run out."""
        return [session for session in self._open.values() if has_expired(session)]

    def busy_of(self, owner: str | None) -> Collection[Session]:
        """The owner's sessions with a turn in them, also while the engine opens them."""
        return self._busy.get(owner, ())

    def turns_of(self, owner: str | None) -> int:
        """The owner's turns in the queue or in the engine; paused ones are in neither."""
        return sum(session.under_way for session in self.busy_of(owner))

    def foreground_runs(self) -> bool:
        """Whether anybody has turns in the queue or in the engine that are no requests of batches."""
        return any(each.under_way and not each.background for busy in self._busy.values() for each in busy)

    def others_run(self, owner: str | None) -> bool:
        """Whether other owners have turns in the queue or in the engine."""
        return any(self.turns_of(other) for other in self._busy if other != owner)

    def _follow_turns(self, session: Session) -> None:
        """Look at the session now, and at each new state."""
        session.on_move = self._note_turn
        self._note_turn(session)

    def _note_turn(self, session: Session) -> None:
        if session.busy:
            self._busy[session.owner].add(session)
        else:
            self.agent_turns += session.is_agent and session in self.busy_of(session.owner)
            self._leave_turn(session)

    def _leave_turn(self, session: Session) -> None:
        """The session has no turn, or is gone."""
        busy = self._busy.get(session.owner, set())
        busy.discard(session)
        if not busy:
            self._busy.pop(session.owner, None)

    @property
    def busy(self) -> list[tuple[Session, Turn]]:
        """Sessions with a turn in them, and the turn."""
        return [(session, session.turn) for session in self._open.values() if session.busy and session.turn]


@contextlib.contextmanager
def holding(session: Session) -> Iterator[None]:
    """Count a request that is under way: the session does not give way meanwhile."""
    session.requests += 1
    try:
        yield
    finally:
        session.requests -= 1


def has_expired(session: Session) -> bool:
    """Whether the session's `ttl_s` has run out."""
    return session.expires_at is not None and session.expires_at <= time.time()
