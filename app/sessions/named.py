"""Sessions of clients that know of none: bound to calls of other APIs."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager

from app.domain.errors import Moving, NameTaken, NotFound
from app.domain.values import Adapter, SessionId, SessionState, common_prefix
from app.sessions.registry import SessionRegistry
from app.sessions.session import UNNAMED, Session, bound_name
from app.sessions.table import has_expired

IDLE_TTL_S = 24 * 3600
"""Seconds. Clients make up names and never close their sessions; without a limit they would fill the server."""
UNNAMED_TTL_S = 3600
"""Seconds. A call that continues no history opens a session, and its client may never come back."""

MOST_ONCE = 1024
"""Idle sessions that have had one call only. Most of their clients never come back."""
MOST_ONCE_TOKENS = 1 << 20
"""Tokens of all their histories: some 45 MB."""

LAST_TOKENS = 32
"""Tokens of a context that are compared first: contexts of a key often begin alike, and seldom end alike."""

OPENED_TOKENS = 16
"""Tokens that a prompt may have at its end to open the model's thoughts, which later prompts may leave out."""
MOST_ALIKE = 4
"""Histories that a call without a name is compared with."""

HINTS = ("client_session", "client_agent")
"""Labels in which agents say which session and which agent a call is of. Side calls and subagents may say the same."""


End = tuple[int, bytes]
"""The length of a context, and its last tokens."""


