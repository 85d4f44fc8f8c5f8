"""Samples of one server and of what its processes use, on a clock of their own that starts with the run."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import psutil

from client import DjinnError
from loadgen.load.records import Sample, ServerTotals
from loadgen.sampling.readers import DjinnReader, PrometheusReader, Reader, Reading
from loadgen.targets import TargetSpec


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """CPU seconds since they began, and bytes of resident memory, shared pages counted in each process."""

    cpu_s: float
    rss_bytes: int


def process_use(pid: int) -> ProcessUse | None:
    """What process `pid` and all below it use; None if it is gone.

    Children that have ended count through their parent, which has waited for them.
    """
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    cpu_s, rss_bytes = 0.0, 0
    for process in tree:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            rss_bytes += process.memory_info().rss
    return ProcessUse(cpu_s, rss_bytes)


INTERVAL_S = 0.5

READ_TIMEOUT_S = 5.0
"""How long a server may be silent before a sample goes without what it tells."""


class Sampler:
    """Takes a sample every `INTERVAL_S`, at multiples of it since the clock was started. A sample that would come
    while the one before is still being taken is left out.
    """

    def __init__(self, reader: Reader, pid: int | None) -> None:
        self.samples: list[Sample] = []
        self._reader = reader
        self._pid = pid
        self._started = 0.0
        self._before: Reading | None = None
        self._last: Reading | None = None

    @property
    def totals(self) -> ServerTotals | None:
        """What the server counted between the first and the last sample; None if it told nothing in one of them."""
        if self._before is None or self._last is None:
            return None
        return self._last.totals.since(self._before.totals)

    async def start(self) -> None:
        """Take the first sample, and start the clock."""
        self._before = await self._read()
        use = await self._use()
        self._started = time.perf_counter()
        self.samples.append(to_sample(0.0, self._before, use))

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            due = INTERVAL_S * (math.floor(self._now() / INTERVAL_S) + 1)
            await asyncio.sleep(due - self._now())
            await self.take()

    async def take(self) -> None:
        """Take a sample now. Its time is that of the server's answer."""
        self._last = await self._read()
        at_s = self._now()
        self.samples.append(to_sample(at_s, self._last, await self._use()))

    async def _read(self) -> Reading | None:
        try:
            return await self._reader.read()
        except DjinnError:
            return None

    async def _use(self) -> ProcessUse | None:
        """In a thread: to go through the processes of a machine takes milliseconds, mostly outside of Python."""
        return None if self._pid is None else await asyncio.to_thread(process_use, self._pid)

    def _now(self) -> float:
        return time.perf_counter() - self._started


def to_sample(at_s: float, told: Reading | None, use: ProcessUse | None) -> Sample:
    """What the server told and what its processes use, each None if it is not known, as one sample."""
    reading = told or Reading()
    return Sample(
        at_s=at_s,
        sessions=reading.sessions,
        bytes=reading.bytes,
        running=reading.running,
        waiting=reading.waiting,
        kv_used=reading.kv_used,
        cpu_s=None if use is None else use.cpu_s,
        rss_bytes=None if use is None else use.rss_bytes,
    )


@asynccontextmanager
async def sampling(spec: TargetSpec) -> AsyncIterator[Sampler]:
    """Sample a server beside what the block does with it, which is to begin at once; the last sample is at its end."""
    transport = replace(spec, timeout_s=READ_TIMEOUT_S).transport()
    reader: Reader = DjinnReader(transport) if spec.model is None else PrometheusReader(transport)
    sampler = Sampler(reader, spec.pid)
    try:
        await sampler.start()
        task = asyncio.create_task(sampler.run())
        try:
            yield sampler
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await sampler.take()
    finally:
        await reader.close()
