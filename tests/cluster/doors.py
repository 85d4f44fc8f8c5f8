"""A replica that has nothing itself, as a door before others that do as a test says."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from app.cluster.claims import Member
from app.cluster.fleet import Fleet
from app.cluster.forward import Forwarding
from app.cluster.hop import Hops
from app.cluster.key import ClusterKey
from app.cluster.owners import Owners
from app.domain.errors import DirectoryAway, PeerStranger
from app.web.middleware import RequestMiddleware
from tests.cluster.pair import KEY
from tests.errors import error_response
from tests.serving import PromptServer
from tests.waiting import until

HERE = "d"


@dataclass
class Known:
    """A membership that only a test changes."""

    members: dict[str, Member]
    places: dict[str, str] = field(default_factory=dict)
    is_away: bool = False
    known: set[str] = field(default_factory=set)
    renewed: set[str] = field(default_factory=set)

    async def find(self, key: str) -> str | None:
        if self.is_away:
            raise DirectoryAway("the store does not answer")
        return self.places.get(key)

    async def swap(self, key: str, old: str | None, new: str) -> str:
        if await self.find(key) == old:
            self.places[key] = new
        return self.places[key]

    async def put(self, key: str, replica: str) -> None:
        await self.find(key)
        self.places[key] = replica

    async def changed(self) -> None:
        before = dict(self.members)
        await until(lambda: self.members != before)


class Nothing:
    def has(self, *_: object) -> bool:
        return False


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(404, "not_found")(scope, receive, send)


@dataclass
class Door:
    url: str
    fleet: Fleet
    known: Known
    _registry: CollectorRegistry

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def ways(self, *, turn: str) -> dict[str, float]:
        """How requests came to their owners, as the door has counted them."""
        every = [sample for family in self._registry.collect() for sample in family.samples]
        counted = [one for one in every if one.name == "requests_total" and one.labels["turn"] == turn]
        return {one.labels["way"]: one.value for one in counted if one.value}


def member(name: str, url: str, *, role: str = "both") -> Member:
    return Member(name=name, url=url, journal=f"journal of {name}", role=role, ready=True)


@contextmanager
def serving_door(urls: Mapping[str, str], known: Known | None = None, inside: ASGIApp = nothing) -> Iterator[Door]:
    """A door before these replicas. It takes no sessions itself, and what is asked of it itself is for `inside`."""
    known = Known({}) if known is None else known
    known.members = {HERE: member(HERE, "http://127.0.0.1:1", role="prefill")}
    known.members |= {name: member(name, url) for name, url in urls.items()}
    known.known = known.known or set(known.members)
    fleet, registry = Fleet(HERE, lambda: known.members), CollectorRegistry()
    hops = Hops(fleet, ClusterKey(KEY.encode()), known.changed)
    none: Any = Nothing()
    owners = Owners(known, hops, none, none, none)  # type: ignore[arg-type]
    requests = Counter("requests", "requests", ["turn", "way"], registry=registry)
    forwarding = Forwarding(inside, fleet, owners, hops, requests)

    async def behind_gates(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["owner"] = None
        try:
            hops.note(scope)
        except PeerStranger:
            await error_response(502, "peer_stranger")(scope, receive, send)
            return
        await forwarding(scope, receive, send)

    app = RequestMiddleware(behind_gates)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        async with hops.watching():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    with _served(serve, lifespan="on") as url:
        yield Door(url, fleet, known, registry)


@contextmanager
def serving_stub(app: ASGIApp, port: int = 0) -> Iterator[str]:
    """A replica that is only `app`, on that port or any; yields its URL."""
    with _served(app, port, lifespan="off", proxy_headers=False) as url:
        yield url


@contextmanager
def _served(app: ASGIApp, port: int = 0, **options: Any) -> Iterator[str]:
    config = uvicorn.Config(app, port=port, log_level="error", access_log=False, **options)
    with PromptServer(config).in_thread() as url:
        yield url
