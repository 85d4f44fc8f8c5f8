"""`python -m loadgen chaos`: whether a server, or a cluster, that is killed, filled and damaged for long loses a token,
an answer, or memory.
"""

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from client import AsyncDjinn, DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.chaos.agents import TIMEOUT_S, ChatAgent, Mirror, SessionAgent
from loadgen.experiments.chaos.faults import Faults, keep_moving, look_at
from loadgen.experiments.chaos.hosting import KEYS, Cluster, HostedServer, both, keep_sampling, shown
from loadgen.experiments.chaos.plan import ChaosPlan, Findings, Notes
from loadgen.options.common import add_output, finish, make_output, whole_model
from loadgen.options.parser import add_plan_options, read_plan
from loadgen.processes.launch import default_model
from loadgen.report.origin import Server
from loadgen.report.report import Chart, Report, ending_early, noting
from loadgen.report.tables import Figure, Row, Spread, Table, Target, all_of, counts, duration, exact, none_of, some

CHAT_EVERY = 4
"""One agent of so many is a client of OpenAI's API."""
WARM_S = 600.0
"""Until then memory may grow: caches fill."""
SHORTEST_S = 720.0
"""Shorter runs tell nothing about growth."""
FLAT = 2.0
"""Percent."""
SAMPLES = "Samples"
USES = {
    "resident memory, MiB": "MiB",
    "open descriptors": "descriptors",
    "state folder, MiB": "MiB",
    "open sessions": "sessions",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, and the fields of `ChaosPlan`."""
    add_output(parser)
    parser.add_argument(
        "--model", metavar="MODEL", help=f"as `djinn serve --model` has it (default: {default_model()})"
    )
    add_plan_options(parser, ChaosPlan)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = read_plan(options, ChaosPlan)
    make_output(options)
    return finish(asyncio.run(run_chaos(plan, whole_model(options.model or default_model()), progress)), options)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both servers, the layers of their model, and a folder for files of sessions."""

    server: HostedServer
    twin: HostedServer
    layers: int
    folder: Path


async def run_chaos(plan: ChaosPlan, model: str, console: Console) -> Report:
    """Run the experiment. Raises `LoadgenError` if it cannot begin.

    Cancelled, it returns what was seen until then.
    """
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="loadgen-chaos-") as name:
        folder = Path(name)
        async with both(plan, model, folder / "state") as (server, twin):
            layers = await _layers(twin)
            with ending_early(findings), noting("the run", findings.failures):
                await _run(plan, _Pair(server, twin, layers, folder), findings, console)
    return report_of(plan, findings, shown(server, model, folder))


async def _layers(twin: HostedServer) -> int:
    try:
        async with AsyncDjinn(twin.url, timeout=TIMEOUT_S) as djinn:
            return (await djinn.models())[0].layers
    except DjinnError as error:
        raise LoadgenError(f"the twin failed: {error}") from error


async def _run(plan: ChaosPlan, pair: _Pair, findings: Findings, console: Console) -> None:
    """Agents, faults and samples side by side. Raises `LoadgenError` if a server does not come back."""
    notes, stop = Notes(findings, moves=plan.moves_per_second > 0), asyncio.Event()
    async with AsyncExitStack() as stack:

        async def connect(server: HostedServer, key: str | None = None) -> AsyncDjinn:
            return await stack.enter_async_context(AsyncDjinn(server.url, api_key=key, timeout=TIMEOUT_S))

        def say(line: str) -> None:
            console.print(f"{duration(notes.seconds)} {line}", markup=False)

        agents: list[SessionAgent] = []
        chats: list[ChatAgent] = []
        for number in range(plan.agents):
            if number % CHAT_EVERY == CHAT_EVERY - 1:
                chats.append(ChatAgent(number, plan, pair.server, pair.twin, notes))
                continue
            djinn, mirror = await connect(pair.server, KEYS[number % len(KEYS)]), Mirror(await connect(pair.twin))
            agents.append(SessionAgent(number, plan, pair.layers, djinn, mirror, notes, pair.folder))
        faults = Faults(plan, pair.server, await connect(pair.server, KEYS[0]), await connect(pair.twin), notes)
        beside = [asyncio.create_task(keep_sampling(pair.server, notes))]
        if plan.moves_per_second and isinstance(pair.server, Cluster):
            moving = keep_moving(pair.server, agents, plan.moves_per_second, plan.seed, findings)
            beside.append(asyncio.create_task(moving))
        every: list[SessionAgent | ChatAgent] = [*agents, *chats]
        working = [asyncio.create_task(agent.run(stop)) for agent in every]
        working.append(asyncio.create_task(faults.run(say)))
        try:
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            stop.set()  # the faults are over, or something has failed
            await asyncio.gather(*working)
        finally:
            findings.duration_s = notes.seconds
            for task in (*working, *beside):
                task.cancel()
                with suppress(asyncio.CancelledError, LoadgenError):
                    await task
        if isinstance(pair.server, Cluster):
            await look_at(pair.server, agents, findings)


