"""Which part of a step takes how long: time is charged to the stage that the engine's thread is in."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from app.gpu import engine
from app.gpu.forward.forward import Forward, Runner
from app.gpu.forward.graphs import Graphs
from app.gpu.forward.results import LaunchedStep
from app.gpu.planning.scheduler import Scheduler

PLAN, INPUTS, LAUNCH, RESULTS, EVENTS, LOOP = STAGES = ("plan", "inputs", "launch", "results", "events", "loop")
CLIENT = "client"
"""The benchmark's own, which is nobody's time."""
MEANINGS = {
    PLAN: "the rows of the step and their blocks",
    INPUTS: "positions, block tables and sampling as arrays, and one copy of them to the device",
    LAUNCH: "copies to the graphs' inputs, replays, edits, the choice of tokens",
    RESULTS: "tokens read back; histories and turns go on",
    EVENTS: "events as a frame for the server's process",
    LOOP: "messages, moves of KV, timers",
}
_PARTS: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "plan", PLAN),
    (Scheduler, "plan_overlapped", PLAN),
    (engine, "sample_requests", INPUTS),
    (Runner, "launch", INPUTS),
    (Runner, "launch_overlapped", INPUTS),
    (Graphs, "replay_whole", LAUNCH),
    (Forward, "run", LAUNCH),
    (LaunchedStep, "launch", LAUNCH),
    (LaunchedStep, "collect", RESULTS),
    (engine, "finish_step", RESULTS),
)
"""Functions of the engine and their stages. What is in none of them is the loop's."""


class Stopwatch:
    """CPU nanoseconds of the thread by stage, between `start` and `stop`. A function within another is charged to its
    own stage only.
    """

    def __init__(self) -> None:
        self.charged = Counter[str]()
        self._entered = [LOOP]
        self._since = 0
        self._runs = False

    def start(self) -> None:
        """Charge from now on."""
        self._since, self._runs = time.thread_time_ns(), True

    def stop(self) -> None:
        """Charge nothing any more."""
        self._charge()
        self._runs = False

    def around(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """The same function, charged to the stage. One that yields is run to its end at once."""
        yields = inspect.isgeneratorfunction(function)

        @wraps(function)
        def charged(*args: Any) -> Any:
            self._charge()
            self._entered.append(stage)
            try:
                return list(function(*args)) if yields else function(*args)
            finally:
                self._charge()
                self._entered.pop()

        return charged

    def _charge(self) -> None:
        """What has gone by since the last call is the innermost stage's."""
        now = time.thread_time_ns()
        if self._runs:
            self.charged[self._entered[-1]] += now - self._since
        self._since = now


@contextmanager
def charging(stopwatch: Stopwatch) -> Iterator[None]:
    """Within the block the steps of every engine are charged."""
    with ExitStack() as patched:
        for owner, name, stage in _PARTS:
            patched.enter_context(mock.patch.object(owner, name, stopwatch.around(getattr(owner, name), stage)))
        yield
