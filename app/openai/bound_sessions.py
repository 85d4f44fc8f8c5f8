"""Sessions that OpenAI calls name with `X-Session-ID`."""

from __future__ import annotations

from app.domain import SessionState
from app.errors import NotFound
from app.session import Session
from app.sessions import SessionRegistry

IDLE_TTL_S = 24 * 3600
"""A client that makes up names and never closes them would otherwise fill the server."""


class BoundSessions:
    """Finds the session that a caller means by a name of its own choice. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry
        self._bound: dict[tuple[str | None, str], Session] = {}

    def find(self, owner: str | None, name: str, *, metadata: dict[str, str] | None = None) -> Session:
        """The owner's session of that id, or the one that has been called that before, or else a new one.

        Only a new one gets `metadata`.

        Closed and expired sessions count as never seen: the call brings its whole history anyway. Raises `Busy` and
        `Draining` where a new session is needed and cannot be had.
        """
        known = self._bound.get((owner, name))
        try:
            return self._registry.get(name if known is None else known.id, owner)
        except NotFound:
            session = self._registry.create(owner, metadata=metadata, ttl_s=IDLE_TTL_S)
        living = {key: each for key, each in self._bound.items() if each.state is not SessionState.CLOSED}
        self._bound = {**living, (owner, name): session}
        return session
