"""Wiring: from settings to a loaded model to an application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware import Middleware

from app.auth import ApiKeyMiddleware
from app.error_handlers import install_error_handlers
from app.executor import Engine, EngineExecutor
from app.gpu.loader import load_engine
from app.housekeeping import sweep
from app.metrics import Metrics
from app.middleware.body_limit import BodyLimitMiddleware
from app.middleware.request_id import RequestIdMiddleware
from app.model_store.resolve import resolve
from app.openai.bound_sessions import BoundSessions
from app.routers import chat, completions, generate, models, sessions, system, tokenize
from app.routers.dependencies import Services
from app.sessions import SessionRegistry
from app.settings import Settings
from app.tokens import Tokens, load_tokens


def load_app(settings: Settings) -> FastAPI:
    """Find and load the model, which takes seconds, and build the application around it. Raises `DjinnError`."""
    model = resolve(settings.model, cache_dir=settings.cache_dir.expanduser(), seed=settings.seed)
    served = replace(model, name=settings.served_name or model.name)
    return create_app(settings, load_engine(served, settings.engine()), load_tokens(model))


def create_app(settings: Settings, engine: Engine, tokens: Tokens) -> FastAPI:
    """The application. Its lifespan runs the engine thread and the sweep of expired sessions."""
    executor = EngineExecutor(engine)
    metrics = Metrics(engine.info.name)
    registry = SessionRegistry(executor, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        executor.start()
        sweeping = asyncio.create_task(sweep(registry))
        try:
            yield
        finally:
            sweeping.cancel()
            await asyncio.wait([sweeping])  # raises nothing, however the sweep ended: the engine must be stopped
            await executor.stop()

    app = FastAPI(
        title="Djinn",
        version=version("djinn"),
        lifespan=lifespan,
        middleware=[
            Middleware(RequestIdMiddleware),
            Middleware(ApiKeyMiddleware, keys=settings.api_keys),
            Middleware(BodyLimitMiddleware, max_bytes=int(settings.max_request_bytes)),
        ],
    )
    app.state.services = Services(
        settings, engine.info, tokens, metrics, registry, BoundSessions(registry), int(time.time())
    )
    install_error_handlers(app)
    for module in (sessions, generate, chat, completions, models, tokenize, system):
        app.include_router(module.router)
    return app
