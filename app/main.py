"""Wiring: from settings to a loaded model to an application."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware
from starlette.types import Scope

from app.bridge.executor import Engine, EngineExecutor, GrammarCompiler
from app.domain.values import KVPolicy
from app.engine_process.engine import EngineProcess
from app.engine_process.frames import Load
from app.engine_process.loading import disk_room, find_model, load_frame
from app.events.feed import Feed
from app.events.streams import EventStreams
from app.exports.spool import Spool
from app.journal.journal import Journal
from app.machine.disk import DiskRoom
from app.metrics.turns import Metrics
from app.model_store.resolve import ResolvedModel
from app.openai.responses.store import ResponseStore
from app.routers import (
    activation_maps,
    breakpoints,
    checkpoint,
    events,
    export,
    generate,
    page,
    phase,
    resume,
    sessions,
    system,
    vectors,
)
from app.routers.anthropic import messages as anthropic_messages
from app.routers.dependencies import Services
from app.routers.openai import chat, completions, models, responses, responses_kept, responses_socket, tokenize
from app.sessions.bound.sessions import BoundSessions
from app.sessions.bound.tool_waits import ToolWaits
from app.sessions.guards.disk import guard_disk
from app.sessions.guards.host import guard_host
from app.sessions.keeper import SessionKeeper
from app.sessions.lifecycle import Notices, restore, sweep, take_up
from app.sessions.registry import SessionRegistry
from app.sessions.table import SessionTable
from app.sessions.vectors import Vectors
from app.settings import Settings
from app.tenants.audit import AuditMiddleware
from app.tenants.gate import TenantMiddleware, import_limit
from app.tenants.tenancy import Tenancy
from app.text.tokenizer import Tokens, load_tokens
from app.tools.support import ToolSupport
from app.traces.base import Traces
from app.traces.opening import open_traces
from app.web.access_log import AccessLogMiddleware
from app.web.body_limit import BodyLimitMiddleware
from app.web.cors import cross_origin
from app.web.error_handlers import install_error_handlers
from app.web.hosts import HostMiddleware
from app.web.openapi.document import DescribedAPI
from app.web.request_id import RequestIdMiddleware
from app.web.strict_requests import refuse_unread
from app.web.trace_response import TraceResponseMiddleware

QUIET_S = 1.0
"""Between the start, or the last look at turns that run, and the preparation of grammars."""

ROUTERS = (
    sessions,
    generate,
    breakpoints,
    checkpoint,
    activation_maps,
    resume,
    vectors,
    phase,
    export,
    chat,
    completions,
    responses,
    responses_kept,
    models,
    tokenize,
    anthropic_messages,
    events,
    system,
    page,
)


def load_app(
    settings: Settings, process: EngineProcess | None = None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """Find and load the model, which takes seconds, and build the application around it. Raises `DjinnError`.

    The engine runs in `process`, which is ended if that fails; None: on a thread of this one. `clock` gives Unix
    seconds. Keys of tenants and their limits go by it.
    """
    load = load_frame(settings, logging.getLogger().getEffectiveLevel())
    with ExitStack() as undo:
        if process is not None:
            undo.callback(process.close)
        tenancy = Tenancy(settings, clock)
        undo.callback(tenancy.close)
        traces = open_traces(settings.otlp_endpoint) if settings.is_traced else None
        if traces is not None:
            undo.callback(traces.close)
        model = find_model(load)
        # Before the engine: it locks the folder, where the engine keeps files too.
        journal = None if settings.state_dir is None else Journal(settings.state_dir.expanduser())
        if journal is not None:
            undo.callback(journal.close)
        room = disk_room(load)
        if process is not None:
            process.begin(load)
        tokens = load_tokens(model)
        engine = process.loaded() if process is not None else _load_here(model, load, room, undo)
        app = create_app(settings, engine, tokens, tenancy, journal, room, traces)
        undo.pop_all()
    return app


def _load_here(model: ResolvedModel, load: Load, room: DiskRoom, undo: ExitStack) -> Engine:
    """An engine for a thread of this process."""
    from app.gpu.startup.loader import load_engine  # imports PyTorch

    engine = load_engine(model, load.engine, room)
    undo.callback(engine.close)
    return engine


def _has_kv_files(settings: Settings, room: DiskRoom) -> bool:
    """Whether KV files share the room's disk."""
    kv_dir = settings.engine().kv_dir
    return kv_dir is not None and room.beside(kv_dir) is room


def _spool(settings: Settings, room: DiskRoom) -> Spool:
    """Where session files are on their way in and out: beside the journal, if there is one."""
    folder = settings.state_dir and settings.state_dir.expanduser() / "tmp"
    return Spool(folder, room.beside(folder) if folder else room, int(settings.max_spool_bytes))


