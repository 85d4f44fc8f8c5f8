"""The agents of one run, on a thread of their own: the browser keeps the main one."""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from loadgen.errors import LoadgenError
from loadgen.experiments.density.measuring import Attempt, Plan, measure
from loadgen.load.corpus import python_topics
from loadgen.load.measurement import Measurement
from loadgen.load.records import Run
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import plan_trace
from loadgen.options.workload import add_workload_options, read_workload
from loadgen.targets import TargetSpec


@dataclass(frozen=True, slots=True)
class Resumed:
    """A turn that followed a think time: when it was sent, in seconds of `perf_counter`, and its first token's wait."""

    sent_s: float
    ttft_s: float


@dataclass(slots=True)
class Agents:
    """A run under way."""

    ended: Future[Run]
    begun_s: float = math.nan
    """Of `perf_counter`."""
    stop: Callable[[], object] = lambda: None
    """Ends them early."""

    @property
    def are_running(self) -> bool:
        """Whether any has turns left."""
        return not self.ended.done()

    def resumed(self) -> list[Resumed]:
        """Their resumed turns, once none is running. Raises `LoadgenError` if one failed."""
        run = self.ended.result()
        if run.failures:
            raise LoadgenError(f"a turn failed: {run.failures[0]}")
        return [Resumed(self.begun_s + turn.sent_s, turn.token_times_s[0]) for turn in run.turns if turn.turn > 0]


@contextmanager
def running_agents(url: str, options: tuple[str, ...]) -> Iterator[Agents]:
    """Agents of the load generator's `options` on the server at `url`; the block begins as the first is planned."""
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    load = read_workload(parser.parse_args(options))
    plan = Plan(load, plan_trace(load), python_topics(), Measurement())
    attempt, agents = Attempt(None), Agents(Future())

    def changed(_run: Run, _in_flight: Collection[TurnClock]) -> None:
        if math.isnan(agents.begun_s):
            agents.begun_s = time.perf_counter()

    async def live() -> Run:
        agents.stop = partial(asyncio.get_running_loop().call_soon_threadsafe, _task().cancel)
        await measure(attempt, TargetSpec("djinn", url), plan, 0, changed)
        return attempt.run

    with ThreadPoolExecutor(1) as thread:
        agents.ended = thread.submit(lambda: asyncio.run(live()))
        while math.isnan(agents.begun_s) and agents.are_running:
            time.sleep(0.1)
        try:
            yield agents
        finally:
            if agents.are_running:
                agents.stop()


def _task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None, "called in a coroutine"
    return task
