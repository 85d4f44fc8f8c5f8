"""What the open page costs agents: `python -m benchmarks.page`, half an hour.

Eighty agents run on a device for twenty. Every quarter of a minute somebody else may look: nobody, a reader of the
page's stream, or the page in Chromium, in random order. So the three are compared within a run, which drifts less than
runs do from each other, and agents that come back together do not always meet the same one.

Waits vary by a tenth from run to run. What a looker costs the process that serves HTTP is the sharper figure.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright
from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.cpu_meter import process_cpu_s
from benchmarks.record import Run, write_run
from benchmarks.spread import middle_half
from loadgen.errors import LoadgenError
from loadgen.experiments.density.running import Attempt, Plan, measure
from loadgen.load.corpus import python_topics
from loadgen.load.measurement import Measurement
from loadgen.load.records import Run as Seen
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import plan_trace
from loadgen.options.workload import add_workload_options, read_workload
from loadgen.peers.base import ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.dtypes import AUTO
from loadgen.processes.process import free_port, running_server
from loadgen.report.figures import Figure, Target
from loadgen.report.tables import figure_table, to_markdown, to_rich
from loadgen.targets import TargetSpec

ARGUMENTS = ("--no-sandbox", "--disable-gpu")


def find_chromium() -> str:
    """Its path. Raises `LoadgenError` without one."""
    path = shutil.which("chromium")
    if path is None:
        raise LoadgenError("Chromium must be installed: apt-get install chromium")
    return path


@dataclass(frozen=True, slots=True)
class Resumed:
    """A turn that followed a think time: when it was sent, in seconds of `perf_counter`, and its first token's wait."""

    sent_s: float
    ttft_s: float


@dataclass(slots=True)
class Agents:
    """A run under way."""

    ended: Future[Seen]
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

    def changed(_run: Seen, _in_flight: Collection[TurnClock]) -> None:
        if math.isnan(agents.begun_s):
            agents.begun_s = time.perf_counter()

    async def live() -> Seen:
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


NOBODY, READER, PAGE = "nobody", "a reader", "the page"
IDLE = ("chrt", "--idle", "0")
"""The browser only gets processor time that nobody else wants: whoever looks does so from a machine of their own."""
BLANK = "about:blank"

Look = Callable[[str], None]
"""Has another one look from now on."""


@contextmanager
def lookers(url: str) -> Iterator[Look]:
    """The three of them; nobody looks at first. A reader takes the page's stream of events, and draws nothing.

    Raises `LoadgenError` without a browser, or for errors on the page.
    """
    path = find_chromium()
    errors: list[str] = []
    readers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        wrapper = Path(folder) / "chromium"
        wrapper.write_text(f'#!/bin/sh\nexec {" ".join(IDLE)} {path} "$@"\n')
        wrapper.chmod(0o700)
        with playwright.chromium.launch(executable_path=wrapper, args=ARGUMENTS) as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.on("pageerror", lambda error: errors.append(str(error)))

            def look(who: str) -> None:
                while readers:
                    with readers.pop() as reader:
                        reader.kill()
                page.goto(url if who == PAGE else BLANK)
                if who == PAGE:
                    page.get_by_role("heading", name="Sessions").first.wait_for()
                if who == READER:
                    stream = ["curl", "--silent", "--no-buffer", f"{url}/v1/events"]
                    readers.append(subprocess.Popen(stream, stdout=subprocess.DEVNULL))

            try:
                yield look
                look(NOBODY)
            except PlaywrightError as error:
                raise LoadgenError(f"the page did not open: {error.message}") from error
    if errors:
        raise LoadgenError(f"the page had an error: {errors[0]}")


AGENTS = ("--agents", "80", "--rate", "0.2", "--context", "1024", "--turns", "6", "--think", "10:20", "--seed", "1")
FEW = ("--agents", "6", "--rate", "1", "--context", "192", "--turns", "8", "--think", "1:2", "--seed", "1")
KV_TOKENS = 20 * 1024
MOST = Target(1.02)
MOST_OF_CORES = Target(2.0)
SLICE_S, QUICK_SLICE_S = 15.0, 4.0
EDGE_S = 1.0
"""Turns that are sent so shortly before or after somebody else looks count for nobody."""
WHO = (NOBODY, READER, PAGE)


@dataclass(frozen=True, slots=True)
class Slice:
    """From when to when, in seconds of `perf_counter`, `who` looked. The server's process had `cpu_s` meanwhile."""

    who: str
    start_s: float
    end_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun(Run):
    """First tokens' waits of resumed turns in seconds, by who looked, a list for each run. `agents`: their options.

    `cpu`: the processor's seconds that the server's process had in a second, one figure for each run.
    """

    agents: tuple[str, ...]
    cores: int
    waits_s: dict[str, list[list[float]]]
    cpu: dict[str, list[float]]


