"""The live stream of the whole cluster: the streams of all replicas that answer, as one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.cluster.fleet import Fleet, State
from app.cluster.front.heads import Headers
from app.cluster.front.merged.event_ids import joined_id, split_id
from app.cluster.front.merged.event_source import Event, Source, Streams
from app.cluster.front.merged.merging import merged_memory
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import ReplicaAway
from app.web.sse import EventStream, sse_event

LAST_ID = b"last-event-id"
FOR_CALLER = (b"access-control-", b"vary", b"x-ratelimit-")
"""How headers begin that a replica has for a page of another site, and for a tenant."""


@dataclass(slots=True)
class _Reading:
    """What one client has read so far."""

    ids: dict[str, str]
    """The last event of each replica."""
    memory: dict[str, object]
    """What each replica has last told of its memory."""


class MergedEvents:
    """Used on the event loop only."""

    def __init__(self, fleet: Fleet, pool: Pool) -> None:
        self._fleet = fleet
        self._pool = pool

    async def serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer a request for the stream, whose `headers` go to the replicas. It ends when a replica goes or comes: a
        client that comes back gets a snapshot of those that are there then.

        Raises `ReplicaAway` if none answers, or one went away just now.
        """
        names = self._answering()
        if not names:
            raise ReplicaAway("no replica answers: try again")
        given = next((value.decode("latin-1") for name, value in headers if name == LAST_ID), "")
        own = [each for each in headers if each[0] != LAST_ID]
        async with Streams(self._pool, self._fleet, own) as streams:
            refusal = await streams.open(names, split_id(given, names))
            if refusal is not None:
                await Response(refusal.content, refusal.status, media_type="application/json")(scope, receive, send)
                return
            stream = EventStream(self._events(streams))
            stream.raw_headers += [each for each in streams.headers if each[0].startswith(FOR_CALLER)]
            await stream(scope, receive, send)

    def _answering(self) -> list[str]:
        return [each.name for each in self._fleet if each.state is not State.AWAY]

    async def _events(self, streams: Streams) -> AsyncGenerator[bytes, None]:
        reading = _Reading(dict(streams.ids), {})
        with contextlib.suppress(EOFError, ReplicaAway):
            first = [await source.next() for source in streams]
            while True:
                if any(event.name == "snapshot" for event in first):
                    async with contextlib.aclosing(self._snapshot(streams, first, reading)) as parts:
                        async for part in parts:
                            yield part
                else:
                    for source, event in zip(list(streams), first, strict=True):
                        if passing := self._passed(source, event, reading, streams.names):
                            yield passing
                while (found := await streams.next())[1].name != "snapshot":
                    if passing := self._passed(*found, reading, streams.names):
                        yield passing
                    if self._answering() != streams.names:
                        return
                # One has missed some. What the others tell of goes behind a snapshot of all.
                await streams.open(streams.names, {})
                first = [await source.next() for source in streams]

    async def _snapshot(self, streams: Streams, first: list[Event], reading: _Reading) -> AsyncGenerator[bytes, None]:
        """One snapshot of all: a client takes what is in none of its parts to be gone."""
        if not all(event.name == "snapshot" for event in first):
            await streams.open(streams.names, {})
            first = [await source.next() for source in streams]
        reading.memory.clear()
        for index, (source, event) in enumerate(zip(streams, first, strict=True)):
            is_last_source = index == len(first) - 1
            while True:
                view = orjson.loads(event.data)
                has_more: bool = view["has_more"]
                if event.id is not None:
                    reading.ids[source.name] = event.id
                is_last = is_last_source and not has_more
                data = orjson.dumps({**view, "has_more": not is_last})
                yield sse_event("snapshot", data, joined_id(reading.ids) if is_last else None)
                if not has_more:
                    break
                event = await source.next()

    def _passed(self, source: Source, event: Event, reading: _Reading, names: list[str]) -> bytes:
        """The event as the client gets it. Figures of memory are those of all, and empty until all have told theirs."""
        if event.id is not None:
            reading.ids[source.name] = event.id
        data = event.data
        if event.name == "memory":
            reading.memory[source.name] = orjson.loads(data)
            if len(reading.memory) < len(names):
                return b""
            data = orjson.dumps(merged_memory(list(reading.memory.values())))
        return sse_event(event.name, data, joined_id(reading.ids) if event.id is not None else None)
