"""The parts of a running server, put together, and what runs while the application does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from app.cluster.membership import Membership
from app.domain.errors import EngineRestarting
from app.engine_process.executor import EngineExecutor
from app.journal.journal import Journal
from app.machine.budget import DiskRoom
from app.machine.memory import give_back_freed
from app.routers.dependencies import Services
from app.sessions.lifecycle import end_turns, guard_disk, guard_host, restore, sweep, take_up
from app.sessions.session import Session
from app.sessions.table import SessionTable

if TYPE_CHECKING:
    from app.telemetry.spans import SpanTraces


QUIET_S = 1.0
"""Between the start, or the last look at turns that run, and the preparation of grammars."""


@asynccontextmanager
async def running(
    services: Services,
    restored: Sequence[Session],
    journal: Journal | None,
    room: DiskRoom,
    traces: SpanTraces | None,
    temporary: ExitStack,
    app: FastAPI,
) -> AsyncIterator[None]:
    """The life of the application: what began last ends first. `restored` are the journal's sessions. `room` is that of
    files beside the journal; `temporary` has the folder of files where there is no journal.
    """
    registry, tenancy, cluster = services.sessions, services.tenancy, services.cluster
    executor, table, kv_dir = registry.executor, registry.table, services.settings.engine().kv_dir
    async with AsyncExitStack() as ends:
        ends.callback(temporary.close)
        ends.callback(tenancy.close)
        ends.push_async_callback(services.history.close)
        if traces is not None:
            ends.push_async_callback(asyncio.to_thread, traces.close)
        if journal is not None:
            if cluster is not None:
                ends.push_async_callback(_end_in_order, cluster.membership, journal)
            journal.start()
            ends.push_async_callback(asyncio.to_thread, journal.close)
        executor.reopen = partial(_take_up, services)
        executor.end_turns, executor.go_on = partial(end_turns, registry), registry.turns.deadly.clear
        executor.start()
        ends.push_async_callback(executor.stop)
        with suppress(EngineRestarting):  # the next engine loads them
            await services.uploads.load_all()
        await restore(registry, restored)
        if cluster is not None:
            await ends.enter_async_context(cluster.running(services.require_ready))
        endless = [sweep(registry), guard_host(executor, table, tenancy.quotas), _settle(executor, table)]
        endless += [services.history.run(), services.history.watch(registry.try_memory)]
        endless += [services.findings.run(), services.findings.count()]
        if journal is not None and kv_dir is not None and room.beside(kv_dir) is room:
            endless.append(guard_disk(executor, journal, room))  # KV files share the journal's disk
        for work in endless:
            ends.push_async_callback(_end, asyncio.create_task(work))
        services.batches.start(app.state.inside)
        ends.push_async_callback(services.batches.close)
        services.activation_jobs.resume()
        ends.push_async_callback(services.activation_jobs.close)
        ends.push_async_callback(services.background.close)
        yield


async def _take_up(services: Services) -> None:
    services.history.mark("engine_restarted")
    await take_up(services.sessions, services.uploads)


async def _settle(executor: EngineExecutor, table: SessionTable) -> None:
    """While no request waits: give back what the start has freed, and have the vocabulary read."""
    while True:
        await asyncio.sleep(QUIET_S)
        if not table.busy:
            break
    give_back_freed()
    executor.engine.grammars.prepare()


async def _end_in_order(membership: Membership, journal: Journal) -> None:
    """Tell the cluster that the server has ended: its journal is closed by now."""
    await membership.end(journal.ended_at)


async def _end(task: asyncio.Task[None]) -> None:
    """End an endless task. Raises nothing, however it ended before: what is ended after it must be."""
    task.cancel()
    await asyncio.wait([task])
