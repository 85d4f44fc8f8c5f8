"""`python -m loadgen mlperf`: what MLPerf's client for agents sends, from one of its traces.

The trace is the flat JSONL of https://github.com/mlcommons/endpoints (Apache-2.0): a row for each message of a
conversation, in the order of its turns. Each row of the user or of tools is a call. It has the conversation as it was
recorded up to there, whatever the model has answered meanwhile. The next call comes when the answer is there, and the
recorded delay is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from client import DjinnError
from client.calls import Call
from client.edge import mapped_errors
from client.errors import StreamBroken
from loadgen.errors import LoadgenError, require_at_least
from loadgen.load.records import TurnCost
from loadgen.load.turn_clock import TurnClock, Wire
from loadgen.options.common import EXIT_FAILED, EXIT_OK
from loadgen.report.tables import Table, to_rich
from loadgen.stats.distribution import Distribution
from loadgen.targets.base import MODELS, TargetSpec, check_context
from loadgen.targets.completion import CompletionEnd, read_chunk

SESSION_HEADER = "X-Session-ID"
METADATA = b'"_type": "dataset_metadata"'
"""A row with it is about the trace."""
Message = dict[str, Any]


class _Result(BaseModel):
    tool_call_id: str
    content: str


class _Row(BaseModel):
    """A message. What it has beside these fields is for the client's own scores."""

    model_config = ConfigDict(strict=True)

    conversation_id: Annotated[str, Field(pattern=r"^[ -~]+$")]
    turn: Annotated[int, Field(ge=1)]
    role: Literal["user", "assistant", "tool"]
    content: str | None = None
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_results: list[_Result] | None = None
    reasoning_content: str | None = None
    delay_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None

    def messages(self) -> list[Message]:
        """The same as chats have it."""
        if self.tool_results:
            return [{"role": "tool", **result.model_dump()} for result in self.tool_results]
        extras = {name: getattr(self, name) for name in ("tool_calls", "reasoning_content")}
        said = {name: value for name, value in extras.items() if value is not None}
        return [{"role": self.role, "content": self.content, **said}]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: the messages that are new since the call before, and how long after its answer they come."""

    new: list[Message]
    delay_s: float
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One conversation."""

    id: str
    tools: list[dict[str, Any]] | None
    turns: list[Turn]

    def salted(self, repeat: int) -> Trajectory:
        """The conversation, which shares no prefix with others, nor with its own repetitions. Raises `LoadgenError`."""
        first = self.turns[0].new[0]
        if first["role"] != "system":
            raise LoadgenError(f"conversation {self.id} has no system prompt to salt")
        salts = [blake2b(text.encode(), digest_size=2).hexdigest() for text in (str(repeat), self.id)]
        system = {**first, "content": f"[salt: {salts[0]}]\n\n{first['content']}\n\n[salt: {salts[1]}]"}
        return replace(self, turns=[replace(self.turns[0], new=[system, *self.turns[0].new[1:]]), *self.turns[1:]])


def read_trajectories(path: Path) -> list[Trajectory]:
    """The conversations of a trace. Raises `LoadgenError`, which names the line and field of what is wrong."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LoadgenError(f"cannot read {path}: {error.strerror}") from error
    meant = ((number, line) for number, line in enumerate(lines, 1) if line.strip() and METADATA not in line)
    rows = [_parse(path, number, line) for number, line in meant]
    groups = [(name, list(group)) for name, group in groupby(rows, key=lambda row: row.conversation_id)]
    if not groups or len(dict(groups)) < len(groups):
        problem = "the rows of a conversation are not together" if groups else "there is no conversation"
        raise LoadgenError(f"{path}: {problem}")
    return [_trajectory(name, group) for name, group in groups]


def _parse(path: Path, number: int, line: bytes) -> _Row:
    try:
        return _Row.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the line"
        raise LoadgenError(f"{path}, line {number}: {place}: {problem['msg']}") from error


def _trajectory(name: str, rows: list[_Row]) -> Trajectory:
    system = next((row.system for row in rows if row.system), None)
    new: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    turns: list[Turn] = []
    for row in sorted(rows, key=lambda row: row.turn):
        new += row.messages()
        if row.role != "assistant":
            turns.append(Turn(new, row.delay_seconds, row.max_new_tokens))
            new = []
    if not turns:
        raise LoadgenError(f"conversation {name} has no row of the user")
    return Trajectory(name, next((row.tools for row in rows if row.tools), None), turns)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the trajectories are replayed. Raises `LoadgenError` if a value is outside its range."""

    concurrency: int = 1
    """Conversations at a time, each of which has one call at a time."""
    delay_scale: float = 1.0
    """Factor on the recorded delays; 0: none."""
    max_tokens: int = 1024
    turn_timeout_s: float = 600.0
    salt: bool = False
    preserve_thinking: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "concurrency", "max_tokens")
        if not (0 <= self.delay_scale < math.inf and self.turn_timeout_s > 0):
            raise LoadgenError("delay_scale must be from 0 on and finite, and turn_timeout_s above 0")


