"""The front door as a server: its parts put together, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cluster.directory import Directory
from app.cluster.fleet import OWN_NAME, Fleet
from app.cluster.front.door import FrontDoor
from app.cluster.front.look import Lookout
from app.cluster.front.merged.answers import Merged
from app.cluster.front.protocol import FrontProtocol
from app.cluster.front.routing.metrics import RoutingMetrics
from app.cluster.front.routing.owners import Owners
from app.cluster.front.routing.seeking import Seeker
from app.cluster.front.upstream.pool import Pool
from app.domain.errors import Unauthenticated
from app.settings import Settings
from app.telemetry.metrics import ConnectionMetrics
from app.tenants.gate import authenticate
from app.tenants.tenancy import Tenancy
from app.web.bodies import BodyLimitMiddleware, body_budget
from app.web.connections import Caps, Connection
from app.web.errors import error_response
from app.web.middleware import HostMiddleware, RequestMiddleware, cross_origin
from app.web.multipart import MAX_FORM_BYTES
from app.web.openapi import is_open
from app.web.server import ANSWERS_S, Hangups, ListeningServer

logger = logging.getLogger(__name__)

IMPORT, UPLOAD = ("POST", "/v1/sessions/import"), ("POST", "/v1/files")


class Front:
    """The front door's parts: an ASGI application, and what runs beside it."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        directory: Directory,
        sign: Callable[[str], Mapping[str, str]] = lambda name: {},
    ) -> None:
        """`settings` are those of the replicas: who may call, and what a request may be. `sign` gives the headers that
        prove to the replica of that name who looks at it.
        """
        self.settings = settings
        self.fleet = fleet
        self.registry = CollectorRegistry()
        self.metrics = ConnectionMetrics(self.registry)
        self.tenancy = Tenancy(settings.model_copy(update={"audit_log": None}), time.time)
        self.pool = Pool()
        host = settings.known_host or OWN_NAME  # replicas answer to what clients call the front door by, or to any
        own_key = {"authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
        self.lookout = Lookout(fleet, self.pool, host, lambda name: {**own_key, **sign(name)})
        door = FrontDoor(
            fleet,
            Owners(fleet, directory, Seeker(fleet, self.pool, host), self.tenancy.old_names),
            self.pool,
            Merged(fleet, self.pool, self.registry, host),
            RoutingMetrics(self.registry),
            self._tenant_of,
            int(settings.max_request_bytes),
        )
        self.app = _guarded(door, settings, self._tenant_of, self.living)

    def _tenant_of(self, headers: Headers) -> str | None:
        """The name of whose key it is, empty without keys. None: the key is unknown, and a replica will say so."""
        if not self.tenancy.directory:
            return ""
        tenant = authenticate(self.tenancy.directory, headers)
        return None if tenant is None else tenant.name

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """What runs while the front door serves: it has looked at every replica before the first request."""
        await self.lookout.look()
        looking = asyncio.create_task(self.lookout.run())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])
            self.pool.close()
            self.tenancy.close()


class KeyGate:
    """Checks the API key before the door asks a replica for anything. It refuses requests without a valid key, except
    on open paths. `state.has_key` tells the layers behind it whether the caller has shown a key.

    It answers CORS preflights of `origins` itself: browsers send no key with them.
    """

    def __init__(self, app: ASGIApp, tenant_of: Callable[[Headers], str | None], origins: Sequence[str]) -> None:
        """`tenant_of` returns the tenant whose key the request has; None without a valid key."""
        self.app = app
        self._tenant_of = tenant_of
        self._has_origins = bool(origins)
        self._refuse: ASGIApp = _refuse
        for each in cross_origin(origins):
            self._refuse = each.cls(self._refuse, *each.args, **each.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or one WebSocket."""
        headers = Headers(scope=scope)
        scope["state"]["has_key"] = has_key = self._tenant_of(headers) is not None
        if self._is_preflight(scope, headers) or not (has_key or is_open(scope["path"])):
            await self._refuse(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        asks = scope["type"] == "http" and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        return self._has_origins and asks and "origin" in headers


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = Unauthenticated("a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY")
    await error_response(error, scope)(scope, receive, send)


def _guarded(
    door: ASGIApp, settings: Settings, tenant_of: Callable[[Headers], str | None], living: Callable[[], Any]
) -> ASGIApp:
    """The door behind what each request passes, as replicas have it, and with a life of its own."""
    most, most_kept = int(settings.max_import_bytes), int(settings.max_files_bytes) + MAX_FORM_BYTES
    app: ASGIApp = BodyLimitMiddleware(
        door,
        max_bytes=min(int(settings.max_request_bytes), int(settings.max_bodies_bytes)),
        routes={IMPORT: lambda scope: most, UPLOAD: lambda scope: most_kept},
        budget=body_budget(int(settings.max_bodies_bytes)),
    )
    app = KeyGate(app, tenant_of, settings.cors_origins)
    app = HostMiddleware(
        app, hosts=settings.answered_hosts, origins=settings.cors_origins, needs_key=settings.needs_key
    )
    app = RequestMiddleware(app)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        async with living():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    return serve


class FrontServer(ListeningServer):
    """Serves a front door; prints one line to stdout when it takes requests."""

    def __init__(
        self,
        front: Front,
        caps: Caps,
        says: Callable[[str], None] | None = None,
        *,
        hangups: Hangups | None = None,
    ) -> None:
        """`says` gets the line in place of stdout. `hangups` are heard from the start on."""
        super().__init__(front.app, front.settings, front.metrics, caps)
        # Answers that pass are turns of replicas, which have as long.
        self.config.timeout_graceful_shutdown = int(front.settings.drain_timeout_s) + ANSWERS_S
        self.front = front
        self._says = says or partial(print, flush=True)
        self._hangups = hangups

    def has_started(self, url: str) -> None:
        """Say so, and handle SIGHUP: it reloads files, and never ends a front door."""
        if self._hangups is not None:
            self._hangups.hand_to(partial(self._reload_on, asyncio.get_running_loop()))
        names = ", ".join(each.name for each in self.front.fleet)
        self._says(f"Djinn's front door is {url}, before replicas {names}")

    def reload(self) -> None:
        """Read the file of tenants again, if there is one."""
        if not self.front.tenancy.has_files:
            logger.info("SIGHUP: the front door has no file to reload, and keeps running")
        self.front.tenancy.reload()

    def _reload_on(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self.reload)

    def speak(self, connection: Connection) -> FrontProtocol:
        """The protocol of a new connection."""
        return FrontProtocol(
            connection,
            self.table,
            self._upgrade,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    def _upgrade(self, client: FrontProtocol, scope: dict[str, Any]) -> None:
        """Serve a connection that asks for a WebSocket."""

        async def serve() -> None:
            await self.config.loaded_app(scope, _nothing, _denying(client.transport))

        task = asyncio.create_task(serve())
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)


async def _nothing() -> Message:
    """A WebSocket passes as bytes: the application gets no messages of it."""
    return {"type": "websocket.connect"}


def _denying(transport: asyncio.Transport) -> Send:
    """Writes the answer that a client gets in place of a WebSocket."""

    async def send(message: Message) -> None:
        if message["type"] == "websocket.http.response.start":
            status = HTTPStatus(message["status"])
            lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in message.get("headers", [])]
            transport.write(b"\r\n".join(lines) + b"\r\n\r\n")
        elif message["type"] == "websocket.http.response.body":
            transport.write(message.get("body", b""))
            if not message.get("more_body", False):
                transport.close()

    return send
