"""Sessions that calls of other APIs are bound to: by a name, or by the history that a call continues."""

import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence

from app.domain.errors import NotFound
from app.domain.histories import common_prefix
from app.domain.values import SessionState
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

IDLE_TTL_S = 24 * 3600
"""Seconds. Clients make up names and never close their sessions; without a limit they would fill the server."""
PREFIX_NAME = "by-prefix-"
"""Begins the names of sessions whose callers gave none."""

LAST_TOKENS = 32
"""Tokens of a context that are compared first: contexts of a key often begin alike, and seldom end alike."""


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

    def find_continued(self, owner: str | None, prompt: Sequence[int]) -> Session | None:
        """The owner's idle session with the longest history that `prompt` continues.

        Only a session of `open_unnamed` is found: its caller counts on any other. One that a breakpoint may pause is
        not found either, because a call cannot pause.

        A client sends back a reply as text, whose tokens may differ from those that were generated. So a prompt
        continues a history if it has all that the last turn began with, and half of its reply. After a restart the
        server does not know where a session's last turn began: such a session is not found before its next turn.
        """
        tokens = array("I", prompt)
        found, longest = None, 0
        for session in self._unnamed_idle():
            if session.owner != owner or session.pausing or not session.prompt_tokens:
                continue
            if len(session.history) > len(tokens):
                continue
            began = slice(max(0, session.prompt_tokens - LAST_TOKENS), session.prompt_tokens)
            if session.history[began] != tokens[began]:
                continue
            common = common_prefix(session.history, tokens)
            replied = len(session.history) - session.prompt_tokens
            if replied and 2 * (common - session.prompt_tokens) >= replied and common > longest:
                found, longest = session, common
        return found

    def open(self, owner: str | None, name: str, *, metadata: dict[str, str]) -> Session:
        """A new session, to be found by that name from now on. Raises `Busy` and `Draining`."""
        session = self._registry.create(owner, metadata=metadata, ttl_s=IDLE_TTL_S, name=name)
        living = {key: each for key, each in self._bound.items() if each.state is not SessionState.CLOSED}
        self._bound = {**living, (owner, name): session}
        return session

    def open_unnamed(self, owner: str | None, *, metadata: dict[str, str]) -> Session:
        """A new session, to be found by its history. Raises `Busy` and `Draining`."""
        return self.open(owner, f"{PREFIX_NAME}{secrets.token_hex(8)}", metadata=metadata)

    def _unnamed_idle(self) -> Iterator[Session]:
        for (_, name), session in self._bound.items():
            if name.startswith(PREFIX_NAME) and session.state is SessionState.IDLE:
                yield session
