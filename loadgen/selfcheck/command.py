"""`python -m loadgen selfcheck`: many agents against the stub, and what the load generator makes of its delays."""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel
from rich.console import Console

from client import DjinnError
from client.calls import Call
from loadgen.errors import LoadgenError
from loadgen.experiments.density.running import Runner, few_collections
from loadgen.load.prompts import cut_prompts, python_topics
from loadgen.load.records import Run
from loadgen.load.trace import final_tokens
from loadgen.load.workload import Arrivals, Uniform, Workload, plan_trace
from loadgen.options.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from loadgen.report.tables import Table, to_rich
from loadgen.selfcheck.stub import MODEL, READY_LINE
from loadgen.stats import Distribution
from loadgen.targets import OpenAITarget, TargetSpec

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Delays:
    """What the stub is told to do: seconds to the first token, and from one token to the next."""

    ttft_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """One delay: as it was set, as the stub kept it by its own clock, and as the load generator saw it."""

    name: str
    set_s: float
    kept: Distribution
    seen: Distribution

    def error_s(self, percentile: str) -> float:
        """How much longer the load generator says that it was than the stub."""
        return float(getattr(self.seen, percentile)) - float(getattr(self.kept, percentile))


class _Kept(BaseModel):
    first_s: tuple[float, ...]
    gaps_s: tuple[float, ...]


@contextmanager
def serving(delays: Delays) -> Iterator[str]:
    """The stub in a process of its own, out of reach of the terminal's Ctrl-C; gives its URL.

    Raises `LoadgenError` if it does not start.
    """
    options = ("--ttft", repr(delays.ttft_s), "--gap", repr(delays.gap_s))
    command = [sys.executable, "-m", "loadgen.selfcheck.stub", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(READY_LINE):
                raise LoadgenError("the stub did not start")
            yield f"http://127.0.0.1:{line.removeprefix(READY_LINE).strip()}"
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def plan_load(delays: Delays, agents: int, tokens: int) -> Workload:
    """Two turns of each agent. All have come after half of the first, so that they run at once."""
    return Workload(
        agents=agents,
        arrivals=Arrivals.CONSTANT,
        rate=agents / ((delays.ttft_s + tokens * delays.gap_s) / 2),
        context=256,
        turns=2,
        completion_tokens=tokens,
        think=Uniform(0.0, 0.0),
    )


async def check(url: str, delays: Delays, workload: Workload) -> tuple[Run, tuple[Check, ...]]:
    """Run the load on the stub; of a run that was interrupted nothing is compared.

    Raises `LoadgenError` if nothing came of it, and `client.DjinnError`.
    """
    trace = plan_trace(workload)
    target = OpenAITarget(TargetSpec("stub", url, MODEL), MODEL)
    try:
        await target.prepare(final_tokens(trace))
        prompts = await cut_prompts(trace, workload, python_topics(), target.tokenize)
        with few_collections():
            run = await Runner(target, lambda _run, _in_flight: None).execute(trace, prompts)
        if run.interrupted:
            return run, ()
        kept = await target.transport.send(Call("GET", "/done", _Kept.model_validate_json))
    finally:
        await target.close()
    gaps = [later - earlier for turn in run.turns for earlier, later in pairwise(turn.token_times_s)]
    return run, (
        _compare("time to first token", delays.ttft_s, kept.first_s, [turn.ttft_s for turn in run.turns]),
        _compare("inter-token latency", delays.gap_s, kept.gaps_s, gaps),
    )


def _compare(name: str, set_s: float, kept_s: Sequence[float], seen_s: Sequence[float]) -> Check:
    kept, seen = Distribution.of(kept_s), Distribution.of(seen_s)
    if kept is None or seen is None:
        raise LoadgenError(f"there was no {name} to compare")
    return Check(name, set_s, kept, seen)


PERCENTILES = ("p50", "p99")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The load and what may be off."""
    for flag, kind, default, text in (
        ("--agents", int, 200, "agents at once"),
        ("--tokens", int, 120, "tokens of each turn"),
        ("--ttft", float, 0.2, "seconds until the stub's first token"),
        ("--gap", float, 0.2, "seconds from one of its tokens to the next"),
        ("--tolerance", float, 0.002, "seconds that a figure may be off"),
    ):
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it and print the figures; returns the exit code. Raises `LoadgenError`."""
    for name in ("tokens", "ttft", "gap", "tolerance"):
        if not getattr(options, name) > 0:
            raise LoadgenError(f"{name} must be above 0")
    delays = Delays(options.ttft, options.gap)
    workload = plan_load(delays, options.agents, options.tokens)
    progress.print(f"{options.agents} agents on a stub, two turns each", highlight=False)
    try:
        with serving(delays) as url:
            seen, checks = asyncio.run(check(url, delays, workload))
    except DjinnError as error:
        raise LoadgenError(f"the stub failed: {error}") from error
    if seen.interrupted:
        return EXIT_INTERRUPTED
    output = Console(highlight=False)
    output.print(to_rich([_table(seen, checks)]))
    exact = all(abs(one.error_s(name)) <= options.tolerance for one in checks for name in PERCENTILES)
    output.print(f"{'within' if exact else 'NOT within'} {1000 * options.tolerance:g} ms", markup=False)
    return EXIT_OK if exact and not seen.failures else EXIT_FAILED


def _table(seen: Run, checks: Sequence[Check]) -> Table:
    rows = [
        {
            "": one.name,
            "set": _milliseconds(one.set_s),
            **{f"stub {name}": _milliseconds(getattr(one.kept, name)) for name in PERCENTILES},
            **{f"seen {name}": _milliseconds(getattr(one.seen, name)) for name in PERCENTILES},
            **{f"off {name}": _milliseconds(one.error_s(name)) for name in PERCENTILES},
        }
        for one in checks
    ]
    late = Distribution.of(turn.sent_s - turn.due_s for turn in seen.turns)
    events = sum(len(turn.token_times_s) for turn in seen.turns)
    note = (
        f"{len(seen.turns)} turns, {len(seen.failures)} failures, {events / seen.duration_s:,.0f} events a second; "
        f"lateness of sending p99 {_milliseconds(None if late is None else late.p99)} ms."
    )
    return Table("milliseconds: as set, as the stub kept it, as the load generator saw it", rows, note)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"
