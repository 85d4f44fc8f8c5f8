"""Lists of the whole cluster. The replica that is asked collects the parts of all. The header `Djinn-Missing` and the
field `missing` name those that are away.
"""

import asyncio
import contextlib
import itertools
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import orjson
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.cluster.fleet import Fleet, Replica
from app.cluster.hop import NOT_OF_A_GET, Hops, silent, target_bytes
from app.cluster.owners import Owners
from app.domain.errors import DjinnError, ReplicaAway, ReplicaLost
from app.domain.homes import REPLICA_NAME
from app.sessions.findings import FindingKind
from app.web.sse import EventStream, sse_event

logger = logging.getLogger(__name__)
PATIENCE_S = 8.0
"""How long a replica may take for its part. It waits less for its engine."""
DEFAULT_LIMIT = 20
"""Sessions on a page, the same as at a single server."""
SAME = frozenset({"block_bytes", "block_tokens", "policy", "at"})
"""Figures that are the same at all replicas of a model, and that add up no more than they do."""
LAST_ID = "last-event-id"
ONE_ID = re.compile(rf"({REPLICA_NAME.pattern})=([0-9a-f]{{1,16}}-[0-9]{{1,20}})")
LONGEST_EVENT, WAITING = 16 << 20, 64
"""Most bytes of an event, and how many may wait for a slow client. With more, the replicas wait."""
DAMAGED = (AttributeError, LookupError, TypeError, ValueError)
"""What merging raises for JSON of another shape."""


class _Event(NamedTuple):
    name: str
    data: bytes
    id: str | None
    view: Any
    """What `data` says, if it is a snapshot or figures."""


Told = tuple[str, "_Event | Response"]
"""The next event of the replica of that name, or at the end of its stream its answer."""


