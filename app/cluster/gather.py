"""Answers about the whole cluster: each is made of those of all replicas, by the one that is asked.

A replica that does not answer makes no list fail. The answer then says whose part is missing, in the header
`Djinn-Missing` and in the field `missing`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import orjson
from starlette.responses import Response
from starlette.types import Scope, Send

from app.cluster.fleet import Fleet, Replica
from app.cluster.hop import Answer, Body, Hops, target_bytes
from app.cluster.owners import Owners
from app.cluster.targets import EVENTS, MEMORY, MODELS, UPLOADS
from app.domain.errors import ReplicaAway, ReplicaLost
from app.domain.homes import REPLICA_NAME
from app.web.sse import EventStream, sse_event

PATIENCE_S = 8.0
"""How long a replica may take for its part; its own wait for the engine is shorter."""
MISSING = b"djinn-missing"
OF_EACH = frozenset({b"content-length", b"content-type", b"date", b"server"})
"""Headers of a replica's answer that say nothing of the whole one."""
DEFAULT_LIMIT = 20
"""Sessions of a page, as the replicas have it."""
SAME = frozenset({"block_bytes", "block_tokens", "policy"})
"""Figures of memory that all replicas of one model have alike."""
LAST_ID = b"last-event-id"
ONE_ID = re.compile(rf"({REPLICA_NAME.pattern})=([0-9a-f]{{1,16}}-[0-9]{{1,20}})")
LONGEST_EVENT = 16 << 20
WAITING = 64
"""Events of one replica that wait for the others: with more, the replica waits."""


class Gathered:
    """Used on the event loop only."""

    def __init__(self, fleet: Fleet, owners: Owners, hops: Hops) -> None:
        self._fleet = fleet
        self._owners = owners
        self._hops = hops

    async def serve(self, scope: Scope, body: Body, send: Send) -> None:
        """Answer a GET. What this replica refuses is refused; if it cannot give its own part, that is missing too."""
        receive = body.again()
        match scope["path"]:
            case path if path == EVENTS:
                answer: Response | None = await self._events(scope, body, send)
            case path if path == MODELS:
                answer = await self._made(scope, merged_models)
            case path if path == MEMORY:
                answer = await self._made(scope, merged_memory)
            case path if path in UPLOADS:
                answer = await self._made(scope, merged_uploads)
            case _:
                limit = _limit(scope["query_string"])
                answer = await self._made(scope, lambda pages: merged_page(pages, limit))
        if answer is not None:
            await answer(scope, receive, send)

    async def _made(self, scope: Scope, make: Callable[[list[Any]], Any]) -> Response:
        asked = list(dict.fromkeys([self._fleet.own, *self._fleet.answering]))
        path = target_bytes(scope)
        found = await asyncio.gather(
            *(self._hops.get(each, scope, path, PATIENCE_S) for each in asked), return_exceptions=True
        )
        told: dict[str, tuple[Answer, bytes]] = {}
        for replica, each in zip(asked, found, strict=True):
            if not isinstance(each, BaseException):
                told[replica.name] = each
            elif not isinstance(each, ReplicaAway):
                raise each
        parts = {name: each for name, each in told.items() if each[0].status == 200}
        first, content = told.get(self._fleet.here) or next(iter(told.values()), (None, b""))
        if first is None:
            raise ReplicaAway("no replica answers: try again")
        if 200 != first.status < 500 or not parts:
            kind = dict(first.headers).get(b"content-type", b"").decode("latin-1")
            return _with_headers(first, Response(content, first.status, media_type=kind))
        whole = make([orjson.loads(content) for _, content in parts.values()])
        if missing := sorted(self._owners.known - parts.keys()):
            whole["missing"] = missing
        answer = _with_headers(
            next(iter(parts.values()))[0], Response(orjson.dumps(whole), media_type="application/json")
        )
        if missing:
            answer.raw_headers.append((MISSING, ",".join(missing).encode()))
        return answer

    # The live stream: the streams of all replicas that answer, as one.

    async def _events(self, scope: Scope, body: Body, send: Send) -> Response | None:
        """The stream ends when a replica goes or comes: a client that comes back gets a snapshot of those that are
        there then. Returns the answer of a replica that refuses. Raises `ReplicaAway` if one went away just now.
        """
        names = self._names
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == LAST_ID), "")
        headers = [each for each in scope["headers"] if each[0] != LAST_ID]
        async with _Streams(self._fleet, self._hops, {**scope, "headers": headers}) as streams:
            try:
                refusal = await streams.open(names, split_id(given, names))
            except ReplicaLost as error:
                raise ReplicaAway(error.message) from error
            if refusal is not None:
                answer, content = refusal
                return _with_headers(answer, Response(content, answer.status, media_type="application/json"))
            stream = EventStream(self._merged(streams, names))
            stream.raw_headers += [each for each in streams.headers if each[0].startswith(b"x-ratelimit-")]
            if missing := sorted(self._owners.known - set(streams.names)):
                stream.raw_headers.append((MISSING, ",".join(missing).encode()))
            await stream(scope, body.again(), send)
        return None

    @property
    def _names(self) -> list[str]:
        """Of those whose streams there are now, this replica's among them."""
        return sorted({self._fleet.here, *(each.name for each in self._fleet.answering)})

    async def _merged(self, streams: _Streams, names: list[str]) -> AsyncGenerator[bytes, None]:
        reading = _Reading(dict(streams.ids))
        with contextlib.suppress(EOFError, ReplicaAway, ReplicaLost):
            first = [await source.next() for source in streams.sources]
            while True:
                if any(event.name == "snapshot" for event in first):
                    async with contextlib.aclosing(_snapshot(streams, first, reading)) as parts:
                        async for part in parts:
                            yield part
                else:
                    for source, event in zip(list(streams.sources), first, strict=True):
                        if passing := reading.passed(source, event, streams.names):
                            yield passing
                while (found := await streams.next())[1].name != "snapshot":
                    if passing := reading.passed(*found, streams.names):
                        yield passing
                    if self._names != names:
                        return
                # One has missed some. What the others tell of goes behind a snapshot of all.
                await streams.open(streams.names, {})
                first = [await source.next() for source in streams.sources]


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    data: bytes
    id: str | None


