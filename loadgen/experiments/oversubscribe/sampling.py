"""The server's memory over time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from client import MemoryMap
from loadgen.experiments.oversubscribe.findings import Budget, Findings, MemorySample
from loadgen.experiments.oversubscribe.growing import Crowd
from loadgen.results.failures import noting
from loadgen.targets.subject import Subject

PERIOD_S = 0.5


def read_budget(memory: MemoryMap) -> Budget:
    """What the server has room for."""
    data = memory.data
    return Budget(
        device_bytes=data.device.total_bytes,
        host_bytes=data.host.total_bytes,
        disk_bytes=data.disk.total_bytes,
        block_bytes=data.block_bytes,
        block_tokens=data.block_tokens,
        policy=memory.policy,
    )


@asynccontextmanager
async def sampled(subject: Subject, crowd: Crowd, budget: Budget, findings: Findings) -> AsyncIterator[None]:
    """Look at the server's memory all the while, at the start and at the end of the block too."""

    async def look() -> None:
        findings.samples.append(_sample(await subject.memory(), crowd.seconds, crowd.demand(budget)))

    async def keep_looking() -> None:
        with noting("memory over time", findings.failures):
            while True:
                await look()
                await asyncio.sleep(PERIOD_S)

    looking = asyncio.create_task(keep_looking())
    try:
        yield
        with noting("memory over time", findings.failures):
            await look()
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


def _sample(memory: MemoryMap, at_s: float, demand: int) -> MemorySample:
    data = memory.data
    return MemorySample(
        at_s,
        demand,
        device_bytes=data.device.owned_bytes + data.device.cached_bytes,
        host_bytes=data.host.owned_bytes,
        disk_bytes=data.disk.owned_bytes,
        running=memory.turns_running,
        waiting=memory.turns_waiting,
    )
