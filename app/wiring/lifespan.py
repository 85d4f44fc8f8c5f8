"""What runs while the application does: the journal, the engine, and tasks that never end by themselves."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI

from app.bridge.executor import GrammarCompiler
from app.cluster.prefill.prefill import Prefill
from app.journal.journal import Journal
from app.machine.disk import DiskRoom
from app.machine.memory import give_back_freed
from app.routers.dependencies import Services
from app.sessions.guards.disk import guard_disk
from app.sessions.guards.host import guard_host
from app.sessions.lifecycle import end_turns, restore, sweep, take_up
from app.sessions.session import Session
from app.sessions.table import SessionTable
from app.traces.base import Traces

QUIET_S = 1.0
"""Between the start, or the last look at turns that run, and the preparation of grammars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifespan:
    """Starts and ends what the application consists of. `restored` are the journal's sessions. `room` is that of files
    beside the journal.
    """

    services: Services
    restored: Sequence[Session]
    journal: Journal | None
    room: DiskRoom
    traces: Traces | None
    prefill: Prefill | None

    @asynccontextmanager
    async def run(self, _app: FastAPI) -> AsyncIterator[None]:
        """The life of the application: what began last ends first."""
        registry, tenancy, cluster = self.services.sessions, self.services.tenancy, self.services.cluster
        executor, table = registry.executor, registry.table
        async with AsyncExitStack() as ends:
            ends.callback(tenancy.close)
            if self.traces is not None:
                ends.push_async_callback(asyncio.to_thread, self.traces.close)
            if self.journal is not None:
                self.journal.start()
                ends.push_async_callback(asyncio.to_thread, self.journal.close)
            executor.on_back(partial(take_up, registry))
            executor.on_stall(partial(end_turns, registry), registry.turns.deadly.clear)
            executor.start()
            ends.push_async_callback(executor.stop)
            await restore(registry, self.restored)
            if cluster is not None:
                cluster.start()
                ends.push_async_callback(cluster.close)
            if self.prefill is not None:
                self.prefill.start()
                ends.push_async_callback(self.prefill.close)
            endless = [
                sweep(registry),
                guard_host(executor, table, tenancy.quotas),
                _settle(executor.engine.grammars, table),
            ]
            if cluster is not None and self.services.settings.balance:
                endless.append(cluster.balance.run())
            if self.journal is not None and self._has_kv_files:
                endless.append(guard_disk(executor, self.journal, self.room))
            for work in endless:
                ends.push_async_callback(_end, asyncio.create_task(work))
            yield

    @property
    def _has_kv_files(self) -> bool:
        """Whether KV files share the room's disk."""
        kv_dir = self.services.settings.engine().kv_dir
        return kv_dir is not None and self.room.beside(kv_dir) is self.room


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
