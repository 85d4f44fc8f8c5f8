"""Answers about the whole cluster: each is made of those of all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.cluster.fleet import OWN_NAME, Fleet, State
from app.cluster.front.heads import bodiless, end_to_end, target_bytes
from app.cluster.front.merged.events import MergedEvents
from app.cluster.front.merged.merging import merged_memory, merged_metrics, merged_models, merged_page
from app.cluster.front.upstream.fetch import Fetched, fetch, fetch_all
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import ReplicaAway

PATIENCE_S = 8.0
"""How long a replica may take for its part; its own wait for the engine is shorter."""
OF_EACH = frozenset({b"content-length", b"content-type", b"date", b"server"})
"""Headers of a replica's answer that say nothing of the whole one."""
DEFAULT_LIMIT = 20
"""Sessions of a page, as the replicas have it."""


class Merged:
    """Used on the event loop only."""

    def __init__(self, fleet: Fleet, pool: Pool, registry: CollectorRegistry, host: str) -> None:
        """`registry` has the front door's own metrics. Replicas answer to `host`, for clients that name none."""
        self._fleet = fleet
        self._host = host
        self._pool = pool
        self._registry = registry
        self._events = MergedEvents(fleet, pool)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises `ReplicaAway` where a part would be missing without a sign of it."""
        match scope["path"]:
            case "/v1/events":
                await self._events.serve(scope, bodiless(scope, self._host), receive, send)
                return
            case "/health":
                answer = Response(b'{"status":"ok"}', media_type="application/json")
            case "/ready":
                answer = self._ready(has_key=scope["state"]["has_key"])
            case "/metrics":
                answer = await self._metrics(scope)
            case "/v1/models":
                answer = await self._made(scope, merged_models)
            case "/v1/memory":
                answer = await self._made(scope, merged_memory)
            case _:
                limit = _limit(scope["query_string"])
                answer = await self._made(scope, lambda pages: merged_page(pages, limit))
        await answer(scope, receive, send)

    def _ready(self, *, has_key: bool) -> Response:
        """Whether new work is taken anywhere. Callers with a key also see the state of each replica."""
        states = {each.name: each.state.value for each in self._fleet}
        if not any(each.state is State.READY for each in self._fleet):
            told = ", ".join(f"{name} {state}" for name, state in states.items()) or "there is none"
            raise ReplicaAway(f"no replica takes new work: {told}" if has_key else "no replica takes new work")
        if not has_key:
            return Response(b'{"status":"ready"}', media_type="application/json")
        return Response(orjson.dumps({"status": "ready", "replicas": states}), media_type="application/json")

    async def _made(self, scope: Scope, make: Callable[[list[Any]], Any]) -> Response:
        replicas = [self._fleet.reachable(each.name) for each in self._fleet] or [self._fleet.any()]
        fetched = await fetch_all(self._pool, replicas, target_bytes(scope), bodiless(scope, self._host), PATIENCE_S)
        refused = next((each for each in fetched if each.status != 200), None)
        if refused is not None:
            return _same(refused)
        content = orjson.dumps(make([orjson.loads(each.content) for each in fetched]))
        return _with_headers(fetched[0], Response(content, media_type="application/json"))

    async def _metrics(self, scope: Scope) -> Response:
        """Those of replicas that answer, and whether each does."""
        texts = {OWN_NAME: generate_latest(self._registry).decode()}
        first: Fetched | None = None
        up = ["# HELP djinn_replica_up Whether the replica answers", "# TYPE djinn_replica_up gauge"]
        asked = [fetch(self._pool, each, b"/metrics", bodiless(scope, self._host), PATIENCE_S) for each in self._fleet]
        for replica, found in zip(self._fleet, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(found, Fetched) and found.status in (401, 403, 429):
                return _same(found)
            if isinstance(found, BaseException) and not isinstance(found, ReplicaAway):
                raise found
            is_up = isinstance(found, Fetched) and found.status == 200
            text = f"{found.content.decode()}\n" if isinstance(found, Fetched) and is_up else ""
            texts[replica.name] = "\n".join([text, *up, f"djinn_replica_up {int(is_up)}", ""])
            first = first or (found if isinstance(found, Fetched) else None)
        content = await asyncio.to_thread(merged_metrics, texts)
        answer = Response(content, media_type=CONTENT_TYPE_LATEST)
        return answer if first is None else _with_headers(first, answer)


def _same(fetched: Fetched) -> Response:
    kind = next((value.decode() for name, value in fetched.headers if name == b"content-type"), None)
    return _with_headers(fetched, Response(fetched.content, fetched.status, media_type=kind))


def _with_headers(fetched: Fetched, answer: Response) -> Response:
    """The answer with the headers that a replica's own has: limits of the tenant, sites that may read it."""
    answer.raw_headers += [each for each in end_to_end(fetched.headers) if each[0] not in OF_EACH]
    return answer


def _limit(query: bytes) -> int:
    """How many sessions a page has. A number that replicas refuse is theirs to refuse."""
    (text,) = parse_qs(query.decode("latin-1")).get("limit", [""])[-1:]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else DEFAULT_LIMIT
