"""Many agents against the stub, and what the load generator makes of its delays."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from pydantic import BaseModel

from client.calls import Call
from loadgen.errors import LoadgenError
from loadgen.experiments.density.running import Runner, few_collections
from loadgen.load.arrivals import Arrivals
from loadgen.load.corpus import python_topics
from loadgen.load.prompts import cut_prompts
from loadgen.load.records import Run
from loadgen.load.think import Uniform
from loadgen.load.trace import final_tokens
from loadgen.load.workload import Workload, plan_trace
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
