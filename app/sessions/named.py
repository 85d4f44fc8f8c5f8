"""Sessions of clients that know of none: bound to calls of other APIs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from app.domain.errors import Moving, NameTaken, NotFound
from app.domain.values import SessionState, common_prefix
from app.sessions.registry import SessionRegistry
from app.sessions.session import OF_RESPONSES, UNNAMED, Session
from app.sessions.table import has_expired

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
        registry.table.on_closed = self._let_go
        self._coming = set[tuple[str | None, str]]()
        """Names of sessions that are on their way here from other servers."""

    def find(self, owner: str | None, name: str) -> Session | None:
        """The owner's session of that id, or the one opened under that name.

        Closed and expired sessions count as never seen: the call brings its whole history anyway. Raises `Moved` for
        one that has gone to another server, `Moving` for one on its way there, or here.
        """
        if (owner, name) in self._coming:
            raise Moving("the session of that name is on its way here from another server")
        known = self._bound.get((owner, name))
        found = self._registry.keeper.homes.gone_by_name(owner, name) if known is None else known.id
        try:
            return self._registry.table.get(name if found is None else found, owner)
        except NotFound:
            return None

    def named(self, owner: str | None, name: str) -> Session | None:
        """The owner's open session that was opened under that name."""
        found = self._bound.get((owner, name))
        is_open = found is not None and found.state is not SessionState.CLOSED and not has_expired(found)
        return found if is_open else None

    @contextmanager
    def expecting(self, session: Session) -> Iterator[None]:
        """Keep the name of a session that is on its way here. Raises `NameTaken` if another one has it."""
        key = None if session.called is None else (session.owner, session.called)
        if key is not None:
            if key in self._coming or self.named(*key) is not None:
                raise NameTaken(f"another session there is called as session {session.id} is")
            self._coming.add(key)
        try:
            yield
        finally:
            if key is not None:
                self._coming.discard(key)

    def adopt(self, session: Session) -> None:
        """Find a session that has come by its name, or by its history."""
        if session.name not in (None, OF_RESPONSES):
            self._take(session)

    def find_continued(self, owner: str | None, prompt: Sequence[int]) -> Session | None:
        """The owner's idle session with the longest history that `prompt` continues.

        Only a session of `open_unnamed` is found: its caller counts on any other. One that a breakpoint may pause is
        not found either, because a call cannot pause.

        A client sends back a reply as text, whose tokens may differ from those that were generated. So a prompt
        continues a history if it has all that the last turn began with, and half of its reply. A prompt that is just
        what the last turn began with asks for another reply in its place.
        """
        tokens = array("I", prompt)
        found, longest = None, 0
        for session in self._bound.values():
            if session.name != UNNAMED or session.owner != owner or session.state is not SessionState.IDLE:
                continue
            if session.pausing or session.leaving or not session.prompt_tokens:
                continue
            kept = _kept(session, tokens)
            if kept > longest:
                found, longest = session, kept
        return found

    def goes_on(self, session: Session, prompt: Sequence[int]) -> bool:
        """Whether `prompt` continues the session's history, or asks again for the answer to it."""
        return bool(session.prompt_tokens) and _kept(session, array("I", prompt)) > 0

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
        self._take(session)
        return session

    def _take(self, session: Session) -> None:
        self._bound[_key(session)] = session

    def _let_go(self, session: Session) -> None:
        """Forget a session that has closed, unless its name is another's by now."""
        if self._bound.get(_key(session)) is session:
            del self._bound[_key(session)]


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
