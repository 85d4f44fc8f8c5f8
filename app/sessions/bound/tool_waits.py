"""A session whose turn ended in calls of tools leaves the device by itself, and is back before its tools are."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from app.bridge.turn import Turn
from app.domain.values import Phase, SessionState
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session

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
