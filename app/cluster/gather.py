"""Lists of the whole cluster.

The replica that is asked gathers the parts of all. A list does not fail when a replica is away: the header `Djinn-
Missing` and the field `missing` name it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson
from starlette.responses import Response
from starlette.types import Scope, Send

from app.cluster.fleet import Fleet
from app.cluster.hop import Answer, Body, Hops, target_bytes
from app.cluster.owners import Owners
from app.cluster.targets import EVENTS, MEMORY, MODELS, UPLOADS
from app.cluster.wires import WireLost
from app.domain.errors import ReplicaAway, ReplicaLost
from app.domain.homes import REPLICA_NAME
from app.web.sse import EventStream, sse_event

PATIENCE_S = 8.0
"""How long a replica may take for its part; its own wait for the engine is shorter."""
MISSING = b"djinn-missing"
OF_EACH = frozenset({b"content-length", b"content-type", b"date", b"server"})
"""Headers that describe one replica's part, not the whole."""
DEFAULT_LIMIT = 20
"""Sessions on a page, the same as at a single server."""
SAME = frozenset({"block_bytes", "block_tokens", "policy"})
"""Memory figures that are the same at all replicas of a model."""
LAST_ID = b"last-event-id"
ONE_ID = re.compile(rf"({REPLICA_NAME.pattern})=([0-9a-f]{{1,16}}-[0-9]{{1,20}})")
LONGEST_EVENT = 16 << 20
WAITING = 64
"""How many events may wait for a slow client. With more, the replicas wait."""


class _Event(NamedTuple):
    name: str
    data: bytes
    id: str | None


Events = AsyncGenerator[_Event, None]


class Gathered:
    """Used on the event loop only."""

    def __init__(self, fleet: Fleet, owners: Owners, hops: Hops) -> None:
        self._fleet = fleet
        self._owners = owners
        self._hops = hops

    async def serve(self, scope: Scope, body: Body, send: Send) -> None:
        """Answer a GET. If this replica refuses it, that is the answer. If it fails, its part is missing too."""
        receive, limit = body.again(), _limit(scope["query_string"])
        if scope["path"] == EVENTS:
            async with contextlib.AsyncExitStack() as ends:
                await (await self._events(scope, ends))(scope, receive, send)
            return
        ways: dict[str, Callable[[Any], Any]] = {MODELS: merged_models, MEMORY: merged_memory}
        ways |= dict.fromkeys(UPLOADS, merged_uploads)
        answer = await self._made(scope, ways.get(scope["path"], lambda pages: merged_page(pages, limit)))
        await answer(scope, receive, send)

    async def _made(self, scope: Scope, make: Callable[[Any], Any]) -> Response:
        names, path = self._names, target_bytes(scope)
        asked = [self._hops.get(each, scope, path, PATIENCE_S) for each in self._fleet if each.name in names]
        told: dict[str, tuple[Answer, bytes]] = {}
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if not isinstance(found, BaseException):
                told[found[0].replica.name] = found
            elif not isinstance(found, ReplicaAway):
                raise found
        if not told:
            raise ReplicaAway("no replica answers: try again")
        parts = {name: each for name, each in told.items() if each[0].status == 200}
        first, content = told.get(self._fleet.here) or next(iter(told.values()))
        if 200 != first.status < 500 or not parts:
            return _whole(first, content)
        whole = make([orjson.loads(content) for _, content in parts.values()])
        if missing := self._missing(parts):
            whole["missing"] = missing
        return _marked(_whole(next(iter(parts.values()))[0], orjson.dumps(whole)), missing)

    @property
    def _names(self) -> list[str]:
        """The names of the replicas to ask now, this one among them."""
        return sorted({self._fleet.here, *(each.name for each in self._fleet.answering)})

    def _missing(self, parts: Iterable[str]) -> list[str]:
        return sorted(self._owners.known - set(parts))

    # The live stream: the streams of all replicas that answer, as one.

    async def _events(self, scope: Scope, ends: contextlib.AsyncExitStack) -> Response:
        """The live stream. It lasts until `ends` is closed, or until a replica comes or goes: the client then comes
        back, and gets a snapshot of those that are there. Raises `ReplicaAway` if one has just gone.
        """
        names = self._names
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == LAST_ID), "")
        ids = split_id(given, names)
        try:
            async with asyncio.timeout(PATIENCE_S):
                answers = await self._opened(scope, names, ids, ends)
                for answer in answers.values():
                    if 200 != answer.status < 500:
                        return _whole(answer, await answer.read())
                streams = {name: _events_of(answer) for name, answer in answers.items() if answer.status == 200}
                first = {name: await anext(events) for name, events in streams.items()}
                if len({event.name == "snapshot" for event in first.values()}) > 1:  # a snapshot is one of all
                    await ends.aclose()
                    ids, answers = {}, await self._opened(scope, streams, {}, ends)
                    streams = {name: _events_of(answer) for name, answer in answers.items()}
                    first = {name: await anext(events) for name, events in streams.items()}
        except (ReplicaLost, TimeoutError, StopAsyncIteration) as error:
            raise ReplicaAway(f"a replica does not answer ({error or 'no event in time'}): try again") from error
        stream = EventStream(self._merged(names, streams, first, dict(ids)))
        limits = next(iter(answers.values())).headers
        stream.raw_headers += [each for each in limits if each[0].startswith(b"x-ratelimit-")]
        return _marked(stream, self._missing(streams))

    async def _opened(
        self, scope: Scope, names: Iterable[str], ids: Mapping[str, str], ends: contextlib.AsyncExitStack
    ) -> dict[str, Answer]:
        """The streams of these replicas, each from the event after the one in `ids`. Raises `ReplicaAway`."""
        found = {}
        for name in names:
            replica = self._fleet.own if name == self._fleet.here else self._fleet.reachable(name)
            headers = [each for each in scope["headers"] if each[0] != LAST_ID]
            headers += [(LAST_ID, ids[name].encode())] if name in ids else []
            found[name] = await ends.enter_async_context(self._hops.getting(replica, {**scope, "headers": headers}))
        return found

    async def _merged(
        self, names: list[str], streams: Mapping[str, Events], first: Mapping[str, _Event], ids: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """What the client gets. `ids` are the last events of each replica that it has."""
        memory: dict[str, Any] = {}

        def passed(name: str, event: _Event) -> bytes:
            """As the client gets it. Figures of memory are those of all, and empty until all have told theirs."""
            if event.id is not None:
                ids[name] = event.id
            data = event.data
            if event.name == "memory":
                memory[name] = orjson.loads(data)
                if len(memory) < len(streams):
                    return b""
                data = orjson.dumps(merged_memory(list(memory.values())))
            return sse_event(event.name, data, joined_id(ids) if event.id is not None else None)

        for name, event in first.items():
            if event.name != "snapshot":
                yield passed(name, event)
                continue
            async for part in _behind(event, streams[name]):  # a client takes what is in none of its parts to be gone
                view = orjson.loads(part.data)
                if part.id is not None:
                    ids[name] = part.id
                is_last = name == list(first)[-1] and not view["has_more"]
                yield sse_event(
                    "snapshot", orjson.dumps({**view, "has_more": not is_last}), joined_id(ids) if is_last else None
                )
                if not view["has_more"]:
                    break
        waiting = asyncio.Queue[tuple[str, _Event | None]](WAITING)
        reading = [asyncio.create_task(_read(name, events, waiting)) for name, events in streams.items()]
        try:
            while self._names == names:
                name, found = await waiting.get()
                if found is None or found.name == "snapshot":  # one has ended, or has missed some: all begin anew
                    return
                if content := passed(name, found):
                    yield content
        finally:
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)