def growth(findings: Findings) -> float | None:
    """How much resident memory rises from minute 10 on, in percent of its mean: the slope of the least squares times
    the duration. None of too short a run. Samples that were taken while a fault lasted do not count: there may have
    been no engine.
    """
    if findings.duration_s < SHORTEST_S:
        return None
    points = [
        (at_s, rss)
        for sample in findings.samples
        if isinstance(at_s := sample["second"], float) and isinstance(rss := sample["resident memory, MiB"], float)
        if at_s >= WARM_S and not any(one.began_s <= at_s <= one.ended_s for one in findings.faults)
    ]
    if len(points) < 2:
        return None
    times, values = zip(*points, strict=True)
    slope = statistics.linear_regression(times, values).slope
    rise: float = slope * (times[-1] - times[0]) / statistics.fmean(values)
    return 100 * rise


def judge(plan: ChaosPlan, findings: Findings) -> tuple[Figure, ...]:
    """Every target, and what goes with them, in the order of the report."""
    rise = growth(findings)
    flat = Figure("growth of resident memory from minute 10 on, up or down", "%", None, Target(FLAT))
    away = max((fault.ended_s - fault.began_s for fault in findings.faults), default=None)
    figures = [
        some("answers compared with the twin's", findings.answers),
        none_of("wrong answers", len(findings.wrong)),
        none_of("errors that no fault explains", len(findings.unexpected)),
        some("faults", len(findings.faults), least=1 if plan.seconds >= 2 * plan.every else 0),
        flat if rise is None else exact(flat.name, flat.unit, abs(rise), flat.target),
    ]
    if plan.replicas:
        sessions = sum(findings.owners.values())
        figures.append(all_of("sessions that exactly one replica has", findings.owners[1], sessions))
    if plan.moves_per_second:
        figures.append(some("sessions moved", findings.moved))
    return (
        *figures,
        exact("longest fault, until the server was ready", "s", away),
        Figure("first token of a streamed turn", "s", Spread.of(findings.first_s)),
    )


def report_of(plan: ChaosPlan, findings: Findings, server: Server) -> Report:
    """What a run has found, complete or not."""
    what = f"A cluster of {plan.replicas} replicas" if plan.replicas else "A server"
    known = {
        "actions": counts(findings.actions),
        "tokens compared": f"{findings.tokens:,}",
        "errors while a fault lasted, or a session moved": counts(findings.expected),
    }
    if plan.replicas:
        known |= {
            "moves": f"{findings.moved:,}; refused: {counts(findings.refused)}",
            "ways of turns to their owners": counts(findings.routes),
        }
    faults: list[Row] = [
        {"second": one.began_s, "fault": one.name, "seconds": one.ended_s - one.began_s, "what came of it": one.detail}
        for one in findings.faults
    ]
    skipped: list[Row] = [{"fault": it, "what came of it": f"not made: {why}"} for it, why in findings.skipped.items()]
    lead = (
        f"{plan.agents} agents take turns for {plan.minutes:g} minutes, greedily. They pause at breakpoints, fork, "
        f"move through files and rewind. About every {plan.every:g} s a fault comes to the server. A second server, "
        "which is spared, takes the same turns: its tokens are the right ones."
    )
    return Report(
        experiment="chaos",
        title=f"{what} under faults",
        lead=(lead,),
        plan=asdict(plan),
        figures=judge(plan, findings),
        tables=(
            Table("Errors that no fault explains", findings.unexpected),
            Table("Wrong answers", findings.wrong),
            Table("Faults", [*faults, *skipped]),
            Table("What agents did", [{"what": name, "how much": value} for name, value in known.items()]),
            Table(SAMPLES, findings.samples, shown=False),
        ),
        charts=_charts(findings),
        servers=(server,),
        failures=tuple(findings.failures),
        interrupted=findings.interrupted,
    )


def _charts(findings: Findings) -> tuple[Chart, ...]:
    marks = tuple(fault.began_s for fault in findings.faults)
    caption = "Of all processes of the server; thin lines are faults."
    return tuple(
        Chart(title, caption, "lines", SAMPLES, "second", name, x_label="seconds", y_label=unit, marks=marks)
        for name, unit in USES.items()
        for title in (name.partition(",")[0].capitalize(),)
    )
