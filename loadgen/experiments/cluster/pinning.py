"""A core for each replica, where there are enough."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from loadgen.experiments.cluster.hosting import Cluster

PERIOD_S = 0.5
"""A replica that is started again is pinned within that."""


def own_cores() -> tuple[int, ...]:
    """Those that this process may use; empty where a system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def cores_for(replicas: int, cores: Sequence[int]) -> tuple[int, ...]:
    """One core for each replica, from the last; one at least is left for the agents. Empty if too few."""
    return tuple(cores[-replicas:]) if len(cores) > replicas else ()


@asynccontextmanager
async def pinned(cluster: Cluster, cores: Sequence[int]) -> AsyncIterator[None]:
    """Have each replica on its core within the block, in the order of their names. Without cores do nothing."""
    task = asyncio.create_task(_keep(cluster, cores)) if cores else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _keep(cluster: Cluster, cores: Sequence[int]) -> None:
    names = sorted(cluster.urls)
    while True:
        for name, process in cluster.replicas().items():
            pin(process, cores[names.index(name)])
        await asyncio.sleep(PERIOD_S)


def pin(process: psutil.Process, core: int) -> None:
    """Have all threads of a process and of those below it on one core."""
    with suppress(psutil.NoSuchProcess):
        for each in [process, *process.children(recursive=True)]:
            for thread in _threads(each.pid):
                with suppress(ProcessLookupError):
                    if os.sched_getaffinity(thread) != {core}:
                        os.sched_setaffinity(thread, {core})


def _threads(pid: int) -> list[int]:
    try:
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
