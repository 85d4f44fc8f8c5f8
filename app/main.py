"""From settings to a loaded model to an application: its routes, and what each request passes on its way to one."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from app.anthropic.threads import Threads
from app.batches.files import FileStore
from app.batches.jobs import Places
from app.batches.runner import Batches
from app.cluster.cluster import Cluster
from app.cluster.forward import Forwarding
from app.cluster.key import ClusterKey
from app.cluster.membership import Membership
from app.cluster.moves.talk import ClusterDoors
from app.domain.errors import DjinnError, FieldOutOfRange
from app.domain.values import NEUTRAL, KVPolicy, SamplingDefaults
from app.engine_process.engine import EngineProcess
from app.engine_process.executor import Engine, EngineExecutor
from app.engine_process.frames import Load
from app.events import EventStreams, Feed
from app.experiments.activations import ActivationJobs, Reader
from app.exports.exports import Spool
from app.journal.journal import Journal
from app.journal.lease import FolderLease
from app.machine.budget import DiskRoom
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel, read_generation
from app.openai.response_events import BackgroundResponses
from app.openai.response_store import ResponseStore
from app.routers import (
    anthropic,
    breakpoints,
    completions,
    conversations,
    embeddings,
    files,
    responses,
    responses_socket,
    sessions,
    system,
    turns,
    uploads,
)
from app.routers.dependencies import Services
from app.routers.files import FILES_PATH
from app.routers.sessions import IMPORT_PATH
from app.routers.uploads import DICTIONARIES_PATH, LENSES_PATH, PROBES_PATH
from app.services import running
from app.sessions.adapters import Adapters
from app.sessions.findings import Findings
from app.sessions.history import History
from app.sessions.keeper import SessionKeeper
from app.sessions.keyed import KeyedRequests
from app.sessions.named import BoundSessions
from app.sessions.registry import SessionRegistry, take_notice
from app.sessions.table import SessionTable
from app.sessions.uploads import Uploads
from app.settings import Settings
from app.settings.groups import named_by
from app.telemetry.metrics import Metrics
from app.tenants.tenancy import Tenancy
from app.tenants.tenant import TenantMiddleware, import_limit
from app.text.tokenizer import Tokens, load_tokens
from app.tools.support import ToolSupport
from app.tools.thinking import kept_secret
from app.web.bodies import BodyLimitMiddleware, body_budget, refuse_unread
from app.web.errors import described, install_error_handlers
from app.web.idempotency import IdempotencyMiddleware
from app.web.middleware import LeaseGate, RequestMiddleware, Sites, cross_origin, log_access
from app.web.multipart import MAX_FORM_BYTES
from app.web.openapi import DescribedAPI
from app.wire.turns import SamplingFields

if TYPE_CHECKING:
    from app.telemetry.spans import SpanTraces

logger = logging.getLogger(__name__)
OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP_HTTP = "http/protobuf"


def sampling_defaults(model: ResolvedModel, generation_config: str) -> SamplingDefaults:
    """As the setting of that name says: `none` is neutral; `auto` is as the model's file says, and where that says
    nothing, as the catalogue does. Raises `BrokenModel` for a file with a value that no client may give.
    """
    if generation_config == "none":
        return NEUTRAL
    path, entries = read_generation(model) or (None, {})
    said = {name: entries[name] for name in asdict(NEUTRAL) if entries.get(name) is not None}
    try:
        fields = SamplingFields.model_validate(said)
    except ValidationError as error:
        field, words = next(described(SamplingFields, error))
        raise BrokenModel(
            f"{path}: {field}: {words}; correct it, or start with generation_config none", param="generation_config"
        ) from error
    found = fields.sampling(model.sampling)
    changed = {name: value for name, value in asdict(found).items() if value != getattr(NEUTRAL, name)}
    if changed:
        told = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        logger.info("defaults of sampling from the model: %s", told)
    return found


def open_traces(endpoint: str | None) -> SpanTraces:
    """Traces that go to the collector at the URL `endpoint`; None: where `OTEL_EXPORTER_OTLP_*` say.

    Raises `FieldOutOfRange` if the packages are not installed, or a variable asks for another protocol than HTTP.
    """
    for name in OTLP_PROTOCOLS:
        if os.environ.get(name, OTLP_HTTP) not in (OTLP_HTTP, ""):
            raise FieldOutOfRange(f"{name} must be {OTLP_HTTP}: spans go out in no other way", param=name)
    try:
        from app.telemetry import spans
    except ValueError as error:
        raise FieldOutOfRange(f"OTEL_PROPAGATORS: {error}", param="OTEL_PROPAGATORS") from error
    except ModuleNotFoundError as error:
        name = named_by(endpoint)
        raise FieldOutOfRange(
            f"{name}: traces need packages that are not installed ({error.name}): pip install 'djinn-server[otel]'",
            param=name,
        ) from error
    return spans.SpanTraces(spans.exporter_to(endpoint))


def middleware(
    settings: Settings,
    tenancy: Tenancy,
    lease: FolderLease | None,
    cluster: Cluster | None,
    keyed: KeyedRequests,
    metrics: Metrics,
) -> list[Middleware]:
    """All of it, outermost first. `lease` is that of the state folder."""

    def most_imported(scope: Scope) -> int:
        own = import_limit(scope)
        return int(settings.max_import_bytes) if own is None else min(own, int(settings.max_import_bytes))

    audit = [] if tenancy.audit is None else [tenancy.audit.record]
    records = [*([log_access] if settings.access_log else []), *audit]
    sites = Sites(settings.answered_hosts, settings.cors_origins, needs_key=settings.needs_key)
    rights = [each.require for each in (lease, None if cluster is None else cluster.membership) if each is not None]
    gate = [Middleware(LeaseGate, rights=rights)] if rights else []
    # Before the gates for clients: other servers have no key of a tenant.
    doors: list[Middleware] = []
    forwarding: list[Middleware] = []
    if cluster is not None:
        doors = [Middleware(ClusterDoors, cluster.hops, {**cluster.arrivals.ways, **cluster.prefill.ways})]
        forwarding = [Middleware(Forwarding, cluster.fleet, cluster.owners, cluster.hops, metrics.cluster_requests)]
    return [
        Middleware(RequestMiddleware, records=records),
        *gate,
        *doors,
        *cross_origin(settings.cors_origins),
        Middleware(TenantMiddleware, sites=sites, directory=tenancy.directory, quotas=tenancy.quotas),
        Middleware(
            BodyLimitMiddleware,
            max_bytes=min(int(settings.max_request_bytes), int(settings.max_bodies_bytes)),
            routes={
                ("POST", IMPORT_PATH): most_imported,
                ("POST", DICTIONARIES_PATH): lambda _: 2 * int(settings.max_upload_bytes) + MAX_FORM_BYTES,
                ("POST", LENSES_PATH): lambda _: int(settings.max_upload_bytes) + MAX_FORM_BYTES,
                ("POST", PROBES_PATH): lambda _: int(settings.max_upload_bytes) + MAX_FORM_BYTES,
                ("POST", FILES_PATH): lambda _: int(settings.max_files_bytes) + MAX_FORM_BYTES,
            },
            budget=body_budget(int(settings.max_bodies_bytes)),
        ),
        *forwarding,
        Middleware(IdempotencyMiddleware, requests=keyed),
    ]


ROUTERS = (
    sessions.router,
    turns.router,
    breakpoints.router,
    breakpoints.checkpoint_router,
    breakpoints.maps_router,
    turns.resume_router,
    uploads.vectors_router,
    uploads.dictionaries_router,
    uploads.lenses_router,
    uploads.probes_router,
    sessions.files_router,
    completions.router,
    embeddings.router,
    files.experiments_router,
    completions.operators_router,
    responses.router,
    responses.kept_router,
    conversations.router,
    files.router,
    files.batches_router,
    anthropic.router,
    system.router,
    system.capacity_router,
    system.page_router,
)


def add_routes(app: FastAPI) -> None:
    """Add all of them, in the order in which the API's document names them. `app.state.routes` are they, for
    `web.matching`: the framework hides those of a router in it.
    """
    routes, heads = [route for router in ROUTERS for route in router.routes], _heads()
    for router in (*ROUTERS, heads):
        app.include_router(router)
    app.router.routes.append(responses_socket.ROUTE)
    app.state.routes = [*routes, *heads.routes, responses_socket.ROUTE]


@cache
def _heads() -> APIRouter:
    """HEAD (RFC 9110, 9.3.2) for each route of the API that reads JSON. Files and streams would be made for nothing."""
    heads = APIRouter(include_in_schema=False)
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()) and route.response_model is not None:
            heads.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                response_model=route.response_model,
                dependencies=route.dependencies,
                route_class_override=type(route),
            )
    return heads


def load_app(
    settings: Settings, process: EngineProcess | None = None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """Find and load the model, which takes seconds, and build the application around it. Raises `DjinnError`.

    The engine runs in `process`, which is ended if that fails; None: on a thread of this one. `clock` gives Unix
    seconds. Keys of tenants and their limits go by it.
    """
    load = Load.of(settings, logging.getLogger().getEffectiveLevel())
    with ExitStack() as undo:
        if process is not None:
            undo.callback(process.close)
        tenancy = Tenancy(settings, clock)
        undo.callback(tenancy.close)
        traces = open_traces(settings.otlp_endpoint) if settings.is_traced else None
        if traces is not None:
            undo.callback(traces.close)
        key = None if settings.cluster_key_file is None else ClusterKey.read(settings.cluster_key_file.expanduser())
        model = load.find_model()
        # Before the engine: it takes the folder, where the engine keeps files too.
        journal = None if settings.state_dir is None else Journal(settings.state_dir.expanduser(), settings.lease)
        if journal is not None:
            undo.callback(journal.close)
        room = load.disk_room()
        if process is not None:
            process.begin(load)
        tokens, sampling = load_tokens(model), sampling_defaults(model, settings.generation_config)
        engine: Engine
        if process is not None:
            engine = process.loaded()
        else:
            from app.gpu.startup.loader import load_engine  # imports PyTorch

            engine = load_engine(model, load.engine, room)
            undo.callback(engine.close)
        app = create_app(settings, engine, tokens, tenancy, journal, room, traces, key, sampling)
        undo.pop_all()
    return app


def prepare(settings: Settings, process: EngineProcess) -> None:
    """Find the model in both processes: `load_app` has all imported then that it needs, and takes seconds less. What
    is there by then is never garbage, and the collector does not look through it again.
    """
    load = Load.of(settings, logging.getLogger().getEffectiveLevel())
    with suppress(DjinnError):  # `load_app` says it
        model = load.find_model()
        process.find(load)  # now that the model is on the disk
        load_tokens(model)
    gc.collect()
    gc.freeze()


def _secret(settings: Settings) -> bytes | None:
    """What seals are made with: that of the cluster, or of the state folder; None: one of this process."""
    key, folder = settings.cluster_key_file, settings.state_dir
    if key is not None:
        return key.expanduser().read_bytes().strip()
    return None if folder is None else kept_secret(folder.expanduser())


def create_app(
    settings: Settings,
    engine: Engine,
    tokens: Tokens,
    tenancy: Tenancy,
    journal: Journal | None = None,
    room: DiskRoom | None = None,
    traces: SpanTraces | None = None,
    cluster_key: ClusterKey | None = None,
    sampling: SamplingDefaults = NEUTRAL,
) -> FastAPI:
    """The application. Its lifespan runs the engine thread, the journal and the sweep of expired sessions. `room` is
    that of files beside the journal, if the engine has it already. `cluster_key` is the key of its
    cluster; None on a server without others. `sampling` is what clients leave out.

    Raises `FieldOutOfRange` if the journal's sessions are another model's, or if its cluster refuses the journal.
    """
    room = room or Load.of(settings, logging.WARNING).disk_room()
    keeper = SessionKeeper(journal, room)
    restored = keeper.load(engine.info, tenancy.api_keys)
    # Before anything of the journal is served: another server may have its sessions.
    joined = None
    if cluster_key is not None and journal is not None:
        joined = Membership.join(settings, journal, keeper.homes.seq, cluster_key), cluster_key
    info = replace(engine.info, adapters=())
    feed, metrics = Feed(), Metrics(info.name)
    history = History(settings.state_dir, feed, version=version("djinn-server"), model=info.name)
    table = SessionTable(settings.max_sessions, tenancy.quotas, history)
    executor = EngineExecutor(engine, partial(take_notice, table, keeper))
    names = settings.served_model_name or (info.name,)
    registry = SessionRegistry(
        executor,
        table,
        keeper,
        tokens,
        metrics,
        settings,
        tenancy.quotas,
        Adapters(executor, names, settings.engine().lora, settings.lora_dir),
        traces,
    )
    responses = ResponseStore(
        registry, journal, limit=settings.max_responses, max_bytes=int(settings.max_responses_bytes)
    )
    responses.restore(restored)
    temporary = ExitStack()  # of a server without a state folder
    kept = (settings.state_dir or Path(temporary.enter_context(TemporaryDirectory(prefix="djinn-")))).expanduser()
    spool, kept_files, uploaded = ((kept / name, room.beside(kept / name)) for name in ("tmp", "files", "uploads"))
    file_store = FileStore(*kept_files, int(settings.max_files_bytes))
    metrics.files_bytes.set_function(lambda: file_store.total_bytes)
    kept_uploads = Uploads(journal, executor, *uploaded, int(settings.max_upload_bytes), keeper.room)
    lease = None if journal is None else journal.lease
    places, max_line_bytes = Places(table.foreground_runs), int(settings.max_request_bytes)
    reader = Reader(registry, tokens, places)
    bound_sessions = BoundSessions(registry, restored)
    tool_support = ToolSupport(tokens, settings.chat_format, _secret(settings), keeps_states=info.state_bytes > 0)
    tool_support.check_format()
    cluster = None
    if joined is not None:
        cluster = Cluster(
            registry, tenancy.directory, *joined, bound_sessions, responses, lambda: file_store.owners, settings
        )
    findings = Findings(
        table,
        settings,
        room,
        was_killed=history.ended_badly,
        require_ready=lambda: services.require_ready(),
        away=lambda: () if cluster is None else cluster.away,
        refused=tenancy.quotas.refused,
        totals=metrics.totals,
        read_memory=registry.try_memory,
    )
    services = Services(
        settings=settings,
        info=info,
        sampling=sampling,
        tokens=tokens,
        metrics=metrics,
        sessions=registry,
        tool_support=tool_support,
        bound_sessions=bound_sessions,
        responses=responses,
        background=BackgroundResponses(),
        threads=Threads(),
        spool=Spool(*spool, int(settings.max_spool_bytes)),
        side_work=registry.side_work,
        uploads=kept_uploads,
        tenancy=tenancy,
        cluster=cluster,
        lease=lease,
        files=file_store,
        places=places,
        activation_reader=reader,
        activation_jobs=ActivationJobs(file_store, reader, tenancy, lease, kept_uploads, max_line_bytes=max_line_bytes),
        batches=Batches(file_store, registry, tenancy, lease, places, max_line_bytes=max_line_bytes),
        history=history,
        findings=findings,
        events=EventStreams(feed, registry, KVPolicy(settings.kv_policy), findings, metrics.event_streams),
        started_at=int(time.time()),
    )
    around_routes = middleware(settings, tenancy, lease, cluster, keeper.keyed, metrics)
    return _served(services, partial(running, services, restored, journal, room, traces, temporary), around_routes)


def _served(services: Services, lifespan: Lifespan[Any], around_routes: Sequence[Middleware]) -> FastAPI:
    """The routes, and what lies around them."""
    app = DescribedAPI(
        title="Djinn",
        version=version("djinn-server"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # the framework's pages load a CDN; `routers/system.py` has one
        redoc_url=None,
        dependencies=[Depends(refuse_unread)],
        middleware=around_routes,
        # The framework's own would have paths, errors and refused bodies: what requests said.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.services = services
    install_error_handlers(app)
    add_routes(app)
    app.state.inside = _inside(app)
    return app


def _inside(app: FastAPI) -> ASGIApp:
    """The application without what requests pass on their way to it: for those that it makes of itself."""
    outside, app.user_middleware = app.user_middleware, []
    try:
        stack = app.build_middleware_stack()
    finally:
        app.user_middleware = outside

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app
        await stack(scope, receive, send)

    return inside