class _Choice(BaseModel):
    delta: dict[str, Any]


class _Chunk(BaseModel):
    choices: tuple[_Choice, ...] = ()


@dataclass(slots=True)
class Figures:
    """What was seen of the turns, in seconds and tokens."""

    failures: list[str] = field(default_factory=list)
    left_out: int = 0
    """Turns behind one that has failed, in its conversation."""
    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    costs: list[TurnCost] = field(default_factory=list)
    duration_s: float = 0.0

    def note(self, clock: TurnClock, cost: TurnCost) -> None:
        """Take one turn that is over."""
        first, last = clock.token_times_s[0], clock.token_times_s[-1]
        self.costs.append(cost)
        self.ttft_s.append(first)
        self.latency_s.append(clock.over_s)
        if cost.completion_tokens > 1:
            self.tpot_s.append((last - first) / (cost.completion_tokens - 1))

    def summary(self) -> dict[str, Any]:
        """The same in few numbers."""
        read = sum(cost.prompt_tokens for cost in self.costs)
        written = sum(cost.completion_tokens for cost in self.costs)
        told = [cost.cached_tokens for cost in self.costs if cost.cached_tokens is not None]
        kinds = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "latency_s": self.latency_s}
        return {
            "turns": len(self.costs),
            "failed": len(self.failures),
            "left_out": self.left_out,
            "duration_s": self.duration_s,
            "prompt_tokens": read,
            "cached_share": sum(told) / read if read and told else None,
            "completion_tokens": written,
            "completion_tokens_per_s": written / self.duration_s,
            **{
                name: None if (found := Distribution.of(each)) is None else asdict(found)
                for name, each in kinds.items()
            },
        }