def create_app(
    settings: Settings,
    engine: Engine,
    tokens: Tokens,
    tenancy: Tenancy,
    journal: Journal | None = None,
    room: DiskRoom | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """The application. Its lifespan runs the engine thread, the journal and the sweep of expired sessions. `room` is
    that of files beside the journal, if the engine has it already.

    Raises `FieldOutOfRange` if the journal's sessions are another model's.
    """
    keeper = SessionKeeper(journal)
    restored = keeper.load(engine.info)
    feed = Feed()
    table = SessionTable(settings.max_sessions, tenancy.quotas, feed)
    executor = EngineExecutor(engine, Notices(table, keeper).take)
    metrics = Metrics(engine.info.name)
    tool_waits = ToolWaits()
    registry = SessionRegistry(
        executor,
        table,
        keeper,
        tokens,
        metrics,
        settings,
        tenancy.quotas,
        on_queued=tool_waits.end,
        traces=traces,
    )
    kept_responses = ResponseStore(registry, journal, limit=settings.max_responses)
    kept_responses.restore(restored)
    room = room or disk_room(load_frame(settings, logging.WARNING))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as ends:
            ends.callback(tenancy.close)
            if traces is not None:
                ends.push_async_callback(asyncio.to_thread, traces.close)
            if journal is not None:
                journal.start()
                ends.push_async_callback(asyncio.to_thread, journal.close)
            executor.on_back(partial(take_up, registry))
            executor.start()
            ends.push_async_callback(executor.stop)
            await restore(registry, restored)
            ends.push_async_callback(_end, asyncio.create_task(sweep(registry)))
            ends.push_async_callback(_end, asyncio.create_task(guard_host(executor, table, tenancy.quotas)))
            if journal is not None and _has_kv_files(settings, room):
                ends.push_async_callback(_end, asyncio.create_task(guard_disk(executor, journal, room)))
            ends.push_async_callback(_end, asyncio.create_task(_prepare_grammars(engine.grammars, table)))
            yield

    app = DescribedAPI(
        title="Djinn",
        version=version("djinn"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # the framework's pages load a CDN; `routers/page.py` has one
        redoc_url=None,
        dependencies=[Depends(refuse_unread)],
        middleware=_middleware(settings, tenancy, is_traced=traces is not None),
        # The framework's own would have paths, errors and refused bodies: what requests said.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.services = Services(
        settings=settings,
        info=engine.info,
        tokens=tokens,
        metrics=metrics,
        sessions=registry,
        tool_support=ToolSupport(tokens),
        bound_sessions=BoundSessions(registry, restored),
        tool_waits=tool_waits,
        responses=kept_responses,
        spool=_spool(settings, room),
        side_work=registry.side_work,
        vectors=Vectors(journal),
        tenancy=tenancy,
        events=EventStreams(feed, registry, KVPolicy(settings.kv_policy), metrics.event_streams),
        started_at=int(time.time()),
    )
    install_error_handlers(app)
    for module in ROUTERS:
        app.include_router(module.router)
    app.router.routes.append(responses_socket.ROUTE)
    return app


def _middleware(settings: Settings, tenancy: Tenancy, *, is_traced: bool) -> list[Middleware]:
    """Outermost first."""

    def most_imported(scope: Scope) -> int:
        own = import_limit(scope)
        return int(settings.max_import_bytes) if own is None else min(own, int(settings.max_import_bytes))

    audit = [] if tenancy.audit is None else [Middleware(AuditMiddleware, log=tenancy.audit, clock=tenancy.clock)]
    access = [Middleware(AccessLogMiddleware)] if settings.access_log else []
    spans = [Middleware(TraceResponseMiddleware)] if is_traced else []
    return [
        Middleware(RequestIdMiddleware),
        *spans,
        *access,
        *audit,
        *cross_origin(settings.cors_origins),
        Middleware(HostMiddleware, hosts=settings.answered_hosts, origins=settings.cors_origins),
        Middleware(TenantMiddleware, directory=tenancy.directory, quotas=tenancy.quotas),
        Middleware(
            BodyLimitMiddleware,
            max_bytes=int(settings.max_request_bytes),
            routes={("POST", export.IMPORT_PATH): most_imported},
        ),
    ]


async def _prepare_grammars(grammars: GrammarCompiler, table: SessionTable) -> None:
    """Have the vocabulary read while nobody waits for anything else."""
    while True:
        await asyncio.sleep(QUIET_S)
        if not table.busy:
            break
    grammars.prepare()


async def _end(task: asyncio.Task[None]) -> None:
    """End an endless task. Raises nothing, however it ended before: what is ended after it must be."""
    task.cancel()
    await asyncio.wait([task])
