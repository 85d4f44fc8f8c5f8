"""What the agents of a run are like, when they arrive, how long they think, how they are measured; and the trace that
follows from it before the run.
"""

import argparse
import math
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, WithJsonSchema

from loadgen.errors import LoadgenError, require_at_least
from loadgen.load.trace import AgentPlan, Trace, TurnPlan, read_trace, scaled
from loadgen.plans import option


class Arrivals(StrEnum):
    """How the gaps between arrivals are distributed; their mean is the same for all."""

    POISSON = "poisson"
    """Exponentially: agents know nothing of each other."""
    GAMMA = "gamma"
    """By a gamma distribution, whose shape is the burstiness."""
    CONSTANT = "constant"
    """All the same."""


def arrival_times(
    arrivals: Arrivals, agents: int, rate: float, burstiness: float, rng: np.random.Generator
) -> tuple[float, ...]:
    """Arrival times in seconds after the start of the run, ascending, of `rate` agents per second on average.

    The times are absolute, computed before the run: an agent that starts late does not push back those that follow, as
    it would if each waited for its gap after the one before. An infinite rate lets all arrive at 0.

    `burstiness` is used by gamma arrivals alone, with the meaning that it has in `vllm bench serve`: the shape of the
    gaps' distribution, whose scale is 1 / (rate * burstiness). 1 is a Poisson process, less is burstier, more is more
    even.
    """
    gap = 1.0 / rate
    match arrivals:
        case Arrivals.POISSON:
            gaps = rng.exponential(gap, agents)
        case Arrivals.GAMMA:
            gaps = rng.gamma(burstiness, gap / burstiness, agents)
        case Arrivals.CONSTANT:
            gaps = np.full(agents, gap)
    return tuple(np.cumsum(gaps).tolist())


MAX_SIGMA = 10.0
"""Far beyond what any agent does, and short of what overflows."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Seconds drawn evenly from `low` to `high`. Raises `LoadgenError` if there are none."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise LoadgenError(f"think time {self}: LOW:HIGH needs 0 <= LOW <= HIGH, in seconds")

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
        """An array of `shape`, in seconds."""
        return rng.uniform(self.low, self.high, shape)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Seconds whose logarithm is normally distributed, with standard deviation `sigma` around that of `median`.

    Raises `LoadgenError` if a value is outside its range.
    """

    median: float
    sigma: float

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma <= MAX_SIGMA):
            raise LoadgenError(
                f"think time {self}: lognormal:MEDIAN:SIGMA needs a MEDIAN above 0, in seconds, "
                f"and a SIGMA from 0 to {MAX_SIGMA:g}"
            )

    def __str__(self) -> str:
        return f"lognormal:{self.median:g}:{self.sigma:g}"

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
        """An array of `shape`, in seconds."""
        return self.median * np.exp(self.sigma * rng.standard_normal(shape))


ThinkTime = Uniform | LogNormal


def read_think(text: str) -> ThinkTime:
    """The same for an option. Raises `argparse.ArgumentTypeError`."""
    try:
        return parse_think(text)
    except LoadgenError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_think(text: str) -> ThinkTime:
    """Read `LOW:HIGH` or `lognormal:MEDIAN:SIGMA`. Raises `LoadgenError`."""
    kind, separator, rest = text.partition(":")
    lognormal = kind == "lognormal" and separator
    first, _, second = rest.partition(":") if lognormal else (kind, separator, rest)
    try:
        values = float(first), float(second)
    except ValueError:
        raise LoadgenError(f"think time must be LOW:HIGH or lognormal:MEDIAN:SIGMA, not {text!r}") from None
    return LogNormal(*values) if lognormal else Uniform(*values)


InfinityAsNull = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}], "description": "null is infinite"}),
]
"""A float that may be infinite: written as null, which is read back as infinity."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Every target runs the same trace `repeats` times. Turns sent in the first `warmup_s` seconds of a run are in no
    distribution and no rate. A turn that takes longer than `turn_timeout_s` has failed. One is good that takes at most
    `slo_ttft_s` to its first token and `slo_tpot_s` for each further one; None is no limit.

    Raises `LoadgenError` if a value is outside its range.
    """

    repeats: int = option(1, "times that every target runs the trace, in alternating order")
    warmup_s: float = option(0.0, "seconds at the start of a run of which no turn is measured", flag="--warmup")
    turn_timeout_s: float = option(600.0, "seconds after which a turn has failed", flag="--turn-timeout")
    slo_ttft_s: float | None = option(
        None, "seconds to the first token that a good turn takes at most (default: no limit)", flag="--slo-ttft"
    )
    slo_tpot_s: float | None = option(
        None, "seconds per further token that a good turn takes at most (default: no limit)", flag="--slo-tpot"
    )

    def __post_init__(self) -> None:
        require_at_least(1, self, "repeats")
        if not 0 <= self.warmup_s < math.inf:
            raise LoadgenError("warmup_s must be at least 0 and finite, in seconds")
        if not 0 < self.turn_timeout_s < math.inf:
            raise LoadgenError("turn_timeout_s must be above 0 and finite, in seconds")
        for name in ("slo_ttft_s", "slo_tpot_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise LoadgenError(f"{name} must be above 0, in seconds")


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
            raise LoadgenError(f"context must be above system_tokens, {self.system_tokens}; got {self.context}")
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


def load_in_words(load: Workload | Replay) -> str:
    """The load in a sentence."""
    if isinstance(load, Replay):
        return (
            f"The agents of {load.trace.name}, {load.system_tokens} tokens shared; signals: {load.signals}."
            f"{_scale(load)}"
        )
    return f"{load.agents} agents, {load.rate:g} a second ({arrivals_in_words(load)}), {agent_in_words(load)}"


def agent_in_words(load: Workload) -> str:
    """The rest of the sentence: what each agent does."""
    return (
        f"{load.turns} turns each: a prompt of {load.context} tokens ({load.system_tokens} shared), "
        f"{load.resume_tokens} more in each later turn, {load.completion_tokens} generated; seconds of thinking in "
        f"between: {load.think}{_tools(load)}; signals: {_signals(load)}.{_scale(load)}"
    )


def _scale(load: Load) -> str:
    return "" if load.time_scale == 1 else f" All times multiplied by {load.time_scale:g}."


def arrivals_in_words(load: Workload) -> str:
    """How the gaps between arrivals are distributed."""
    return f"gamma, burstiness {load.burstiness:g}" if load.arrivals is Arrivals.GAMMA else load.arrivals


def _signals(load: Workload) -> str:
    """How well the agents know when they come back is a part of what is measured."""
    if load.signals is not Signals.ETA:
        return load.signals
    return f"eta, off by a lognormal factor of sigma {load.eta_noise:g}" if load.eta_noise else "eta, exact"


def _tools(load: Workload) -> str:
    if not load.tool_share:
        return ""
    return f", after the {load.tool_share:.0%} of turns that call a tool: {load.tool_think}"