class Replay:
    """One run of trajectories against a server."""

    def __init__(self, spec: TargetSpec, plan: Plan) -> None:
        self._spec, self._plan = spec, plan
        self.figures = Figures()

    async def run(self, trajectories: Iterator[tuple[str, Trajectory]]) -> Figures:
        """Replay the trajectories, each under its name. Raises `LoadgenError` if the server does not have the model."""
        transport = self._spec.transport()
        try:
            check_context(self._spec, await transport.send(MODELS), 1)
        except DjinnError as error:
            raise LoadgenError(f"target {self._spec.name}: {error.message}") from error
        finally:
            await transport.close()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._plan.concurrency):
                workers.create_task(self._work(trajectories))
        self.figures.duration_s = time.perf_counter() - began
        return self.figures

    async def _work(self, trajectories: Iterator[tuple[str, Trajectory]]) -> None:
        for name, trajectory in trajectories:  # the workers take from one iterator
            wire, messages = Wire(), list[Message]()
            transport = self._spec.transport(wire.trace)
            for number, turn in enumerate(trajectory.turns):
                await asyncio.sleep(turn.delay_s * self._plan.delay_scale)
                messages += turn.new
                wire.clock = TurnClock()
                call = self._call(name, trajectory, turn, messages)
                try:
                    async with asyncio.timeout(self._plan.turn_timeout_s), transport.stream(call) as source:
                        cost = await _read(source, wire.clock)
                    self.figures.note(wire.clock, cost)
                except (DjinnError, TimeoutError) as error:
                    self.figures.failures.append(f"{name}, call {number + 1}: {str(error) or 'no answer in time'}")
                    self.figures.left_out += len(trajectory.turns) - number - 1
                    break
            await transport.close()

    def _call(self, name: str, trajectory: Trajectory, turn: Turn, messages: list[Message]) -> Call[bytes]:
        body: dict[str, Any] = {
            "model": self._spec.model,
            "messages": messages,
            "temperature": 0,
            "max_completion_tokens": turn.max_tokens or self._plan.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if trajectory.tools:
            body["tools"] = trajectory.tools
        if self._plan.preserve_thinking:
            body["chat_template_kwargs"] = {"preserve_thinking": True}
        return Call("POST", "/v1/chat/completions", bytes, json=body, headers={SESSION_HEADER: name})


async def _read(source: Any, clock: TurnClock) -> TurnCost:
    end = CompletionEnd()
    with mapped_errors(lost=StreamBroken):
        async with aclosing(source.aiter_sse()) as events:
            async for event in events:
                if not end.feed(event) and any(
                    any(value for name, value in choice.delta.items() if name != "role")
                    for choice in read_chunk(event, _Chunk).choices
                ):
                    clock.tokens()
    clock.over()
    cost = end.cost()
    if not clock.token_times_s:
        clock.token_times_s.append(clock.over_s)
    return cost


def add_options(parser: argparse.ArgumentParser) -> None:
    """The server, the trace, and how it is replayed."""
    parser.add_argument("--target", required=True, metavar="NAME=URL#MODEL", help="a server of chats that is up")
    parser.add_argument("--api-key", metavar="KEY", help="its key")
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="the trace, as flat JSON lines")
    parser.add_argument("--trajectories", type=int, metavar="N", help="conversations to replay (default: each once)")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="of them at a time (default: 1)")
    parser.add_argument(
        "--delay-scale", type=float, default=1.0, metavar="N", help="factor on recorded delays; 0: none (default: 1)"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="most in an answer (default: 1024)")
    parser.add_argument(
        "--turn-timeout-s", type=float, default=600.0, metavar="N", help="seconds for an answer (default: 600)"
    )
    parser.add_argument("--salt", action="store_true", help="conversations share no prefix")
    parser.add_argument("--preserve-thinking", action="store_true", help="earlier thoughts stay in the prompt")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures there too, as JSON")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Replay it and print the figures; returns the exit code. Raises `LoadgenError`."""
    spec = replace(TargetSpec.parse(options.target), api_key=options.api_key)
    if spec.model is None or spec.tools:
        raise LoadgenError(f"target {spec.name} is NAME=URL#MODEL here: chats are sent to it")
    names = ("concurrency", "delay_scale", "max_tokens", "turn_timeout_s", "salt", "preserve_thinking")
    plan = Plan(**{name: getattr(options, name) for name in names})
    found = read_trajectories(options.dataset)
    count = len(found) if options.trajectories is None else options.trajectories
    if count < 1:
        raise LoadgenError("trajectories must be at least 1")
    chosen = []
    for index, trajectory in enumerate(islice(cycle(found), count)):
        repeat = index // len(found) + 1
        name = trajectory.id if repeat == 1 else f"{trajectory.id}__repeat_{repeat}"
        chosen.append((name, trajectory.salted(repeat) if plan.salt else trajectory))
    with progress.status(f"{count} conversations"):
        figures = asyncio.run(Replay(spec, plan).run(iter(chosen)))
    _show(figures, options.output)
    return EXIT_FAILED if figures.failures else EXIT_OK


def _show(figures: Figures, output: Path | None) -> None:
    summary, console = figures.summary(), Console(highlight=False)
    shares = ("p50", "p90", "p99", "max")
    rows = [
        {"": label, **{share: f"{summary[name][share] * factor:.1f}" for share in shares}}
        for label, name, factor in (
            ("first token, ms", "ttft_s", 1000),
            ("token after it, ms", "tpot_s", 1000),
            ("answer, ms", "latency_s", 1000),
        )
        if summary[name]
    ]
    cached = summary["cached_share"]
    note = (
        f"{summary['turns']} turns in {summary['duration_s']:.1f} s, {summary['failed']} failed, "
        f"{summary['left_out']} left out behind those; {summary['completion_tokens_per_s']:.1f} tokens/s generated; "
        f"{summary['prompt_tokens']} tokens read" + ("" if cached is None else f", {cached:.1%} of them cached")
    )
    console.print(to_rich([Table("", rows, note)]))
    for failure in figures.failures:
        console.print(f"failed: {failure}", markup=False, soft_wrap=True)
    if output is not None:
        try:
            output.write_text(json.dumps({**summary, "failures": figures.failures}, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise LoadgenError(f"cannot write {output}: {error.strerror}") from error
