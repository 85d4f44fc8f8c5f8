"""Wiring: from settings to a loaded model to an application."""

import gc
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.metadata import version

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware

from app.bridge.executor import Engine
from app.cluster.moves.cluster import Membership
from app.cluster.prefill.prefill import Prefill
from app.domain.errors import DjinnError
from app.domain.values import NEUTRAL, SamplingDefaults
from app.engine_process.engine import EngineProcess
from app.engine_process.frames import Load
from app.engine_process.loading import disk_room, find_model, load_frame
from app.journal.journal import Journal
from app.machine.disk import DiskRoom
from app.model_store.resolve import ResolvedModel
from app.sessions.keeper import SessionKeeper
from app.settings import Settings
from app.tenants.tenancy import Tenancy
from app.text.tokenizer import Tokens, load_tokens
from app.traces.base import Traces
from app.traces.opening import open_traces
from app.web.errors.handlers import install_error_handlers
from app.web.openapi.document import DescribedAPI
from app.web.strict_requests import refuse_unread
from app.wiring.lifespan import Lifespan
from app.wiring.middleware import middleware
from app.wiring.routes import add_routes
from app.wiring.sampling import sampling_defaults
from app.wiring.services import open_services


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
        member = Membership.read(settings)
        model = find_model(load)
        # Before the engine: it takes the folder, where the engine keeps files too.
        journal = None if settings.state_dir is None else Journal(settings.state_dir.expanduser(), settings.lease)
        if journal is not None:
            undo.callback(journal.close)
        room = disk_room(load)
        if process is not None:
            process.begin(load)
        tokens, sampling = load_tokens(model), sampling_defaults(model, settings.generation_config)
        engine = process.loaded() if process is not None else _load_here(model, load, room, undo)
        app = create_app(settings, engine, tokens, tenancy, journal, room, traces, member, sampling)
        undo.pop_all()
    return app


def prepare(settings: Settings, process: EngineProcess) -> None:
    """Find the model in both processes: `load_app` has all imported then that it needs, and takes seconds less. What
    is there by then is never garbage, and the collector does not look through it again.
    """
    load = load_frame(settings, logging.getLogger().getEffectiveLevel())
    with suppress(DjinnError):  # `load_app` says it
        model = find_model(load)
        process.find(load)  # now that the model is on the disk
        load_tokens(model)
    gc.collect()
    gc.freeze()


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
    tenancy: Tenancy,
    journal: Journal | None = None,
    room: DiskRoom | None = None,
    traces: Traces | None = None,
    member: Membership | None = None,
    sampling: SamplingDefaults = NEUTRAL,
) -> FastAPI:
    """The application. Its lifespan runs the engine thread, the journal and the sweep of expired sessions. `room` is
    that of files beside the journal, if the engine has it already. `member` is None on a server without others.
    `sampling` is what clients leave out.

    Raises `FieldOutOfRange` if the journal's sessions are another model's.
    """
    room = room or disk_room(load_frame(settings, logging.WARNING))
    keeper = SessionKeeper(journal, room)
    restored = keeper.load(engine.info, tenancy.api_keys)
    services = open_services(
        settings,
        engine,
        tokens,
        tenancy,
        keeper,
        restored,
        journal=journal,
        room=room,
        traces=traces,
        member=member,
        sampling=sampling,
    )
    prefill = None if member is None else Prefill(services.sessions, member, settings)
    lifespan = Lifespan(
        services=services, restored=restored, journal=journal, room=room, traces=traces, prefill=prefill
    )
    ways = {} if prefill is None else prefill.ways
    lease, cluster, keyed = services.lease, services.cluster, keeper.keyed
    layers = middleware(settings, tenancy, lease, cluster, ways, keyed, is_traced=traces is not None)
    app = _described(lifespan, layers)
    app.state.services = services
    install_error_handlers(app)
    add_routes(app)
    return app


def _described(lifespan: Lifespan, layers: list[Middleware]) -> DescribedAPI:
    """An application without routes."""
    return DescribedAPI(
        title="Djinn",
        version=version("djinn-server"),
        lifespan=lifespan.run,
        redirect_slashes=False,
        docs_url=None,  # the framework's pages load a CDN; `routers/page.py` has one
        redoc_url=None,
        dependencies=[Depends(refuse_unread)],
        middleware=layers,
        # The framework's own would have paths, errors and refused bodies: what requests said.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