async def _behind(first: _Event, events: Events) -> Events:
    yield first
    async for event in events:
        yield event


async def _read(name: str, events: Events, waiting: asyncio.Queue[tuple[str, _Event | None]]) -> None:
    async for event in events:
        await waiting.put((name, event))
    await waiting.put((name, None))


async def _events_of(answer: Answer) -> Events:
    """The events of one replica's stream, without comments, to its end."""
    rest, is_over = b"", False
    while not is_over and len(rest) <= LONGEST_EVENT:
        try:
            part, is_over = await answer.part()
        except (ReplicaLost, WireLost):
            return
        *blocks, rest = (rest + part).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
            if b"data" in fields:
                event_id = fields.get(b"id")
                yield _Event(
                    fields[b"event"].decode(), fields[b"data"], None if event_id is None else event_id.decode()
                )


def joined_id(ids: Mapping[str, str]) -> str:
    """One event id for the client, which names the last event of each replica."""
    return ",".join(f"{name}={ids[name]}" for name in sorted(ids))


def split_id(event_id: str, names: Iterable[str]) -> dict[str, str]:
    """The event id of each replica. Empty if `event_id` is malformed or was made for other replicas."""
    found = [ONE_ID.fullmatch(part) for part in event_id.split(",")]
    ids = {each[1]: each[2] for each in found if each is not None}
    return ids if len(ids) == len(found) and set(ids) == set(names) else {}


# One answer made of those of all replicas. Everything below is plain data.


def merged_models(pages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each model once, in the same form as the lists."""
    models = {model["id"]: model for page in pages for model in reversed(page["data"])}
    last = {"last_id": list(models)[-1]} if "last_id" in pages[0] else {}
    return {**pages[0], **last, "data": list(models.values())}


def merged_uploads(lists: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each vector, dictionary, lens or probe once, ordered by name."""
    found = {upload["name"]: upload for each in lists for upload in each["data"]}
    return {**lists[0], "data": [found[name] for name in sorted(found)]}


def merged_page(pages: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """A page of `limit` sessions, ordered by id, from the replicas' pages after the same id.

    A session that has just moved may be on two of them: the entry that was used last counts.
    """
    listed = sorted((session for page in pages for session in page["data"]), key=lambda session: session["used_at"])
    found = {session["id"]: session for session in listed}
    sessions = [found[each] for each in sorted(found)]
    has_more = len(sessions) > limit or any(page["has_more"] for page in pages)
    return {**pages[0], "data": sessions[:limit], "has_more": has_more}


def merged_memory(views: Sequence[Any]) -> Any:
    """The sums of all figures. `bytes_per_s` is computed anew from the sums."""
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


def _whole(head: Answer, content: bytes) -> Response:
    """A response with the headers of a replica's answer, such as the tenant's limits."""
    answer = Response(content, head.status, media_type=dict(head.headers).get(b"content-type", b"").decode("latin-1"))
    answer.raw_headers += [each for each in head.headers if each[0] not in OF_EACH]
    return answer


def _marked(answer: Response, missing: Sequence[str]) -> Response:
    """The answer, with a header that names the replicas whose parts are missing."""
    if missing:
        answer.raw_headers.append((MISSING, ",".join(missing).encode()))
    return answer


def _limit(query: bytes) -> int:
    """The page size. The replicas refuse numbers that are out of range."""
    (text,) = parse_qs(query.decode("latin-1")).get("limit", [""])[-1:]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else DEFAULT_LIMIT