@dataclass(slots=True)
class _Reading:
    """What one client has read so far."""

    ids: dict[str, str]
    """The last event of each replica."""
    memory: dict[str, object] = field(default_factory=dict)
    """What each replica has last told of its memory."""

    def passed(self, source: _Source, event: _Event, names: list[str]) -> bytes:
        """The event as the client gets it. Figures of memory are those of all, and empty until all have told theirs."""
        if event.id is not None:
            self.ids[source.name] = event.id
        data = event.data
        if event.name == "memory":
            self.memory[source.name] = orjson.loads(data)
            if len(self.memory) < len(names):
                return b""
            data = orjson.dumps(merged_memory(list(self.memory.values())))
        return sse_event(event.name, data, joined_id(self.ids) if event.id is not None else None)


async def _snapshot(streams: _Streams, first: list[_Event], reading: _Reading) -> AsyncGenerator[bytes, None]:
    """One snapshot of all: a client takes what is in none of its parts to be gone."""
    if not all(event.name == "snapshot" for event in first):
        await streams.open(streams.names, {})
        first = [await source.next() for source in streams.sources]
    reading.memory.clear()
    for index, (source, event) in enumerate(zip(list(streams.sources), first, strict=True)):
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


class _Source:
    """The stream of one replica."""

    def __init__(self, answer: Answer, news: asyncio.Event) -> None:
        self.name = answer.replica.name
        self._events: asyncio.Queue[_Event | None] = asyncio.Queue(WAITING)
        self._news = news
        self._answer = answer

    async def next(self) -> _Event:
        """The next event. Raises `EOFError` at the end of the stream."""
        event = await self._events.get()
        if event is None:
            raise EOFError
        return event

    def waiting(self) -> _Event | None:
        """An event that is there already; None: there is none. Raises `EOFError` at the end of the stream."""
        try:
            event = self._events.get_nowait()
        except asyncio.QueueEmpty:
            return None
        if event is None:
            raise EOFError
        return event

    async def read(self) -> None:
        """Take what comes, to the end of the stream."""
        rest = b""
        async for part in self._answer.parts:
            *blocks, rest = (rest + part).split(b"\n\n")
            for block in blocks:
                if (event := _parsed(block)) is not None:
                    await self._events.put(event)
                    self._news.set()
            if len(rest) > LONGEST_EVENT:
                return

    async def end(self) -> None:
        """Say that nothing more comes."""
        await self._events.put(None)
        self._news.set()


