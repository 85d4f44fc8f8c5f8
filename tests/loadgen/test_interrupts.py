"""Ctrl-C costs nothing of what has been measured, also when it comes while a run is being wound up."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from loadgen.experiments.density.experiment import run_density
from loadgen.experiments.density.measuring import Plan
from loadgen.experiments.density.report import DensityReport
from loadgen.load.corpus import python_topics
from loadgen.load.measurement import Measurement
from loadgen.load.workload import Workload, plan_trace
from loadgen.options.targets import run_on
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access, RunningTarget
from tests.loadgen.stubs import openai_app, serving, until

AGENTS, TOKENS = 3, 2
LOAD = Workload(AGENTS, rate=float("inf"), turns=1, context=20, system_tokens=8, completion_tokens=TOKENS)
PLAN = Plan(LOAD, plan_trace(LOAD), python_topics(), Measurement())
EVENTS = (
    *(TOKENS * [{"choices": [{"text": "a", "token_ids": [97]}]}]),
    {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": TOKENS}},
)


@dataclass
class Stub:
    """A server that answers at once, but for `/metrics` once `stalls` is set."""

    completions: int = 0
    stalls: bool = False
    stalled: bool = False

    async def complete(self, _request: Request) -> Response:
        self.completions += 1
        body = (*(f"data: {json.dumps(event)}\n\n" for event in EVENTS), "data: [DONE]\n\n")
        return StreamingResponse(iter(body), media_type="text/event-stream")

    async def metrics(self, _request: Request) -> Response:
        if self.stalls and self.completions > AGENTS:  # one comes before the clock starts
            self.stalled = True
            await asyncio.sleep(3600)
        return Response("# nothing\n")


@contextmanager
def stub() -> Iterator[tuple[Stub, TargetSpec]]:
    server = Stub()
    with serving(openai_app(server.complete, Route("/metrics", server.metrics))) as url:
        yield server, TargetSpec("stub", url, "stub")


@dataclass(frozen=True)
class InterruptedAtItsEnd:
    """A server that is started for its run. Ctrl-C comes while it is waited for, without the event loop, to end."""

    spec: TargetSpec
    name: str = "managed"
    running: None = None

    @asynccontextmanager
    async def reach(self) -> AsyncIterator[TargetSpec]:
        yield self.spec
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # what asyncio makes of SIGINT


async def density(*targets: Access) -> DensityReport:
    return await run_density(targets, PLAN, Console(file=StringIO()))


def test_while_the_servers_of_an_experiment_are_stopped() -> None:
    async def experiment(specs: list[TargetSpec]) -> list[str]:
        return [spec.name for spec in specs]

    assert run_on([InterruptedAtItsEnd(TargetSpec("a", "http://nowhere"))], experiment) == ["a"]


async def test_while_a_server_is_stopped() -> None:
    with stub() as (_, spec):
        found = await asyncio.create_task(density(InterruptedAtItsEnd(spec), RunningTarget(spec)))
    (target,) = found.targets
    assert found.interrupted
    assert target.summary.turns_completed == AGENTS
    assert target.server.url == spec.url


async def test_while_the_last_sample_is_taken() -> None:
    with stub() as (server, spec):
        server.stalls = True
        run = asyncio.create_task(density(RunningTarget(spec), InterruptedAtItsEnd(spec)))
        await until(lambda: server.stalled)
        run.cancel()
        found = await run
    (target,) = found.targets
    assert found.interrupted
    assert target.summary.turns_completed == AGENTS


TERMINATED = """
import time
from loadgen.options.ending import sigterm_as_interrupt
with sigterm_as_interrupt():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        pass
print("interrupted", flush=True)
time.sleep(60)
"""


def ignore_interrupts() -> None:
    """As a shell has it for what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_sigterm_interrupts_a_run_in_the_background_and_ends_what_comes_behind_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE, text=True, preexec_fn=ignore_interrupts
    ) as process:
        assert process.stdout is not None
        for line in ("ready\n", "interrupted\n"):
            assert process.stdout.readline() == line
            process.terminate()
        assert process.wait(30) == -signal.SIGTERM
