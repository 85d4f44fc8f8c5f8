"""Sessions that OpenAI calls name with `X-Session-ID`."""

from collections.abc import Iterable

from app.domain.errors import NotFound
from app.domain.values import SessionState
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

IDLE_TTL_S = 24 * 3600
"""Seconds. Clients make up names and never close their sessions; without a limit they would fill the server."""


class BoundSessions:
    """Finds sessions by names that callers chose. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, restored: Iterable[Session]) -> None:
        """`restored` are sessions from before a restart; those that have a name keep it."""
        self._registry = registry
        self._bound = {(session.owner, session.name): session for session in restored if session.name is not None}

    def find(self, owner: str | None, name: str) -> Session | None:
        """The owner's session of that id, or the one opened under that name.

        Closed and expired sessions count as never seen: the call brings its whole history anyway.
        """
        known = self._bound.get((owner, name))
        try:
            return self._registry.table.get(name if known is None else known.id, owner)
        except NotFound:
            return None

    def open(self, owner: str | None, name: str, *, metadata: dict[str, str]) -> Session:
        """A new session, to be found by that name from now on. Raises `Busy` and `Draining`."""
        session = self._registry.create(owner, metadata=metadata, ttl_s=IDLE_TTL_S, name=name)
        living = {key: each for key, each in self._bound.items() if each.state is not SessionState.CLOSED}
        self._bound = {**living, (owner, name): session}
        return session
