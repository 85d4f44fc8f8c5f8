"""Whether a server that is killed, filled and damaged for long loses a token, an answer, or memory."""

import asyncio
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from client import AsyncDjinn, DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.soak.agent import SessionAgent
from loadgen.experiments.soak.chat import TIMEOUT_S, ChatAgent
from loadgen.experiments.soak.faults import Faults
from loadgen.experiments.soak.findings import Findings
from loadgen.experiments.soak.hosting import KEYS, HostedServer, both, shown
from loadgen.experiments.soak.notes import Notes
from loadgen.experiments.soak.plan import SoakPlan
from loadgen.experiments.soak.report import SoakReport
from loadgen.experiments.soak.sampling import keep_sampling
from loadgen.experiments.soak.summary import judge, summarize
from loadgen.experiments.soak.twin import Mirror
from loadgen.results.failures import ending_early, noting
from loadgen.results.text import duration

CHAT_EVERY = 4
"""One agent of so many is a client of OpenAI's API."""


async def run_soak(plan: SoakPlan, model: str, console: Console) -> SoakReport:
    """Run the experiment. Raises `LoadgenError` if it cannot begin.

    Cancelled, it returns what was seen until then.
    """
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="loadgen-soak-") as name:
        folder = Path(name)
        async with both(plan, model, folder / "state") as (server, twin):
            layers = await _layers(twin)
            with ending_early(findings), noting("the run", findings.failures):
                await _soak(plan, _Pair(server, twin, layers, folder), findings, console)
    summary = summarize(findings)
    return SoakReport(
        seed=plan.seed,
        plan=plan,
        server=shown(server, model, folder),
        findings=findings,
        summary=summary,
        verdicts=judge(summary, findings, plan),
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both servers, the layers of their model, and a folder for files of sessions."""

    server: HostedServer
    twin: HostedServer
    layers: int
    folder: Path


async def _layers(twin: HostedServer) -> int:
    try:
        async with AsyncDjinn(twin.url, timeout=TIMEOUT_S) as djinn:
            return (await djinn.models())[0].layers
    except DjinnError as error:
        raise LoadgenError(f"the twin failed: {error}") from error


async def _soak(plan: SoakPlan, pair: _Pair, findings: Findings, console: Console) -> None:
    """Agents, faults and samples side by side. Raises `LoadgenError` if a server does not come back."""
    notes, stop = Notes(findings), asyncio.Event()
    async with AsyncExitStack() as stack:

        async def connect(server: HostedServer, key: str | None = None) -> AsyncDjinn:
            return await stack.enter_async_context(AsyncDjinn(server.url, api_key=key, timeout=TIMEOUT_S))

        def say(line: str) -> None:
            console.print(f"{duration(notes.seconds)} {line}", markup=False)

        agents: list[SessionAgent | ChatAgent] = []
        for number in range(plan.agents):
            if number % CHAT_EVERY == CHAT_EVERY - 1:
                agents.append(ChatAgent(number, plan, pair.server, pair.twin, notes))
                continue
            djinn, mirror = await connect(pair.server, KEYS[number % len(KEYS)]), Mirror(await connect(pair.twin))
            agents.append(SessionAgent(number, plan, pair.layers, djinn, mirror, notes, pair.folder))
        faults = Faults(plan, pair.server, await connect(pair.server, KEYS[0]), await connect(pair.twin), notes)
        sampling = asyncio.create_task(keep_sampling(pair.server, notes))
        working = [asyncio.create_task(agent.run(stop)) for agent in agents]
        working.append(asyncio.create_task(faults.run(say)))
        try:
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            stop.set()  # the faults are over, or something has failed
            await asyncio.gather(*working)
        finally:
            findings.duration_s = notes.seconds
            for task in (*working, sampling):
                task.cancel()
                with suppress(asyncio.CancelledError, LoadgenError):
                    await task