class _Streams:
    """The streams of several replicas, in the order of their names. They are closed at the end of the block."""

    def __init__(self, fleet: Fleet, hops: Hops, scope: Scope) -> None:
        """`scope` is that of the client's request."""
        self._fleet = fleet
        self._hops = hops
        self._scope = scope
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self.sources: list[_Source] = []
        self.names: list[str] = []
        self.ids: Mapping[str, str] = {}
        """From which event on each was asked for."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Those of a replica's answer."""

    async def __aenter__(self) -> _Streams:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def open(self, names: Sequence[str], ids: Mapping[str, str]) -> tuple[Answer, bytes] | None:
        """Open all of them, in place of those that were open, each behind the event that `ids` has for it. Returns the
        answer of one that refuses. One that cannot give its part is left out. Raises `ReplicaAway`, `ReplicaLost`.
        """
        await self._close()
        self.names, self.ids = [], ids
        for name in names:
            opened: asyncio.Future[tuple[Answer, bytes] | _Source] = asyncio.get_running_loop().create_future()
            replica = self._fleet.own if name == self._fleet.here else self._fleet.reachable(name)
            self._tasks.append(asyncio.create_task(self._read(replica, ids.get(name), opened)))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    found = await opened
            except TimeoutError as error:
                raise ReplicaAway(f"replica {name} does not answer: try again") from error
            if isinstance(found, _Source):
                self.sources.append(found)
                self.names.append(name)
            elif found[0].status < 500:
                return found
        return None

    async def next(self) -> tuple[_Source, _Event]:
        """The next event of any. Raises `EOFError` when one has ended."""
        while True:
            self._news.clear()
            for source in self.sources:
                if (event := source.waiting()) is not None:
                    self.sources.remove(source)
                    self.sources.append(source)  # looked at last from now on
                    return source, event
            await self._news.wait()

    async def _read(
        self, replica: Replica, last_id: str | None, opened: asyncio.Future[tuple[Answer, bytes] | _Source]
    ) -> None:
        """Open one stream, say so, and read it to its end."""
        headers = self._scope["headers"] + ([] if last_id is None else [(LAST_ID, last_id.encode())])
        source: _Source | None = None
        try:
            async with self._hops.getting(replica, {**self._scope, "headers": headers}) as answer:
                self.headers = answer.headers
                if answer.status != 200:
                    opened.set_result((answer, await answer.read()))
                    return
                source = _Source(answer, self._news)
                opened.set_result(source)
                await source.read()
        except (ReplicaAway, ReplicaLost) as error:
            if not opened.done():
                opened.set_exception(error)
        if source is not None:
            await source.end()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks, self.sources = [], []


def _parsed(block: bytes) -> _Event | None:
    """None for a comment."""
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
    if b"data" not in fields:
        return None
    event_id = fields.get(b"id")
    return _Event(fields[b"event"].decode(), fields[b"data"], None if event_id is None else event_id.decode())


def joined_id(ids: Mapping[str, str]) -> str:
    """One id of those of all replicas: it names the last event of each."""
    return ",".join(f"{name}={ids[name]}" for name in sorted(ids))


def split_id(event_id: str, names: Iterable[str]) -> dict[str, str]:
    """The id of each replica; empty if these are not the replicas that it was made for, or it was made by nobody."""
    found = [ONE_ID.fullmatch(part) for part in event_id.split(",")]
    ids = {each[1]: each[2] for each in found if each is not None}
    return ids if len(ids) == len(found) and set(ids) == set(names) else {}


# One answer made of those of all replicas. Everything below is plain data.


def merged_models(pages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every model once, in the form that the replicas' lists have."""
    models = {model["id"]: model for page in pages for model in reversed(page["data"])}
    last = {"last_id": list(models)[-1]} if "last_id" in pages[0] else {}
    return {**pages[0], **last, "data": list(models.values())}


def merged_uploads(lists: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every vector, dictionary or lens once, by name."""
    found = {upload["name"]: upload for each in lists for upload in each["data"]}
    return {**lists[0], "data": [found[name] for name in sorted(found)]}


def merged_page(pages: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """A page of `limit` sessions in the order of their ids, of the replicas' pages behind the same place.

    A session that has just moved may still be listed at its old home too, as it was there: the one used last counts.
    """
    listed = sorted((session for page in pages for session in page["data"]), key=lambda session: session["used_at"])
    found = {session["id"]: session for session in listed}
    sessions = [found[each] for each in sorted(found)]
    has_more = len(sessions) > limit or any(page["has_more"] for page in pages)
    return {**pages[0], "data": sessions[:limit], "has_more": has_more}


def merged_memory(views: Sequence[Any]) -> Any:
    """The sums of all figures; of what has moved, the bytes of a second of all copies."""
    first = views[0]
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for view in views for name in view)
        found = {}
        for name in names:
            values = [view[name] for view in views if name in view]
            found[name] = values[0] if name in SAME else merged_memory(values)
        if "bytes_per_s" in found:
            found["bytes_per_s"] = found["bytes"] / found["seconds"] if found["seconds"] else None
        return found
    known = [view for view in views if view is not None]
    return sum(known) if known and not isinstance(known[0], Mapping) else merged_memory(known) if known else None


def _with_headers(found: Answer, answer: Response) -> Response:
    """The answer with the headers that a replica's own has, such as limits of the tenant."""
    answer.raw_headers += [each for each in found.headers if each[0] not in OF_EACH]
    return answer


def _limit(query: bytes) -> int:
    """How many sessions a page has. A number that replicas refuse is theirs to refuse."""
    (text,) = parse_qs(query.decode("latin-1")).get("limit", [""])[-1:]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else DEFAULT_LIMIT