class BoundSessions:
    """Finds sessions by names that callers chose. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, restored: Iterable[Session]) -> None:
        """`restored` are sessions from before a restart; those that have a name keep it."""
        self._registry = registry
        self._bound: dict[tuple[str | None, str], Session] = {}
        """Those that a client named, by owner and name."""
        self._unnamed: defaultdict[str | None, dict[SessionId, Session]] = defaultdict(dict)
        """Those that calls without a name opened and went on with, by owner."""
        self._once: defaultdict[str | None, dict[SessionId, tuple[Session, End, int]]] = defaultdict(dict)
        """Those that had one such call only, by owner, the oldest first, each with the end of its context and all its
        tokens.
        """
        self._once_count, self._once_tokens = Counter[str | None](), Counter[str | None]()
        self._at_ends: defaultdict[str | None, dict[End, list[Session]]] = defaultdict(dict)
        """The same by owner and end: there are too many to look at each."""
        self._lengths: defaultdict[str | None, Counter[int]] = defaultdict(Counter)
        """How many of them have a context of that length, by owner."""
        for session in restored:
            self.adopt(session)
        registry.table.on_closed = self._let_go
        self._coming = set[tuple[str | None, str]]()
        """Names of sessions that are on their way here from other servers."""

    def find(self, owner: str | None, name: str, adapter: Adapter | None = None) -> Session | None:
        """The owner's session of that id, or the one opened under that name for calls with the adapter.

        Closed and expired sessions count as never seen: the call brings its whole history anyway. Raises `Moved` for
        one that has gone to another server, `Moving` for one on its way there, or here.
        """
        key = owner, bound_name(name, adapter)
        if key in self._coming:
            raise Moving("the session of that name is on its way here from another server")
        known = self._bound.get(key)
        found = self._registry.keeper.homes.gone_by_name(*key) if known is None else known.id
        try:
            return self._registry.table.get(name if found is None else found, owner)
        except NotFound:
            return None

    def named(self, owner: str | None, name: str) -> Session | None:
        """The owner's open session that is `bound_as` that."""
        found = self._bound.get((owner, name))
        is_open = found is not None and found.state is not SessionState.CLOSED and not has_expired(found)
        return found if is_open else None

    def has(self, owner: str | None, name: str) -> bool:
        """Whether the owner's open session of that name is here, or on its way here."""
        return (owner, name) in self._coming or self.named(owner, name) is not None

    @contextmanager
    def expecting(self, session: Session) -> Iterator[None]:
        """Keep the name of a session that is on its way here. Raises `NameTaken` if another one has it."""
        key = None if session.bound_as is None else (session.owner, session.bound_as)
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
        if session.bound_as is not None:
            self._bound[session.owner, session.bound_as] = session
        elif session.name == UNNAMED:
            self._forget_once(session)
            self._unnamed[session.owner][session.id] = session

    def find_continued(
        self, owner: str | None, prompt: Sequence[int], labels: Mapping[str, str], adapter: Adapter | None = None
    ) -> Session | None:
        """The owner's idle session with the adapter that has the longest history which `prompt` continues. Of equals it
        is one whose `HINTS` are those of the call's `labels`.

        Only a session of `open_unnamed` is found: its caller counts on any other. One that a breakpoint may pause is
        not found either, because a call cannot pause.

        A client sends back a reply as text, whose tokens may differ from those that were generated. So a prompt
        continues a history if it has all that the last turn began with, and half of its reply. A prompt that is just
        what the last turn began with asks for another reply in its place.

        A side call, such as one for a summary, may have continued the history before. A prompt with the same hints
        takes the session back from it.
        """
        tokens, hints = array("I", prompt), _hints(labels)
        found, best = None, (0, False)
        for session in self._candidates(owner, tokens):
            if not session.is_of(adapter):
                continue
            if session.state is not SessionState.IDLE or session.leaving:
                continue
            kept = _kept(session, tokens)
            if not kept and session.shared and _hints(session.metadata) == hints:
                kept = _kept_before(session, tokens)
            if kept and not session.pausing:
                rank = kept, _hints(session.metadata) == hints
                if rank > best:
                    found, best = session, rank
        if found is not None:
            self.adopt(found)
            if best[0] > found.prompt_tokens:
                found.shared = best[0]
        return found

    def _candidates(self, owner: str | None, tokens: array[int]) -> Iterator[Session]:
        yield from self._unnamed[owner].values()
        at_ends = self._at_ends[owner]
        for length in self._lengths[owner]:
            if length <= len(tokens):
                yield from at_ends.get(_end(tokens, length), ())

    def begun_alike(self, owner: str | None, prompt: Sequence[int], adapter: Adapter | None = None) -> list[Session]:
        """The owner's sessions with the adapter and without a name whose first answer was to a beginning of the prompt,
        those first whose histories have most in common with it.
        """
        tokens = array("I", prompt)
        found: list[tuple[int, Session]] = []
        for session in (*self._unnamed[owner].values(), *(each for each, *_ in self._once[owner].values())):
            if session.busy or not session.usage.answers or not session.is_of(adapter):
                continue
            start = max(0, session.usage.answers[0] - OPENED_TOKENS)
            if _meet(session.history, tokens, start) and tokens[:start] == session.history[:start]:
                found.append((common_prefix(tokens, session.history), session))
        found.sort(key=lambda each: each[0], reverse=True)
        return [session for _, session in found[:MOST_ALIKE]]

    def goes_on(self, session: Session, prompt: Sequence[int]) -> bool:
        """Whether `prompt` continues the session's history, or asks again for the answer to it."""
        return _kept(session, array("I", prompt)) > 0

    def open(
        self, owner: str | None, name: str, *, metadata: dict[str, str], adapter: Adapter | None = None
    ) -> Session:
        """A new session, to be found by that name from now on. Raises `SessionLimit` and `Draining`."""
        session = self._registry.create(owner, metadata=metadata, ttl_s=IDLE_TTL_S, name=name, adapter=adapter)
        self.adopt(session)
        return session

    def open_unnamed(
        self, owner: str | None, cleanup: AsyncExitStack, *, metadata: dict[str, str], adapter: Adapter | None = None
    ) -> Session:
        """A new session, to be found by its history. While it is idle, it gives way to others at the limit. `cleanup`
        unwinds when its first call is over.

        Most calls are never continued. So the journal gets the session only when it waits for a tool, or with its
        second turn, and until then the engine may drop its KV like that of any call before.

        Raises `SessionLimit` and `Draining`.
        """
        session = self._registry.create(
            owner, metadata=metadata, ttl_s=UNNAMED_TTL_S, name=UNNAMED, ephemeral=True, adapter=adapter
        )
        cleanup.callback(self._rest, session)
        return session

    def _rest(self, session: Session) -> None:
        """The session's first call is over."""
        if session.state is SessionState.CLOSED:
            return
        if not session.ephemeral or session.breakpoints or session.interventions:
            self.adopt(session)
        elif session.busy or not session.history:  # its client has gone, or its turn has failed
            self._registry.drop(session)
        else:
            self._registry.release_kv(session)
            end, tokens = _end(session.history, session.prompt_tokens), len(session.history)
            self._at_ends[session.owner].setdefault(end, []).append(session)
            self._lengths[session.owner][session.prompt_tokens] += 1
            self._once[session.owner][session.id] = session, end, tokens
            self._once_count[session.owner] += 1
            self._once_tokens[session.owner] += tokens
            for sizes, most in ((self._once_count, MOST_ONCE), (self._once_tokens, MOST_ONCE_TOKENS)):
                while sizes.total() > most:
                    [(owner, _)] = sizes.most_common(1)  # so no tenant pushes out what another one keeps
                    oldest, *_ = next(iter(self._once[owner].values()))
                    if oldest.ephemeral and oldest.gives_way:
                        self._registry.drop(oldest)
                    else:
                        self.adopt(oldest)

    def _forget_once(self, session: Session) -> None:
        if session.id not in self._once[session.owner]:
            return
        _, end, tokens = self._once[session.owner].pop(session.id)
        self._once_count[session.owner] -= 1
        self._once_tokens[session.owner] -= tokens
        at_ends, lengths = self._at_ends[session.owner], self._lengths[session.owner]
        at_ends[end].remove(session)
        if not at_ends[end]:
            del at_ends[end]
        lengths[end[0]] -= 1
        if not lengths[end[0]]:
            del lengths[end[0]]

    def _let_go(self, session: Session) -> None:
        """Forget a session that has closed, unless its name is another's by now."""
        self._forget_once(session)
        self._unnamed[session.owner].pop(session.id, None)
        if session.bound_as is not None and self._bound.get((session.owner, session.bound_as)) is session:
            del self._bound[session.owner, session.bound_as]


def _hints(labels: Mapping[str, str]) -> tuple[str | None, ...]:
    return tuple(map(labels.get, HINTS))


def _kept(session: Session, tokens: array[int]) -> int:
    """How many tokens of the session's history a turn on `tokens` keeps; 0: it does not continue the session."""
    history, context = session.history, session.prompt_tokens
    if not context or not _meet(history, tokens, context):
        return 0
    kept, replied = common_prefix(history, tokens), len(history) - context
    asks_again = kept == context == len(tokens)
    goes_on = len(history) <= len(tokens) and replied > 0 and 2 * (kept - context) >= replied
    return kept if asks_again or goes_on else 0


def _kept_before(session: Session, tokens: array[int]) -> int:
    """The same where `tokens` continue the history that the session's last turns went on from."""
    if len(tokens) == session.shared or not _meet(session.history, tokens, session.shared):
        return 0
    kept = common_prefix(session.history, tokens)
    return kept if kept >= session.shared else 0


def _meet(history: array[int], tokens: array[int], length: int) -> bool:
    """Whether both are that long, and have the same last tokens there."""
    return length <= min(len(tokens), len(history)) and _end(history, length) == _end(tokens, length)


def _end(tokens: array[int], length: int) -> End:
    return length, tokens[max(0, length - LAST_TOKENS) : length].tobytes()
