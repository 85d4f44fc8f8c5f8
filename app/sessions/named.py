"""Sessions of clients that know of none: bound to calls of other APIs, and parked by what their turns call."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from app.domain.errors import Moving, NameTaken, NotFound
from app.domain.values import Phase, SessionState, common_prefix
from app.engine_process.turn import Turn
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

        After a restart the server does not know where a session's last turn began: such a session is not found before
        its next turn.
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


WINDOW = 16
"""Waits of a tool that its estimate rests on."""
QUANTILE = 0.2
"""Share of a tool's waits that are over before its estimate. KV that is early takes room; KV that is late delays."""
MAX_TOOLS = 256
"""Tools that are remembered of one session, and of one owner. Clients make up names."""


class ToolTimes:
    """How long tools took, in seconds: a running quantile for each, over its last waits."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, tool: str, seconds: float) -> None:
        """Take one wait. The tool that was noted the longest time ago gives way to a new one."""
        self._times.setdefault(tool, deque(maxlen=WINDOW)).append(seconds)
        self._times.move_to_end(tool)
        if len(self._times) > MAX_TOOLS:
            self._times.popitem(last=False)

    @classmethod
    def of(cls, times: Mapping[str, Sequence[float]]) -> ToolTimes:
        """Those that `to_dict` gives."""
        made = cls()
        for tool, waits in times.items():
            for seconds in waits[-WINDOW:]:
                made.note(tool, seconds)
        return made

    def to_dict(self) -> dict[str, list[float]]:
        """The waits of each tool, the tool that was noted last at the end."""
        return {tool: list(waits) for tool, waits in self._times.items()}

    def expect(self, tool: str) -> float | None:
        """Seconds that the tool takes at least, nearly always; None: it is unknown."""
        times = self._times.get(tool)
        return sorted(times)[int(QUANTILE * len(times))] if times else None


@dataclass(frozen=True, slots=True)
class SentWaits:
    """Those of one session, as they go to another server."""

    times: dict[str, list[float]]
    tools: list[str]
    """What it waits for now."""
    began: float
    """Since when, in Unix seconds."""


@dataclass(slots=True)
class _Waits:
    """Those of one session."""

    times: ToolTimes = field(default_factory=ToolTimes)
    began: float = 0.0
    tools: frozenset[str] = frozenset()
    """What it waits for now."""


class ToolWaits:
    """Signals for clients that signal nothing. Used on the event loop only.

    A session's own waits tell when it will be back; before it has any, those of its owner's other sessions do.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_session: WeakKeyDictionary[Session, _Waits] = WeakKeyDictionary()
        self._of_owner: dict[str | None, ToolTimes] = {}

    def begin(self, registry: SessionRegistry, session: Session, turn: Turn, tools: Iterable[str]) -> None:
        """`turn` has ended in calls of `tools`: its session is in `io_wait` until its next turn.

        A client may read an answer late. If the session has had another turn since, it waits for other things. One that
        leaves for another server is told nothing more.
        """
        if session.state is not SessionState.IDLE or session.turn is not turn or session.leaving:
            return
        waits = self._of_session.setdefault(session, _Waits())
        waits.tools, waits.began = frozenset(tools), self._clock()
        expected = self._expect(session, waits)
        if registry.executor.failure is not None:  # the answer is there all the same
            return
        registry.set_phase(session, Phase.IO_WAIT, None if expected is None else 1000 * expected)

    def end(self, session: Session) -> None:
        """The session's next turn is in the queue: what it waited for has taken so long.

        Of several tools that ran at once only the slowest is known, so each is taken to be it.
        """
        waits = self._of_session.get(session)
        if waits is None or not waits.tools:
            return
        seconds = self._clock() - waits.began
        for times in (waits.times, self._of_owner.setdefault(session.owner, ToolTimes())):
            for tool in waits.tools:
                times.note(tool, seconds)
        waits.tools = frozenset()

    def export(self, session: Session) -> SentWaits | None:
        """What is known of the session's waits, for another server; None: nothing."""
        waits = self._of_session.get(session)
        if waits is None:
            return None
        return SentWaits(waits.times.to_dict(), sorted(waits.tools), time.time() - self._clock() + waits.began)

    def adopt(self, session: Session, sent: SentWaits) -> None:
        """Go on with what another server knows of the session's waits."""
        began = self._clock() - max(0.0, time.time() - sent.began)
        self._of_session[session] = _Waits(ToolTimes.of(sent.times), began, frozenset(sent.tools[:MAX_TOOLS]))

    def _expect(self, session: Session, waits: _Waits) -> float | None:
        """When the slowest of the tools is done; None if one is unknown."""
        others = self._of_owner.get(session.owner, ToolTimes())
        expected = []
        for tool in waits.tools:
            own = waits.times.expect(tool)
            seconds = others.expect(tool) if own is None else own
            if seconds is None:
                return None
            expected.append(seconds)
        return max(expected, default=None)
