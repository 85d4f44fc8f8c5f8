"""The parts of a running server, put together, and what runs while the application does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from app.cluster.moves.bindings import Bindings
from app.cluster.moves.cluster import Cluster, Membership
from app.cluster.prefill import Prefill
from app.domain.values import KVPolicy, SamplingDefaults
from app.engine_process.executor import Engine, EngineExecutor, GrammarCompiler
from app.events import EventStreams, Feed
from app.exports.spool import Spool
from app.journal.journal import Journal
from app.machine.files import DiskRoom
from app.machine.memory import give_back_freed
from app.openai.response_store import ResponseStore
from app.routers.dependencies import Services
from app.sessions.guards import guard_disk, guard_host
from app.sessions.keeper import SessionKeeper
from app.sessions.lifecycle import end_turns, restore, sweep, take_notice, take_up
from app.sessions.named import BoundSessions
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.table import SessionTable
from app.sessions.whitebox import Vectors
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.tenants.tenancy import Tenancy
from app.text.tokenizer import Tokens
from app.tools.support import ToolSupport

if TYPE_CHECKING:
    from app.telemetry.export import SpanTraces


def open_services(
    settings: Settings,
    engine: Engine,
    tokens: Tokens,
    tenancy: Tenancy,
    keeper: SessionKeeper,
    restored: Sequence[Session],
    *,
    journal: Journal | None,
    room: DiskRoom,
    traces: SpanTraces | None,
    member: Membership | None,
    sampling: SamplingDefaults,
) -> Services:
    """Around the engine, which need not run yet. `restored` are the sessions that `keeper` has found in the journal."""
    feed, metrics = Feed(), Metrics(engine.info.name)
    table = SessionTable(settings.max_sessions, tenancy.quotas, feed)
    registry = SessionRegistry(
        EngineExecutor(engine, partial(take_notice, table, keeper)),
        table,
        keeper,
        tokens,
        metrics,
        settings,
        tenancy.quotas,
        traces,
    )
    responses = ResponseStore(
        registry, journal, limit=settings.max_responses, max_bytes=int(settings.max_responses_bytes)
    )
    responses.restore(restored)
    spooled = settings.state_dir and settings.state_dir.expanduser() / "tmp"  # with the journal, if there is one
    spool = Spool(spooled, room.beside(spooled) if spooled else room, int(settings.max_spool_bytes))
    bound_sessions = BoundSessions(registry, restored)
    key = settings.cluster_key_file
    shared = None if key is None else key.expanduser().read_bytes().strip()
    tool_support = ToolSupport(tokens, settings.chat_format, shared)
    tool_support.check_format()
    bindings = Bindings(bound_sessions, responses, registry.tool_waits, keeper.keyed)
    return Services(
        settings=settings,
        info=engine.info,
        sampling=sampling,
        tokens=tokens,
        metrics=metrics,
        sessions=registry,
        tool_support=tool_support,
        bound_sessions=bound_sessions,
        responses=responses,
        spool=spool,
        side_work=registry.side_work,
        vectors=Vectors(journal, keeper.room),
        tenancy=tenancy,
        cluster=None if member is None else Cluster(registry, tenancy.directory, member, bindings),
        lease=None if journal is None else journal.lease,
        events=EventStreams(feed, registry, KVPolicy(settings.kv_policy), metrics.event_streams),
        started_at=int(time.time()),
    )


QUIET_S = 1.0
"""Between the start, or the last look at turns that run, and the preparation of grammars."""


@asynccontextmanager
async def running(
    services: Services,
    restored: Sequence[Session],
    journal: Journal | None,
    room: DiskRoom,
    traces: SpanTraces | None,
    prefill: Prefill | None,
    _app: FastAPI,
) -> AsyncIterator[None]:
    """The life of the application: what began last ends first. `restored` are the journal's sessions. `room` is that of
    files beside the journal.
    """
    registry, tenancy, cluster = services.sessions, services.tenancy, services.cluster
    executor, table, kv_dir = registry.executor, registry.table, services.settings.engine().kv_dir
    async with AsyncExitStack() as ends:
        ends.callback(tenancy.close)
        if traces is not None:
            ends.push_async_callback(asyncio.to_thread, traces.close)
        if journal is not None:
            journal.start()
            ends.push_async_callback(asyncio.to_thread, journal.close)
        executor.on_back(partial(take_up, registry))
        executor.on_stall(partial(end_turns, registry), registry.turns.deadly.clear)
        executor.start()
        ends.push_async_callback(executor.stop)
        await restore(registry, restored)
        if cluster is not None:
            cluster.start()
            ends.push_async_callback(cluster.close)
        if prefill is not None:
            prefill.start()
            ends.push_async_callback(prefill.close)
        endless = [
            sweep(registry),
            guard_host(executor, table, tenancy.quotas),
            _settle(executor.engine.grammars, table),
        ]
        if cluster is not None and services.settings.balance:
            endless.append(cluster.balance.run())
        if journal is not None and kv_dir is not None and room.beside(kv_dir) is room:
            endless.append(guard_disk(executor, journal, room))  # KV files share the journal's disk
        for work in endless:
            ends.push_async_callback(_end, asyncio.create_task(work))
        yield


async def _settle(grammars: GrammarCompiler, table: SessionTable) -> None:
    """While no request waits: give back what the start has freed, and have the vocabulary read."""
    while True:
        await asyncio.sleep(QUIET_S)
        if not table.busy:
            break
    give_back_freed()
    grammars.prepare()


async def _end(task: asyncio.Task[None]) -> None:
    """End an endless task. Raises nothing, however it ended before: what is ended after it must be."""
    task.cancel()
    await asyncio.wait([task])
