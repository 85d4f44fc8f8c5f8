"""Responses that are generated without a client: they run here, and clients may follow their events."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import orjson

from app.domain.tasks import Tasks
from app.openai.response_events import Event
from app.web.sse import sse_event

MOST_EVENTS_BYTES = 64 << 20
"""Of the events of all responses. Those of responses that are over are forgotten for new ones, the oldest first."""
LATE_S = 1.0


class Followed:
    """The events of one response, for any number of clients, each from where it likes."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.size = 0
        """Bytes of all events."""
        self._events: list[bytes] = []
        self._news = asyncio.Event()

    def add(self, event: Event) -> None:
        """Take the next event."""
        self._events.append(sse_event(event["type"], orjson.dumps(event)))
        self.size += len(self._events[-1])
        self._wake()

    def end(self) -> None:
        """No event comes any more."""
        self.is_over.set()
        self._wake()

    async def events(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """Those from number `first` on, as they come. The last is never left out."""
        while True:
            news = self._news
            if self.is_over.is_set():
                first = max(0, min(first, len(self._events) - 1))
            while first < len(self._events):
                first += 1
                yield self._events[first - 1]
            if self.is_over.is_set():
                return
            if news is self._news:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundResponses:
    """All of them that run, and those whose events are remembered. Used on the event loop only."""

    def __init__(self, most_bytes: int = MOST_EVENTS_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._followed: OrderedDict[str, Followed] = OrderedDict()
        """By the id of the response, those that began first in front."""
        self._running = Tasks()

    def begin(self, response_id: str, events: AsyncGenerator[Event, None], cleanup: AsyncExitStack) -> Followed:
        """Read the events of a response to their end, whoever follows them, and unwind `cleanup` then."""
        followed = Followed()
        self._followed[response_id] = followed
        self._running.start(self._read(response_id, events, cleanup))
        return followed

    def find(self, response_id: str) -> Followed | None:
        """The events of a response; None: they are forgotten, or it was never in the background."""
        return self._followed.get(response_id)

    def forget(self, response_id: str) -> None:
        """Forget the events of a response that is kept, or was."""
        found = self._followed.pop(response_id, None)
        if found is not None and found.is_over.is_set():
            self._bytes -= found.size

    async def close(self) -> None:
        """Cancel those that still run, as the server ends."""
        await self._running.close(LATE_S)  # of a turn that has just come to its end, the response is not kept yet

    async def _read(self, response_id: str, events: AsyncGenerator[Event, None], cleanup: AsyncExitStack) -> None:
        followed = self._followed[response_id]
        try:
            async with cleanup, aclosing(events):
                async for event in events:
                    followed.add(event)
        finally:
            followed.end()
            if response_id in self._followed:
                self._bytes += followed.size
        over = [each for each, found in self._followed.items() if found.is_over.is_set()]
        while self._bytes > self._most_bytes:
            self.forget(over.pop(0))