def main() -> int:
    """Run it as the command line asks; returns the process's exit status."""
    parser = make_parser("python -m benchmarks.page", __doc__)
    parser.add_argument("--runs", type=int, choices=range(2, 21), default=3, metavar="2..20", help="default 3")
    arguments = parser.parse_args()
    return exit_status(arguments.model, lambda: _measure(arguments, Console()))


def _measure(arguments: argparse.Namespace, console: Console) -> None:
    bind_to_cores(arguments.cores)
    agents, slice_s = (FEW, QUICK_SLICE_S) if arguments.quick else (AGENTS, SLICE_S)
    waits: dict[str, list[list[float]]] = {who: [] for who in WHO}
    cpu: dict[str, list[float]] = {who: [] for who in WHO}
    for number in range(arguments.runs):
        with console.status(f"run {number + 1} of {arguments.runs}"):
            turns, slices = run_once(arguments.model, agents, slice_s, number)
        found, cost = waits_by_looker(turns, slices), cpu_by_looker(slices)
        for who in WHO:
            waits[who].append(found[who])
            cpu[who].append(cost[who])
            console.print(
                f"run {number + 1}, {who}: {1e3 * median(found[who]):.1f} ms of {len(found[who])} turns; "
                f"the server's process had {1e3 * cost[who]:.1f} ms a second"
            )
    run = PageRun(model=arguments.model.name, agents=agents, cores=arguments.cores, waits_s=waits, cpu=cpu)
    table = figure_table("What it costs resumed turns (median of a run), and the server's process", figures_of(run))
    console.print(to_rich([table]))
    if not arguments.quick:
        heading = f"# What the open page costs: {run.model} on {run.place_and_time}\n\n"
        console.print(f"written: {write_run(arguments.output, 'page-', run, heading + to_markdown(table))}")


def figures_of(run: PageRun) -> list[Figure]:
    """The lines of the table."""
    medians = {who: [median(waits) for waits in run.waits_s[who]] for who in WHO}
    ratios = {
        who: [seen / alone for seen, alone in zip(medians[who], medians[NOBODY], strict=True)] for who in (READER, PAGE)
    }
    shares = {
        who: [100 * (seen - alone) / run.cores for seen, alone in zip(run.cpu[who], run.cpu[NOBODY], strict=True)]
        for who in (READER, PAGE)
    }
    return [
        *(Figure(f"first token, {who} looks", "ms", middle_half([1e3 * each for each in medians[who]])) for who in WHO),
        *(Figure(f"first token, {who} over nobody", "×", middle_half(each), MOST) for who, each in ratios.items()),
        *(Figure(f"{who} takes of all cores", "%", middle_half(each), MOST_OF_CORES) for who, each in shares.items()),
    ]


def run_once(model: Path, agents: tuple[str, ...], slice_s: float, number: int) -> tuple[list[Resumed], list[Slice]]:
    """The resumed turns of a run on a server of its own, and who looked when. Raises `LoadgenError`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    launch = DjinnPeer("djinn", "signal").launch(ServerSettings(model, AUTO, kv_tokens=KV_TOKENS), port)
    slices, random = list[Slice](), Random(number)
    with (
        running_server(launch.command, launch.environment, url) as server,
        lookers(url) as look,
        running_agents(url, agents) as running,
    ):
        order = list[str]()
        while running.are_running:
            order = order or random.sample(WHO, len(WHO))
            slices.append(_look_for(slice_s, order.pop(), look, server))
        return running.resumed(), slices


def _look_for(slice_s: float, who: str, look: Look, server: int) -> Slice:
    start_s, cpu_s = time.perf_counter(), process_cpu_s(server)
    look(who)
    time.sleep(max(0.0, start_s + slice_s - time.perf_counter()))
    return Slice(who, start_s, time.perf_counter(), process_cpu_s(server) - cpu_s)


def waits_by_looker(turns: Sequence[Resumed], slices: Sequence[Slice]) -> dict[str, list[float]]:
    """First tokens' waits by who looked while the turn waited."""
    waits: dict[str, list[float]] = {who: [] for who in WHO}
    for turn in turns:
        for part in slices:
            if part.start_s + EDGE_S <= turn.sent_s and turn.sent_s + turn.ttft_s <= part.end_s:
                waits[part.who].append(turn.ttft_s)
    return waits


def cpu_by_looker(slices: Sequence[Slice]) -> dict[str, float]:
    """Seconds of a processor that the server's process had in a second, by who looked."""
    return {who: _cpu(part for part in slices if part.who == who) for who in WHO}


def _cpu(slices: Iterable[Slice]) -> float:
    parts = list(slices)
    return sum(part.cpu_s for part in parts) / sum(part.end_s - part.start_s for part in parts)


if __name__ == "__main__":
    sys.exit(main())
