"""What the open page costs agents: `python -m benchmarks.page`, half an hour.

Eighty agents run on a device for twenty. Every quarter of a minute somebody else may look: nobody, a reader of the
page's stream, or the page in Chromium, in random order. So the three are compared within a run, which drifts less than
runs do from each other, and agents that come back together do not always meet the same one.

Waits vary by a tenth from run to run. What a looker costs the process that serves HTTP is the sharper figure.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from rich.console import Console

from benchmarks.command import bind_to_cores, exit_status, make_parser
from benchmarks.cpu_meter import process_cpu_s
from benchmarks.figures import Figure, Target, figure_table
from benchmarks.page.agents import Resumed, running_agents
from benchmarks.page.lookers import NOBODY, PAGE, READER, Look, lookers
from benchmarks.record import Run, write_run
from benchmarks.spread import middle_half
from loadgen.peers.base import ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.dtypes import AUTO
from loadgen.processes.process import free_port, running_server
from loadgen.results.tables import to_markdown, to_rich

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
