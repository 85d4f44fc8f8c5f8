"""Lists of the whole cluster.

The replica that is asked collects the parts of all. A list does not fail when a replica is away: the header
`Djinn-Missing` and the field `missing` name that replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args
from urllib.parse import parse_qs

import orjson
from starlette.responses import Response
from starlette.types import Scope, Send

from app.cluster.fleet import Fleet
from app.cluster.hop import Answer, Body, Hops, target_bytes
from app.cluster.owners import EVENTS, FINDINGS, MEMORY, MODELS, UPLOADS, Owners
from app.cluster.wires import WireLost
from app.domain.errors import ReplicaAway, ReplicaLost
from app.domain.homes import REPLICA_NAME
from app.sessions.findings import FindingKind
from app.web.sse import EventStream, sse_event

PATIENCE_S = 8.0
"""How long a replica may take for its part. It waits less for its engine."""
OF_EACH = frozenset({b"content-length", b"content-type", b"date", b"server"})
"""Headers that describe one replica's part, not the whole."""
DEFAULT_LIMIT = 20
"""Sessions on a page, the same as at a single server."""
SAME = frozenset({"block_bytes", "block_tokens", "policy"})
"""Memory figures that are the same at all replicas of a model."""
KINDS = get_args(FindingKind)
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
        """Answer a GET. If this replica refuses it, the client gets that answer. If it fails, its part is missing."""
        receive, limit = body.again(), _limit(scope["query_string"])
        ways: dict[str, Callable[[Any], Any]] = {
            MODELS: merged_models,
            MEMORY: merged_memory,
            FINDINGS: merged_findings,
        }
        ways |= dict.fromkeys(UPLOADS, merged_uploads)
        make = ways.get(scope["path"], lambda pages: merged_page(pages, limit))
        async with contextlib.AsyncExitStack() as ends:
            made = self._events(scope, ends) if scope["path"] == EVENTS else self._list(scope, make)
            await (await made)(scope, receive, send)

    async def _list(self, scope: Scope, make: Callable[[Any], Any]) -> Response:
        names = self._names
        asked = [each for each in self._fleet if each.name in names]
        told = await self._hops.get(asked, scope, target_bytes(scope), PATIENCE_S)
        if not told:
            raise ReplicaAway("no replica answers: try again")
        parts = {name: each for name, each in told.items() if each[0].status == 200}
        first, content = told.get(self._fleet.here) or next(iter(told.values()))
        if 200 != first.status < 500 or not parts:
            return _whole(first, content)
        whole = make([orjson.loads(content) for _, content in parts.values()])
        if missing := self._missing(parts):
            whole["missing"] = missing
        answer = _whole(next(iter(parts.values()))[0], orjson.dumps(whole))
        answer.raw_headers += _marks(missing)
        return answer

    @property
    def _names(self) -> list[str]:
        """The names of the replicas to ask now, including this one."""
        return sorted({self._fleet.here, *(each.name for each in self._fleet.answering)})

    def _missing(self, parts: Iterable[str]) -> list[str]:
        return sorted(self._owners.known - set(parts))

    # The live stream: the streams of all replicas that answer, as one.

    async def _events(self, scope: Scope, ends: contextlib.AsyncExitStack) -> Response:
        """The live stream. It lasts until `ends` is closed, or until a replica comes or goes: the client then comes
        back, and gets a snapshot of those that are there. Raises `ReplicaAway` if one has just gone.
        """
        names, answers, is_whole = self._names, dict[str, Answer](), False
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == LAST_ID), "")
        others, ids = [each for each in scope["headers"] if each[0] != LAST_ID], split_id(given, names)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not is_whole:
                    await ends.aclose()
                    for name in names:
                        replica = self._fleet.own if name == self._fleet.here else self._fleet.reachable(name)
                        headers = [*others, (LAST_ID, ids[name].encode())] if name in ids else others
                        got = self._hops.getting(replica, {**scope, "headers": headers})
                        answers[name] = answer = await ends.enter_async_context(got)
                        if 200 != answer.status < 500:
                            return _whole(answer, await answer.read())
                    streams = {name: _events_of(answer) for name, answer in answers.items() if answer.status == 200}
                    first = {name: await anext(events) for name, events in streams.items()}
                    is_whole = not (ids and any(event.name == "snapshot" for event in first.values()))
                    ids = ids if is_whole else {}  # a snapshot is one of all
        except (ReplicaLost, TimeoutError, StopAsyncIteration) as error:
            raise ReplicaAway(f"a replica does not answer ({error or 'no event in time'}): try again") from error
        stream = EventStream(self._merged(names, streams, first, dict(ids)))
        limits = next(iter(answers.values())).headers
        stream.raw_headers += [each for each in limits if each[0].startswith(b"x-ratelimit-")]
        stream.raw_headers += _marks(self._missing(streams))
        return stream

    async def _merged(
        self, names: list[str], streams: Mapping[str, Events], first: Mapping[str, _Event], ids: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """What the client gets. `ids` are the last events of each replica that it has."""
        figures: dict[str, dict[str, Any]] = {name: {} for name in MERGED}

        def passed(name: str, event: _Event) -> bytes:
            """As the client gets it. Figures are those of all, and empty until all have told theirs."""
            if event.id is not None:
                ids[name] = event.id
            data = event.data
            if event.name in MERGED:
                parts = figures[event.name]
                parts[name] = orjson.loads(data)
                if len(parts) < len(streams):
                    return b""
                data = orjson.dumps(MERGED[event.name](list(parts.values())))
            return sse_event(event.name, data, joined_id(ids) if event.id is not None else None)

        for name, event in first.items():
            if event.name != "snapshot":
                yield passed(name, event)
                continue
            part: _Event | None = event
            while part is not None:  # clients drop sessions that no part names
                view = orjson.loads(part.data)
                if part.id is not None:
                    ids[name] = part.id
                is_last = name == list(first)[-1] and not view["has_more"]
                data = orjson.dumps({**view, "has_more": not is_last})
                yield sse_event("snapshot", data, joined_id(ids) if is_last else None)
                part = await anext(streams[name], None) if view["has_more"] else None
        waiting = asyncio.Queue[tuple[str, _Event | None]](WAITING)

        async def read(name: str, events: Events) -> None:
            async for event in events:
                await waiting.put((name, event))
            await waiting.put((name, None))

        reading = [asyncio.create_task(read(name, events)) for name, events in streams.items()]
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


async def _events_of(answer: Answer) -> Events:
    """The events of one replica's stream, without comments, to its end."""
    rest, is_over = b"", False
    while not is_over and len(rest) <= LONGEST_EVENT:
        try:
            part, is_over = await answer.part()
        except (WireLost, ReplicaLost):
            return
        *blocks, rest = (rest + part).split(b"\n\n")
        for block in blocks:
            lines = block.decode().split("\n")
            fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
            if "data" in fields:
                yield _Event(fields["event"], fields["data"].encode(), fields.get("id"))


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


def merged_findings(views: Sequence[Any]) -> Any:
    """Each sentence once, as all see a replica that is away, and what all have room for."""
    found = {each["text"]: each for view in views for each in view["data"]}
    capacities = [view["capacity"] for view in views if view["capacity"] is not None]
    least = min(capacities, key=lambda each: each["more"], default=None)
    capacity = least and {"more": sum(each["more"] for each in capacities), "text": least["text"]}
    return {"data": sorted(found.values(), key=lambda each: KINDS.index(each["kind"])), "capacity": capacity}


MERGED: dict[str, Callable[[Sequence[Any]], Any]] = {"memory": merged_memory, "findings": merged_findings}
"""Events of figures, and how those of all replicas are one."""


def _whole(head: Answer, content: bytes) -> Response:
    """A response with the headers of a replica's answer, such as the tenant's limits."""
    answer = Response(content, head.status, media_type=dict(head.headers).get(b"content-type", b"").decode("latin-1"))
    answer.raw_headers += [each for each in head.headers if each[0] not in OF_EACH]
    return answer


def _marks(missing: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """The header that names the replicas whose parts are missing."""
    return [(b"djinn-missing", ",".join(missing).encode())] if missing else []


def _limit(query: bytes) -> int:
    """The page size. The replicas refuse numbers that are out of range."""
    (text,) = parse_qs(query.decode("latin-1")).get("limit", [""])[-1:]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else DEFAULT_LIMIT
