"""The event streams of replicas, open at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from app.cluster.fleet import Fleet, Replica
from app.cluster.front.heads import Headers, end_to_end
from app.cluster.front.upstream.connection import Lost, Upstream
from app.cluster.front.upstream.fetch import Fetched
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import ReplicaAway

PATH = b"/v1/events"
ANSWER_S = 8.0
"""How long a replica may take to begin its stream."""
WAITING = 64
"""Events of one replica that wait for the others: with more, the replica waits."""
LONGEST_EVENT = 16 << 20


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    name: str
    data: bytes
    id: str | None


class Source:
    """The stream of one replica."""

    def __init__(self, replica: Replica, upstream: Upstream) -> None:
        self.name = replica.name
        self._upstream = upstream
        self._events: asyncio.Queue[Event | None] = asyncio.Queue(WAITING)
        self._news: asyncio.Event | None = None
        self._reading = asyncio.create_task(self._read())

    async def next(self) -> Event:
        """The next event. Raises `EOFError` at the end of the stream."""
        event = await self._events.get()
        if event is None:
            raise EOFError
        return event

    def waiting(self) -> Event | None:
        """An event that is there already; None: there is none. Raises `EOFError` at the end of the stream."""
        try:
            event = self._events.get_nowait()
        except asyncio.QueueEmpty:
            return None
        if event is None:
            raise EOFError
        return event

    def tell(self, news: asyncio.Event) -> None:
        """Set `news` for each event from now on."""
        self._news = news

    async def close(self) -> None:
        """End it: it has no more readers."""
        self._upstream.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        rest = b""
        with contextlib.suppress(Lost, ValueError):
            async for part in self._upstream.body():
                *blocks, rest = (rest + part).split(b"\n\n")
                for block in blocks:
                    if (event := _parsed(block)) is not None:
                        await self._put(event)
                if len(rest) > LONGEST_EVENT:
                    break
        await self._put(None)

    async def _put(self, event: Event | None) -> None:
        await self._events.put(event)
        if self._news is not None:
            self._news.set()


class Streams:
    """The streams of several replicas, in the order of their names. They are closed at the end of the block."""

    def __init__(self, pool: Pool, fleet: Fleet, headers: Headers) -> None:
        """`headers` go to each replica."""
        self._pool = pool
        self._fleet = fleet
        self._headers = headers
        self._sources: list[Source] = []
        self._news = asyncio.Event()
        self.names: list[str] = []
        self.ids: Mapping[str, str] = {}
        """From which event on each was asked for."""
        self.headers: Headers = []
        """Those of a replica's answer, but for what is said of its connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    async def open(self, names: Sequence[str], ids: Mapping[str, str]) -> Fetched | None:
        """Open all of them, in place of those that were open, each behind the event that `ids` has for it. Returns the
        answer of one that refuses. Raises `ReplicaAway`.
        """
        await self._close()
        self.names, self.ids = list(names), ids
        for name in names:
            found = await self._open_one(self._fleet.reachable(name), ids.get(name))
            if isinstance(found, Fetched):
                return found
            found.tell(self._news)
            self._sources.append(found)
        return None

    async def next(self) -> tuple[Source, Event]:
        """The next event of any. Raises `EOFError` when one has ended."""
        while True:
            self._news.clear()
            for source in self._sources:
                if (event := source.waiting()) is not None:
                    self._sources.remove(source)
                    self._sources.append(source)  # looked at last from now on
                    return source, event
            await self._news.wait()

    async def _open_one(self, replica: Replica, last_id: str | None) -> Source | Fetched:
        upstream = await self._pool.take(replica)
        headers = self._headers if last_id is None else [*self._headers, (b"last-event-id", last_id.encode())]
        try:
            async with asyncio.timeout(ANSWER_S):
                upstream.send_head(b"GET", PATH, headers)
                await upstream.end_request()
                head = await upstream.answer()
                self.headers = end_to_end(head.headers)
                if head.status_code == 200:
                    return Source(replica, upstream)
                content = b"".join([part async for part in upstream.body()])
                self._pool.give(replica, upstream)
                return Fetched(replica, head.status_code, list(head.headers), content)
        except (Lost, TimeoutError) as error:
            upstream.close()
            raise ReplicaAway(f"replica {replica.name} does not answer: try again") from error
        except BaseException:  # the client has gone
            upstream.close()
            raise

    async def _close(self) -> None:
        for source in self._sources:
            await source.close()
        self._sources = []


def _parsed(block: bytes) -> Event | None:
    """None for a comment."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
    if b"data" not in fields:
        return None
    event_id = fields.get(b"id")
    return Event(fields[b"event"].decode(), fields[b"data"], None if event_id is None else event_id.decode())
