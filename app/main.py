"""Wiring: from settings to a loaded model to an application."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware

from app.bridge.executor import Engine, EngineExecutor, GrammarCompiler
from app.engine_process.engine import EngineProcess
from app.engine_process.frames import Load
from app.engine_process.loading import disk_room, find_model, load_frame
from app.exports.spool import Spool
from app.journal.journal import Journal
from app.machine.disk import DiskRoom
from app.metrics.turns import Metrics
from app.model_store.resolve import ResolvedModel
from app.openai.responses.store import ResponseStore
from app.routers import breakpoints, checkpoint, export, generate, phase, resume, sessions, system, vectors
from app.routers.anthropic import messages as anthropic_messages
from app.routers.dependencies import Services
from app.routers.openai import chat, completions, models, responses, responses_kept, responses_socket, tokenize
from app.sessions.bound.sessions import BoundSessions
from app.sessions.bound.tool_waits import ToolWaits
from app.sessions.disk_guard import guard_disk
from app.sessions.keeper import SessionKeeper
from app.sessions.lifecycle import Notices, restore, sweep, take_up
from app.sessions.registry import SessionRegistry
from app.sessions.table import SessionTable
from app.sessions.vectors import Vectors
from app.settings import Settings
from app.text.tokenizer import Tokens, load_tokens
from app.tools.support import ToolSupport
from app.web.auth import ApiKeyMiddleware
from app.web.body_limit import BodyLimitMiddleware
from app.web.error_handlers import install_error_handlers
from app.web.hosts import HostMiddleware
from app.web.openapi.document import DescribedAPI
from app.web.request_id import RequestIdMiddleware
from app.web.strict_requests import refuse_unread

QUIET_S = 1.0
"""Between the start, or the last look at turns that run, and the preparation of grammars."""

ROUTERS = (
    sessions,
    generate,
    breakpoints,
    checkpoint,
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
    system,
)


def load_app(settings: Settings, process: EngineProcess | None = None) -> FastAPI:
    """Find and load the model, which takes seconds, and build the application around it. Raises `DjinnError`.

    The engine runs in `process`, which is ended if that fails; None: on a thread of this one.
    """
    load = load_frame(settings, logging.getLogger().getEffectiveLevel())
    with ExitStack() as undo:
        if process is not None:
            undo.callback(process.close)
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
        app = create_app(settings, engine, tokens, journal, room)
        undo.pop_all()
    return app


def _load_here(model: ResolvedModel, load: Load, room: DiskRoom, undo: ExitStack) -> Engine:
    """An engine for a thread of this process."""
    from app.gpu.startup.loader import load_engine  # imports PyTorch

    engine = load_engine(model, load.engine, room)
    undo.callback(engine.close)
    return engine


def create_app(
    settings: Settings,
    engine: Engine,
    tokens: Tokens,
    journal: Journal | None = None,
    room: DiskRoom | None = None,
) -> FastAPI:
    """The application. Its lifespan runs the engine thread, the journal and the sweep of expired sessions. `room` is
    that of files beside the journal, if the engine has it already.

    Raises `FieldOutOfRange` if the journal's sessions are another model's.
    """
    keeper = SessionKeeper(journal)
    restored = keeper.load(engine.info)
    table = SessionTable(settings.max_sessions)
    executor = EngineExecutor(engine, Notices(table, keeper).take)
    metrics = Metrics(engine.info.name)
    tool_waits = ToolWaits()
    registry = SessionRegistry(executor, table, keeper, tokens, metrics, settings, on_queued=tool_waits.end)
    kept_responses = ResponseStore(registry, journal, limit=settings.max_responses)
    kept_responses.restore(restored)
    room = room or disk_room(load_frame(settings, logging.WARNING))
    spool_folder = settings.state_dir and settings.state_dir.expanduser() / "tmp"
    spool_room = room.beside(spool_folder) if spool_folder else room
    spool = Spool(spool_folder, spool_room, int(settings.max_spool_bytes))
    kv_dir = settings.engine().kv_dir
    kv_gives_way = kv_dir is not None and room.beside(kv_dir) is room

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as ends:
            if journal is not None:
                journal.start()
                ends.push_async_callback(asyncio.to_thread, journal.close)
            executor.on_back(partial(take_up, registry))
            executor.start()
            ends.push_async_callback(executor.stop)
            await restore(registry, restored)
            ends.push_async_callback(_end, asyncio.create_task(sweep(registry)))
            if journal is not None and kv_gives_way:
                ends.push_async_callback(_end, asyncio.create_task(guard_disk(executor, journal, room)))
            ends.push_async_callback(_end, asyncio.create_task(_prepare_grammars(engine.grammars, table)))
            yield

    app = DescribedAPI(
        title="Djinn",
        version=version("djinn"),
        lifespan=lifespan,
        redirect_slashes=False,
        dependencies=[Depends(refuse_unread)],
        middleware=_middleware(settings),
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
        spool=spool,
        vectors=Vectors(journal),
        started_at=int(time.time()),
    )
    install_error_handlers(app)
    for module in ROUTERS:
        app.include_router(module.router)
    app.router.routes.append(responses_socket.ROUTE)
    return app


def _middleware(settings: Settings) -> list[Middleware]:
    """Outermost first."""
    return [
        Middleware(RequestIdMiddleware),
        Middleware(HostMiddleware, hosts=settings.answered_hosts),
        Middleware(ApiKeyMiddleware, keys=settings.api_keys),
        Middleware(
            BodyLimitMiddleware,
            max_bytes=int(settings.max_request_bytes),
            routes={("POST", export.IMPORT_PATH): int(settings.max_import_bytes)},
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