class Gathered:
    """Used on the event loop only."""

    def __init__(self, fleet: Fleet, owners: Owners, hops: Hops) -> None:
        self._fleet, self._owners, self._hops = fleet, owners, hops

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a GET. If this replica refuses it, the client gets that answer. If it fails, its part is missing."""
        async with contextlib.AsyncExitStack() as ends:
            made = self._events(scope, ends) if scope["path"] == "/v1/events" else self._list(scope)
            await (await made)(scope, receive, send)

    async def _list(self, scope: Scope) -> Response:
        told = await self._hops.get(self._fleet.answering, scope, target_bytes(scope), PATIENCE_S)
        if not told:
            raise ReplicaAway("no replica answers: try again")
        first, _ = told.get(self._fleet.own) or next(iter(told.values()))
        asked = QueryParams(scope["query_string"]).get("limit", "")  # in range, as replicas refuse others
        limit, parts = int(asked) if asked.isdecimal() else DEFAULT_LIMIT, dict[str, Any]()
        of_sessions: Callable[[Sequence[Any]], Any] = partial(merged_page, limit=limit)
        merged = MERGED.get(scope["path"].removeprefix("/v1/"), of_sessions)
        for replica, (answer, page) in told.items():
            if answer.status_code == 200:
                try:
                    merged([page, page])  # what is of no use may show beside others only
                    whole = merged([*parts.values(), page])
                    parts[replica.name] = page
                except DAMAGED as error:
                    logger.warning("replica %s answers %s with JSON of no use: %r", replica.name, scope["path"], error)
        if 200 != first.status_code < 500 or not parts:
            return first
        answer = next(answer for replica, (answer, _) in told.items() if replica.name in parts)
        if missing := self._mark(answer, parts):
            whole["missing"] = missing
        answer.body = orjson.dumps(whole)
        answer.headers["content-length"] = str(len(answer.body))
        return answer

    def _mark(self, answer: Response, parts: Iterable[str]) -> list[str]:
        """Name the replicas whose parts are missing in a header. Returns their names."""
        missing = sorted(self._owners.names.known - set(parts))
        if missing:
            answer.headers["djinn-missing"] = ",".join(missing)
        return missing

    # The live stream: the streams of all replicas that answer, as one.

    async def _events(self, scope: Scope, ends: contextlib.AsyncExitStack) -> Response:
        """The live stream. It ends when `ends` is closed, and when a replica joins or leaves: the client then connects
        again, and gets a snapshot of all. Raises `ReplicaAway` if no replica sends an event in time.
        """
        asked = self._fleet.answering
        ids = split_id(Headers(scope=scope).get(LAST_ID, ""), [each.name for each in asked])
        while True:
            told, first, later, over = asyncio.Queue[Told](WAITING), dict[str, _Event](), list[Told](), set[str]()
            for each in asked:
                ends.callback(asyncio.create_task(self._read(each, scope, ids.get(each.name, ""), told)).cancel)
            with contextlib.suppress(TimeoutError):  # the header names those that are silent
                async with asyncio.timeout(PATIENCE_S):
                    while len(first) + len(over) < len(asked):
                        name, found = await told.get()
                        if name in first:
                            later.append((name, found))
                        elif isinstance(found, _Event):
                            first[name] = found
                        elif 200 != found.status_code < 500:
                            return found
                        else:
                            over.add(name)
            if not first:
                raise ReplicaAway("no replica answers: try again")
            if not ids or all(event.name != "snapshot" for event in first.values()):
                break
            ids = {}  # a snapshot is one of all
            await ends.aclose()
        stream = EventStream(self._merged(asked, first, later, told, ids))
        self._mark(stream, first)
        return stream

    async def _read(self, replica: Replica, scope: Scope, last_id: str, told: asyncio.Queue[Told]) -> None:
        """Tell the events of one replica's stream after that one, and at its end its answer without them."""
        headers = [each for each in scope["headers"] if not each[0].startswith((*NOT_OF_A_GET, LAST_ID.encode()))]
        if last_id:
            headers.append((LAST_ID.encode(), last_id.encode()))
        head, content = dict[str, Any](status=503), b""

        async def take(message: Message) -> None:
            nonlocal head, content
            if message["type"] == "http.response.start":
                head = dict(message)
            content += message.get("body", b"")
            if head["status"] == 200:
                *blocks, content = content.split(b"\n\n")
                for event in filter(None, map(_event_of, blocks)):
                    await told.put((replica.name, event))
            if len(content) > LONGEST_EVENT:
                raise ReplicaLost(f"replica {replica.name} has sent an event that is too large")

        try:
            await self._hops.at(replica)({**scope, "headers": headers}, silent(), take)
        except Exception as error:
            if not isinstance(error, DjinnError):
                known = isinstance(error, DAMAGED)
                logger.warning("the live stream of replica %s ended: %r", replica.name, error, exc_info=not known)
        answer = Response(content, head["status"])
        answer.raw_headers = head.get("headers", [])
        await told.put((replica.name, answer))

    async def _merged(
        self,
        asked: list[Replica],
        first: Mapping[str, _Event],
        later: list[Told],
        told: asyncio.Queue[Told],
        ids: dict[str, str],
    ) -> AsyncGenerator[bytes, None]:
        """What the client gets, which has all events up to `ids`. Figures are those of all, once all have told them."""
        figures: dict[str, dict[str, Any]] = {}
        pending = {name for name, event in first.items() if event.name == "snapshot"}
        waiting, held = deque[Told]([*first.items(), *later]), list[Told]()
        while self._fleet.answering == asked:
            name, event = waiting.popleft() if waiting else await told.get()
            if isinstance(event, Response) or (event.name == "snapshot" and name not in pending):
                return  # one has ended, or has missed some: all begin anew
            if pending and event.name != "snapshot":
                held.append((name, event))
                continue
            if event.id is not None:
                ids[name] = event.id
            data, has_id, merged = event.data, event.id is not None, MERGED.get(event.name)
            if event.name == "snapshot":  # clients drop sessions that no part names
                if not event.view["has_more"]:
                    pending.discard(name)
                has_id, data = not pending, orjson.dumps({**event.view, "has_more": bool(pending)})
                if not pending:
                    waiting.extendleft(reversed(held))
            elif merged is not None:
                parts = figures.setdefault(event.name, {})
                parts[name] = event.view
                if len(parts) < len(first):
                    continue
                try:
                    data = orjson.dumps(merged(list(parts.values())))
                except DAMAGED as error:  # such as figures of another version
                    logger.warning("figures of replicas do not go together: %s: %r", event.name, error)
                    continue
            last = ",".join(f"{each}={ids[each]}" for each in sorted(ids))
            yield sse_event(event.name, data, last if has_id else None)


