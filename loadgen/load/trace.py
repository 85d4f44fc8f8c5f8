"""What every agent does and when, and the file that keeps it.

The file has one JSON object a line, an agent each, with sorted keys and with floats in the fewest digits that give them
back: equal traces are equal bytes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from loadgen.errors import LoadgenError
from loadgen.load.lines import parse_line, read_lines

STRICT = ConfigDict(strict=True, extra="forbid")
"""Of what is read from a file: no guessing, no fields that would be ignored."""

Tokens = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn: `new_tokens` are added to the history, then exactly `completion_tokens` are generated.

    After it the agent is away for `think_s`, None after its last turn, and announces `announced_s`, None if it does not
    say for how long. `tool`: the completion is a call of a tool, which runs while the agent is away.
    """

    __pydantic_config__ = STRICT

    new_tokens: Tokens
    completion_tokens: Tokens
    think_s: Seconds | None
    announced_s: Seconds | None
    tool: bool


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """An agent that arrives `arrival_s` after the start of the run."""

    __pydantic_config__ = STRICT

    arrival_s: Seconds
    turns: Annotated[tuple[TurnPlan, ...], Field(min_length=1)]


Trace = tuple[AgentPlan, ...]

_AGENT = TypeAdapter(AgentPlan)


def final_tokens(trace: Trace) -> int:
    """Length in tokens of the longest history at its end."""
    return max(sum(turn.new_tokens + turn.completion_tokens for turn in agent.turns) for agent in trace)


def planned_turns(trace: Trace) -> int:
    """How many turns the agents have together."""
    return sum(len(agent.turns) for agent in trace)


def scaled(trace: Trace, factor: float) -> Trace:
    """The trace with every time multiplied by `factor`."""

    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    def turn(plan: TurnPlan) -> TurnPlan:
        return replace(plan, think_s=times(plan.think_s), announced_s=times(plan.announced_s))

    return tuple(AgentPlan(agent.arrival_s * factor, tuple(map(turn, agent.turns))) for agent in trace)


def trace_sha256(trace: Trace) -> str:
    """SHA-256 of the trace's file."""
    return hashlib.sha256(_encode(trace)).hexdigest()


def write_trace(trace: Trace, path: Path) -> None:
    """Write the trace to a file. Raises `LoadgenError` if it cannot be written."""
    try:
        path.write_bytes(_encode(trace))
    except OSError as error:
        raise LoadgenError(f"cannot write trace {path}: {error.strerror}") from error


def read_trace(path: Path) -> Trace:
    """Read a trace back. Raises `LoadgenError` if there is none, and names line and field of what is wrong in it."""
    trace = tuple(_parse(*line) for line in read_lines(path, "trace"))
    if not trace:
        raise LoadgenError(f"trace {path} has no agent in it")
    return trace


def _encode(trace: Trace) -> bytes:
    return b"".join(json.dumps(asdict(agent), sort_keys=True, allow_nan=False).encode() + b"\n" for agent in trace)


def _parse(where: str, line: bytes) -> AgentPlan:
    """An agent thinks between turns, not after its last."""
    agent = parse_line(_AGENT, where, line, "density writes a trace, one agent a line")
    *earlier, last = agent.turns
    for index, turn in enumerate(earlier):
        if turn.think_s is None:
            raise LoadgenError(f"{where}: turns.{index}.think_s: must be a number, because another turn follows")
    for name in ("think_s", "announced_s"):
        if getattr(last, name) is not None:
            raise LoadgenError(f"{where}: turns.{len(earlier)}.{name}: must be null, because no turn follows")
    return agent
