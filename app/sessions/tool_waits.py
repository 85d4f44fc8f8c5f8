"""How long the tools take that turns call: so a session is back in time whose client says nothing."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from app.domain.values import EARLY_WAITS
from app.sessions.session import Session

WINDOW = 16
"""Waits of a tool that its estimate rests on."""
PARTS = 6
"""Of a day. A tool of an owner takes as long as it has at this time of the day, once that is known from `ENOUGH` waits:
at night an approval takes until the morning.
"""
ENOUGH = 4
MAX_TOOLS = 256
"""Tools that are remembered of one session, and of one owner. Clients make up names."""


@dataclass(slots=True)
class Waits:
    """Those of one session, here or as they go to another server."""

    times: dict[str, list[float]] = field(default_factory=dict)
    """The last waits of each tool in seconds, the tool that was noted last at the end."""
    tools: list[str] = field(default_factory=list)
    """What it waits for now."""
    began: float = 0.0
    """Since when, by the server's own clock; in Unix seconds on the way to another one."""


def note_wait(times: dict[str, list[float]], tool: str, seconds: float) -> None:
    """Take one wait. The tool that was noted the longest time ago gives way to a new one."""
    times[tool] = [*times.pop(tool, []), seconds][-WINDOW:]
    if len(times) > MAX_TOOLS:
        del times[next(iter(times))]


def expected_wait(lengths: Sequence[float]) -> float | None:
    """Seconds that a wait takes at least, nearly always: a quantile of earlier ones, in ascending order. None: there is
    none.
    """
    return lengths[int(EARLY_WAITS * len(lengths))] if lengths else None


def _part_of_day(now: float) -> int:
    return time.localtime(now).tm_hour * PARTS // 24


class ToolWaits:
    """Tells when sessions of clients that signal nothing will be back. Used on the event loop only.

    A session's own waits tell when it will be back; before it has any, those of its owner's other sessions do.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._of_session: WeakKeyDictionary[Session, Waits] = WeakKeyDictionary()
        self._of_owner: defaultdict[str | None, dict[str, list[float]]] = defaultdict(dict)
        self._of_day: defaultdict[tuple[str | None, int], dict[str, list[float]]] = defaultdict(dict)
        """By owner and part of the day."""

    def begin(self, session: Session, tools: Iterable[str]) -> tuple[float, ...]:
        """The session waits for `tools` from now on; returns how long earlier waits for the slowest of them took, in
        ascending order. Empty: a tool is unknown.
        """
        waits = self._of_session.setdefault(session, Waits())
        waits.tools, waits.began = sorted(set(tools)), self._clock()
        of_day, of_owner = self._of_day[session.owner, _part_of_day(self._wall_clock())], self._of_owner[session.owner]
        slowest = tuple[float, ...]()
        for tool in waits.tools:
            now, own = of_day.get(tool, []), waits.times.get(tool, [])
            lengths = tuple(sorted(own or (now if len(now) >= ENOUGH else of_owner.get(tool, []))))
            if not lengths:
                return ()
            slowest = max(lengths, slowest, key=lambda each: expected_wait(each) or 0.0)
        return slowest

    def end(self, session: Session) -> None:
        """The session's next turn is in the queue: what it waited for has taken so long.

        Of several tools that ran at once only the slowest is known, so each is taken to be it.
        """
        waits = self._of_session.get(session)
        if waits is None or not waits.tools:
            return
        seconds = self._clock() - waits.began
        of_day = self._of_day[session.owner, _part_of_day(self._wall_clock())]
        for times in (waits.times, self._of_owner[session.owner], of_day):
            for tool in waits.tools:
                note_wait(times, tool, seconds)
        waits.tools = []

    def export(self, session: Session) -> Waits | None:
        """What is known of the session's waits, for another server; None: nothing."""
        waits = self._of_session.get(session)
        if waits is None:
            return None
        return Waits(dict(waits.times), waits.tools, time.time() - self._clock() + waits.began)

    def adopt(self, session: Session, sent: Waits) -> None:
        """Go on with what another server knows of the session's waits."""
        began = self._clock() - max(0.0, time.time() - sent.began)
        times = {tool: waits[-WINDOW:] for tool, waits in list(sent.times.items())[-MAX_TOOLS:]}
        self._of_session[session] = Waits(times, sent.tools[:MAX_TOOLS], began)