def _event_of(block: bytes) -> _Event | None:
    """The event; None for a comment. Raises one of `DAMAGED`."""
    lines = block.decode().split("\n")
    fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
    if "data" not in fields:
        return None
    name, data = fields["event"], fields["data"].encode()
    view: Any = orjson.loads(data) if name == "snapshot" or name in MERGED else None
    if name == "snapshot":
        view = {**view, "has_more": bool(view["has_more"])}
    elif name in MERGED:
        MERGED[name]([view])
    return _Event(name, data, fields.get("id"), view)


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
    """A page of `limit` sessions by id, or of closed ones, the latest first. Of two views the newer one counts."""
    time = "closed_at" if any("closed_at" in each for page in pages for each in page["data"]) else "used_at"
    listed = sorted((session for page in pages for session in page["data"]), key=lambda session: session[time])
    found = {session["id"]: session for session in listed}
    sessions = listed[::-1] if time == "closed_at" else [found[each] for each in sorted(found)]
    has_more = len(sessions) > limit or any(page["has_more"] for page in pages)
    return {**pages[0], "data": sessions[:limit], "has_more": has_more}


def merged_memory(views: Sequence[Any]) -> Any:
    """The sums of all figures. `bytes_per_s` is computed anew from the sums."""
    known = [view for view in views if view is not None]
    if not known or not isinstance(known[0], Mapping):
        return sum(known) if known else None
    found = {}
    for name in dict.fromkeys(itertools.chain(*known)):
        values = [view[name] for view in known if name in view]
        found[name] = values[0] if name in SAME else (max if name == "worst_ms" else merged_memory)(values)
    if "bytes_per_s" in found:
        found["bytes_per_s"] = found["bytes"] / found["seconds"] if found["seconds"] else None
    return found


def merged_activity(views: Sequence[Any]) -> Any:
    """The sums of each minute, until the first of which a replica has left some to its next page, and marks of all."""
    ends, minutes = [view["minutes"][-1]["at"] for view in views if view["has_more"]], dict[int, list[Any]]()
    for each in itertools.chain.from_iterable(view["minutes"] for view in views):
        minutes.setdefault(each["at"], []).append(each)
    told = [merged_memory(minutes[at]) for at in sorted(minutes) if all(at <= end for end in ends)]
    marks = sorted((mark for view in views for mark in view["marks"]), key=lambda mark: mark["at"])
    return {"minutes": told, "marks": marks, "has_more": bool(ends)}


def merged_findings(views: Sequence[Any]) -> Any:
    """Each sentence once, as all see a replica that is away, and what all have room for."""
    found = {each["text"]: each for view in views for each in view["data"]}
    capacities = [view["capacity"] for view in views if view["capacity"] is not None]
    least = min(capacities, key=lambda each: each["more"], default=None)
    capacity = least and {"more": sum(each["more"] for each in capacities), "text": least["text"]}
    data = sorted(found.values(), key=lambda each: get_args(FindingKind).index(each["kind"]))
    return {"data": data, "capacity": capacity}


MERGED: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("vectors", "dictionaries", "lenses", "probes"), merged_uploads),
    "models": merged_models,
    "memory": merged_memory,
    "activity": merged_activity,
    "findings": merged_findings,
}
"""How all answers to that path, and all events of that name, become one. All other answers are pages of sessions."""
