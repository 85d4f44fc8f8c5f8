"""Sessions that calls of other APIs are bound to: by a name, or by the history that a call continues."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from app.domain.errors import NotFound
from app.domain.histories import common_prefix
from app.domain.values import SessionState
from app.sessions.registry import SessionRegistry
from app.sessions.session import OF_RESPONSES, UNNAMED, Session

IDLE_TTL_S = 24 * 3600
"""Seconds. Clients make up names and never close their sessions; without a limit they would fill the server."""
UNNAMED_TTL_S = 3600
"""Seconds. A call that continues no history opens a session, and its client may never come back."""

LAST_TOKENS = 32
"""Tokens of a context that are compared first: contexts of a key often begin alike, and seldom end alike."""


class BoundSessions:
    """Finds sessions by names that callers chose. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, restored: Iterable[Session]) -> None:
        """`restored` are sessions from before a restart; those that have a name keep it."""
        self._registry = registry
        self._bound = {_key(session): session for session in restored if session.name not in (None, OF_RESPONSES)}

    def find(self, owner: str | None, name: str) -> Session | None:
        """The owner's session of that id, or the one opened under that name.

        Closed and expired sessions count as never seen: the call brings its whole history anyway.
        """
        known = self._bound.get((owner, name))
        try:
            return self._registry.table.get(name if known is None else known.id, owner)
        except NotFound:
            return None

    def find_continued(self, owner: str | None, prompt: Sequence[int]) -> Session | None:
        """The owner's idle session with the longest history that `prompt` continues.

        Only a session of `open_unnamed` is found: its caller counts on any other. One that a breakpoint may pause is
        not found either, because a call cannot pause.

        A client sends back a reply as text, whose tokens may differ from those that were generated. So a prompt
        continues a history if it has all that the last turn began with, and half of its reply. A prompt that is just
        what the last turn began with asks for another reply in its place.

        After a restart the server does not know where a session's last turn began: such a session is not found before
        its next turn.
        """
        tokens = array("I", prompt)
        found, longest = None, 0
        for session in self._bound.values():
            if session.name != UNNAMED or session.owner != owner or session.state is not SessionState.IDLE:
                continue
            if session.pausing or not session.prompt_tokens:
                continue
            kept = _kept(session, tokens)
            if kept > longest:
                found, longest = session, kept
        return found

    def open(self, owner: str | None, name: str, *, metadata: dict[str, str]) -> Session:
        """A new session, to be found by that name from now on. Raises `SessionLimit` and `Draining`."""
        return self._open(owner, name, metadata, IDLE_TTL_S)

    def open_unnamed(self, owner: str | None, *, metadata: dict[str, str]) -> Session:
        """A new session, to be found by its history. While it is idle, it gives way to others at the limit.

        Raises `SessionLimit` and `Draining`.
        """
        return self._open(owner, UNNAMED, metadata, UNNAMED_TTL_S)

    def _open(self, owner: str | None, name: str, metadata: dict[str, str], ttl_s: int) -> Session:
        session = self._registry.create(owner, metadata=metadata, ttl_s=ttl_s, name=name)
        living = {key: each for key, each in self._bound.items() if each.state is not SessionState.CLOSED}
        self._bound = {**living, _key(session): session}
        return session


def _key(session: Session) -> tuple[str | None, str]:
    """What finds a bound session. One without a name has its id."""
    return session.owner, session.name or session.id


def _kept(session: Session, tokens: array[int]) -> int:
    """How many tokens of the session's history a turn on `tokens` keeps; 0: it does not continue the session."""
    history, context = session.history, session.prompt_tokens
    began = slice(max(0, context - LAST_TOKENS), context)
    if len(tokens) < context or history[began] != tokens[began]:
        return 0
    kept, replied = common_prefix(history, tokens), len(history) - context
    asks_again = kept == context == len(tokens)
    goes_on = len(history) <= len(tokens) and replied > 0 and 2 * (kept - context) >= replied
    return kept if asks_again or goes_on else 0
