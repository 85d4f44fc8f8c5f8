"""What the agents of a run are like, and the trace that follows from it before the run."""

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

import numpy as np

from loadgen.errors import LoadgenError, require_at_least
from loadgen.load.arrivals import Arrivals, arrival_times
from loadgen.load.think import MAX_SIGMA, InfinityAsNull, LogNormal, ThinkTime, Uniform, read_think
from loadgen.load.trace import AgentPlan, Trace, TurnPlan, read_trace, scaled
from loadgen.plans import option

SOME_SECONDS = Uniform(5.0, 15.0)
MOSTLY_SHORT = LogNormal(0.5, 1.0)
THINK_FORM = "LOW:HIGH|lognormal:MEDIAN:SIGMA"


class Signals(StrEnum):
    """What agents tell a Djinn server about their think times."""

    ETA = "eta"
    """When they begin, and how long they will take."""
    READY = "ready"
    """When they begin, and shortly before they end."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What holds for every trace: the first `system_tokens` of each agent's first prompt are the same for all, `seed`
    decides what is drawn, and every time of the trace is multiplied by `time_scale`.

    Raises `LoadgenError` if a value is outside its range.
    """

    system_tokens: int = option(128, "tokens at the start of the first prompt that all agents share")
    seed: int = option(0, "of arrivals, think times, tool calls and texts")
    time_scale: float = option(1.0, "factor on arrival and think times; 0.1 is ten times as fast")
    signals: Signals = option(Signals.ETA, "what Djinn is told of think times")

    def __post_init__(self) -> None:
        require_at_least(0, self, "system_tokens", "seed")
        if not 0 < self.time_scale < math.inf:
            raise LoadgenError("time_scale must be above 0 and finite")


@dataclass(frozen=True, slots=True)
class Replay(Load):
    """Agents that do what the file `trace` says."""

    trace: Path


@dataclass(frozen=True, slots=True)
class Workload(Load):
    """Agents whose trace is drawn. Lengths in tokens, times in seconds at `time_scale` 1, `rate` in agents per second.

    The first prompt has `context` tokens; every later turn adds `resume_tokens` of new text. A turn generates exactly
    `completion_tokens`, and then the agent is away for a time drawn from `think`. Of the turns that another one
    follows, each is with probability `tool_share` a call of a tool instead: it generates `tool_completion_tokens`, the
    tool runs for a time drawn from `tool_think`, and the next turn's new text is its result. How long an agent
    announces to be away is that time multiplied by a lognormal factor with median 1 and `eta_noise` as its sigma.

    Raises `LoadgenError` if a value is outside its range, or would have no effect.
    """

    agents: int = option(8, "how many agents arrive")
    arrivals: Arrivals = option(Arrivals.POISSON, "how the gaps between them are distributed")
    rate: InfinityAsNull = option(1.0, "arrivals per second; inf: all at once")
    burstiness: float = option(1.0, "shape of gamma gaps: 1 is Poisson, less is burstier, more is more even")
    context: int = option(1024, "tokens of the first prompt")
    turns: int = option(3, "turns of each agent")
    resume_tokens: int = option(64, "tokens of new text in each later turn")
    completion_tokens: int = option(64, "tokens generated in each turn")
    think: ThinkTime = option(SOME_SECONDS, "seconds between turns", read=read_think, form=THINK_FORM)
    eta_noise: float = option(
        0.0, "how wrong agents are about their return: sigma of a lognormal factor, 0 is exact", form="SIGMA"
    )
    tool_share: float = option(0.0, "share of turns that call a tool, from 0 to 1")
    tool_completion_tokens: int = option(16, "tokens generated in a turn that calls a tool")
    tool_think: ThinkTime = option(MOSTLY_SHORT, "seconds that a tool takes", read=read_think, form=THINK_FORM)

    def __post_init__(self) -> None:
        Load.__post_init__(self)  # super() knows nothing of the class that slots=True makes anew
        lengths = ("context", "turns", "resume_tokens", "completion_tokens", "tool_completion_tokens")
        require_at_least(1, self, "agents", *lengths)
        if not self.rate > 0:
            raise LoadgenError("rate must be above 0")
        if not 0 < self.burstiness < math.inf:
            raise LoadgenError("burstiness must be above 0 and finite")
        if not 0 <= self.eta_noise <= MAX_SIGMA:
            raise LoadgenError(f"eta_noise must be from 0 to {MAX_SIGMA:g}")
        if not 0 <= self.tool_share <= 1:
            raise LoadgenError("tool_share must be from 0 to 1")
        if self.system_tokens >= self.context:
            raise LoadgenError(
                f"context must be above system_tokens, which is {self.system_tokens}; got {self.context}"
            )
        self._refuse_idle(self.arrivals is Arrivals.GAMMA, "arrivals is not gamma", "burstiness")
        self._refuse_idle(self.tool_share > 0, "tool_share is 0", "tool_completion_tokens", "tool_think")

    def _refuse_idle(self, used: bool, why: str, *names: str) -> None:
        """Nothing that was set is ignored."""
        for field in fields(self):
            if not used and field.name in names and getattr(self, field.name) != field.default:
                raise LoadgenError(f"{field.name} has no effect, because {why}")


def plan_trace(load: Workload | Replay) -> Trace:
    """The agents in the order of their numbers; equal for equal workloads. Raises `LoadgenError` for a bad file."""
    trace = _draw(load) if isinstance(load, Workload) else read_trace(load.trace)
    for number, agent in enumerate(trace):
        if (first := agent.turns[0].new_tokens) <= load.system_tokens:
            raise LoadgenError(
                f"system_tokens is {load.system_tokens}, but must be less than the {first} tokens with which agent "
                f"{number} of the trace begins"
            )
    return scaled(trace, load.time_scale)


def _draw(workload: Workload) -> Trace:
    """Every quantity has a random stream of its own: what one option changes leaves the others as they were."""
    for_arrivals, for_thinks, for_noise, for_tools, for_tool_thinks = np.random.default_rng(workload.seed).spawn(5)
    shape = workload.agents, workload.turns - 1
    tools = for_tools.random(shape) < workload.tool_share
    thinks = np.where(tools, workload.tool_think.draw(for_tool_thinks, shape), workload.think.draw(for_thinks, shape))
    announced = thinks * LogNormal(1.0, workload.eta_noise).draw(for_noise, shape)
    times = arrival_times(workload.arrivals, workload.agents, workload.rate, workload.burstiness, for_arrivals)
    return tuple(
        AgentPlan(time, _turns(workload, *rows))
        for time, *rows in zip(times, thinks.tolist(), announced.tolist(), tools.tolist(), strict=True)
    )


def _turns(workload: Workload, thinks: list[float], announced: list[float], tools: list[bool]) -> tuple[TurnPlan, ...]:
    new = [workload.context, *(workload.turns - 1) * [workload.resume_tokens]]
    columns = zip(new, [*thinks, None], [*announced, None], [*tools, False], strict=True)
    return tuple(
        TurnPlan(new_tokens, workload.tool_completion_tokens if tool else workload.completion_tokens, think, eta, tool)
        for new_tokens, think, eta, tool in columns
    )
