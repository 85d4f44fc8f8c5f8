"""The engine's memory map, shared by concurrent readers. The engine looks at each session to make one."""

import asyncio
import time

from app.bridge.executor import EngineExecutor
from app.domain.memory_map import MemoryMap
from app.messages import Inspect

SHARE = 0.05
"""Of the engine's time, that all maps together take."""
LONGEST_REST_S = 1.0
"""A delayed map delays its readers for this long at most."""


class MemoryReads:
    """Has one map made at a time, for all who have asked by then, and rests after it. Used on the event loop only."""

    def __init__(self, executor: EngineExecutor) -> None:
        self._executor = executor
        self._next: asyncio.Task[MemoryMap] | None = None
        """One that the engine has not been asked for yet."""
        self._made = asyncio.Lock()
        self._rests_until = 0.0

    async def read(self) -> MemoryMap:
        """The memory as it is now or later. Raises what `EngineExecutor.call` raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> MemoryMap:
        async with self._made:
            await asyncio.sleep(max(0.0, self._rests_until - time.perf_counter()))
            self._next = None  # later readers want a newer one
            found: MemoryMap = await self._executor.call(Inspect, stall_ends_it=True)
            self._rests_until = time.perf_counter() + min(LONGEST_REST_S, found.seconds * (1 / SHARE - 1))
            return found
