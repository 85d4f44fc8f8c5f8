"""The last events for one kind of reader. Each reader only has a place in them, so none can hold up another."""

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass
from itertools import islice

from app.web.sse import sse_event

KEPT, KEPT_BYTES = 1024, 1 << 20
"""Most events that a channel keeps, and most bytes of them."""
AT_ONCE = 64
"""Most events that a reader gets in one piece."""


@dataclass(slots=True, eq=False)
class _Kept:
    """One event as it is sent; empty once a newer one has taken its place."""

    event: bytes


class Channel:
    """Numbered events, of which the last are kept. Used on the event loop only.

    A reader whose place is before those that are kept has missed some. Numbers tell a tenant only of its own events.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.lingers: asyncio.TimerHandle | None = None
        """Drops the channel, if no reader returns to it."""
        self.position = 0
        """Number of the last event."""
        self._start = secrets.token_hex(4)
        self._kept: deque[_Kept] = deque()
        self._bytes = 0
        self._newest: dict[str, _Kept] = {}
        self._news = asyncio.Event()

    def id_of(self, position: int) -> str:
        """The id of an event. A channel that has been made anew has others."""
        return f"{self._start}-{position}"

    def find(self, event_id: str | None) -> int | None:
        """The place of a reader that has read up to that event; None: it has missed some, or read none."""
        start, _, number = (event_id or "").partition("-")
        if start != self._start or not (number.isascii() and number.isdigit() and len(number) < 20):
            return None
        position = int(number)
        return position if self._oldest <= position <= self.position else None

    def publish(self, name: str, data: bytes) -> None:
        """Tell all readers."""
        self._append(name, data)

    def publish_newest(self, name: str, data: bytes) -> None:
        """Tell all readers of figures. Only the newest of a name are kept: older ones are of no use."""
        old = self._newest.get(name)
        if old is not None:
            if old in self._kept:
                self._bytes -= len(old.event)
            old.event = b""
        self._newest[name] = self._append(name, data)

    def after(self, position: int) -> tuple[int, bytes] | None:
        """The next events for a reader, and its place behind them; None: it has missed some."""
        if position < self._oldest:
            return None
        first = position - self._oldest
        found = list(islice(self._kept, first, first + AT_ONCE))
        return position + len(found), b"".join(kept.event for kept in found)

    def wake(self) -> None:
        """Have every reader look."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Return when there is something to look at."""
        await self._news.wait()

    @property
    def _oldest(self) -> int:
        """Number of the last event that is not kept any more."""
        return self.position - len(self._kept)

    def _append(self, name: str, data: bytes) -> _Kept:
        self.position += 1
        kept = _Kept(sse_event(name, data, self.id_of(self.position)))
        self._kept.append(kept)
        self._bytes += len(kept.event)
        while len(self._kept) > KEPT or (self._bytes > KEPT_BYTES and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft().event)
        self.wake()
        return kept
